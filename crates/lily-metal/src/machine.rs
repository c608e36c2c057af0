//! Which Mac this is: asked of the system, never guessed from a name.

use crate::registry;
use lily_plan::DeviceError;
use objc2::runtime::ProtocolObject;
use objc2_foundation::NSProcessInfo;
use objc2_metal::{MTLDevice, MTLGPUFamily};

/// The first macOS with residency sets and math modes.
const OLDEST_SYSTEM: usize = 15;
/// The first macOS with version 4 of Metal's language.
const LANGUAGE_4_SYSTEM: usize = 26;

/// The first family whose GPUs have matrix units of their own (M5). Others compile tensor operations too, and run them
/// where everything else runs.
const MATRIX_UNITS_FAMILY: usize = 10;
/// The first macOS whose tensor operations take bfloats: major, minor.
const TENSORS_SYSTEM: [usize; 2] = [26, 1];
/// The first macOS whose tensor operations take codes of four bits.
const PACKED_SYSTEM: [usize; 2] = [26, 4];

/// What a Mac's GPU says of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Machine {
    /// Its name, such as "Apple M1".
    pub name: String,
    /// Its architecture, such as "applegpu_g13g".
    pub architecture: String,
    /// The latest family from Apple7 (M1) to Apple10 (M5) that it belongs to, as a number; a later one counts as
    /// Apple10. 0 if none.
    pub family: usize,
    /// The version of Metal that it belongs to, 3 or 4; 0 if neither.
    pub metal: usize,
    /// The version of macOS: major, minor, patch.
    pub system: [usize; 3],
    /// GPU cores, as the system's registry has them; 0 if it has not.
    pub cores: usize,
    /// Bytes that the system recommends to keep ready for the GPU at most.
    pub recommended_bytes: u64,
    /// Bytes of the largest buffer.
    pub largest_buffer: u64,
}

impl Machine {
    pub(crate) fn of(device: &ProtocolObject<dyn MTLDevice>) -> Self {
        let highest = |families: &[(usize, MTLGPUFamily)]| {
            let supported = families
                .iter()
                .filter(|(_, family)| device.supportsFamily(*family));
            supported.map(|(number, _)| *number).max().unwrap_or(0)
        };
        let system = system_version();
        Machine {
            name: device.name().to_string(),
            // A system that does not have it is refused next.
            architecture: if system[0] >= 14 {
                device.architecture().name().to_string()
            } else {
                "unknown".into()
            },
            family: highest(&[
                (7, MTLGPUFamily::Apple7),
                (8, MTLGPUFamily::Apple8),
                (9, MTLGPUFamily::Apple9),
                (10, MTLGPUFamily::Apple10),
            ]),
            metal: highest(&[(3, MTLGPUFamily::Metal3), (4, MTLGPUFamily::Metal4)]),
            system,
            cores: registry::gpu_cores().unwrap_or(0),
            recommended_bytes: device.recommendedMaxWorkingSetSize(),
            largest_buffer: device.maxBufferLength() as u64,
        }
    }

    /// Refuses what the kernels and this crate do not run on.
    pub(crate) fn check(&self) -> Result<(), DeviceError> {
        let reason = if self.system[0] < OLDEST_SYSTEM {
            format!("macOS {OLDEST_SYSTEM} or later is needed")
        } else if self.family < 7 || self.metal < 3 {
            "an Apple Silicon GPU is needed, M1 or later".to_string()
        } else {
            return Ok(());
        };
        Err(DeviceError::Unsupported {
            device: "metal".into(),
            what: format!("kernels on {}", self.hardware()),
            reason: format!("{reason}; --device cpu runs everywhere"),
        })
    }

    /// Whether kernels are compiled as version 4 of Metal's language; otherwise as 3.2.
    pub(crate) fn has_language_4(&self) -> bool {
        self.system[0] >= LANGUAGE_4_SYSTEM
    }

    /// Whether tensor operations are worth a try; why not, otherwise.
    pub(crate) fn has_tensors(&self) -> Result<(), String> {
        let [major, minor] = TENSORS_SYSTEM;
        if self.family < MATRIX_UNITS_FAMILY {
            Err("this GPU has no other matrix units".into())
        } else if self.metal < 4 || self.system[..2] < TENSORS_SYSTEM[..] {
            Err(format!("tensor operations need macOS {major}.{minor}"))
        } else {
            Ok(())
        }
    }

    /// Whether tensor operations on codes of four bits are worth a try, where there are tensor operations; why not,
    /// otherwise.
    pub(crate) fn has_packed_tensors(&self) -> Result<(), String> {
        let [major, minor] = PACKED_SYSTEM;
        if self.system[..2] < PACKED_SYSTEM[..] {
            return Err(format!("codes of four bits need macOS {major}.{minor}"));
        }
        Ok(())
    }

    /// Everything that tells machines apart, in a line.
    pub(crate) fn hardware(&self) -> String {
        let Machine {
            name,
            architecture,
            family,
            metal,
            system: [major, minor, patch],
            ..
        } = self;
        format!(
            "{name} ({architecture}, family Apple{family}, Metal {metal}, macOS {major}.{minor}.{patch})"
        )
    }
}

fn system_version() -> [usize; 3] {
    let version = NSProcessInfo::processInfo().operatingSystemVersion();
    let major = match version.majorVersion.unsigned_abs() {
        // What macOS 26 says to programs that were linked with an older SDK (dotnet/runtime#116536).
        16 => 26,
        major => major,
    };
    [
        major,
        version.minorVersion.unsigned_abs(),
        version.patchVersion.unsigned_abs(),
    ]
}
