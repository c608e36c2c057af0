//! NVRTC, NVIDIA's compiler in a library: from the text that [`crate::cuda::source`] gives to a cubin, with what
//! each kernel takes of the machine.
//!
//! The library is found when the program runs; see [`Nvrtc::load`]. No GPU and no driver are needed.

use std::ffi::{CStr, CString, OsString, c_char, c_int, c_void};
use std::fmt;
use std::path::{Path, PathBuf};
use std::ptr::null;

use crate::arguments::{Constant, ConstantValue};
use crate::cubin::{self, KernelResources};
use crate::native::{open_library, symbol};

/// Names the library in place of all others.
const VARIABLE: &str = "LILY_NVRTC";
/// Major versions of CUDA whose NVRTC compiles the shim, newest first.
const VERSIONS: [u32; 2] = [13, 12];

/// Why nothing was compiled.
#[derive(Debug, thiserror::Error)]
pub enum NvrtcError {
    /// The library is not there, or is not what it should be.
    #[error("no NVRTC: {0}")]
    Missing(String),
    /// The text has a zero byte, or a value has no literal.
    #[error("{0}")]
    Argument(String),
    /// The compiler refuses the text; its messages name lines of the kernel files.
    #[error("{0}")]
    Compile(String),
}

/// How a text is compiled.
#[derive(Debug, Clone, PartialEq)]
pub struct CompileOptions {
    /// The architecture: `sm_90` gives a cubin for that alone, `compute_90` PTX for all later ones.
    pub architecture: String,
    /// Values of function constants. Others are zero and not defined.
    pub constants: Vec<Constant>,
    /// Compile this kernel alone.
    pub kernel: Option<String>,
    /// A bit for each buffer index: whether a `constant T&` with this index is a value among the entry's
    /// parameters, in place of an address.
    pub by_value: u32,
    /// Simdgroup functions leave out lanes that have returned or that the threadgroup's size never had, as Metal
    /// has it. Else every simdgroup that calls one must be whole.
    pub partial_simdgroups: bool,
    /// Products and sums are not fused, division and square roots are rounded correctly: results that can be
    /// compared with the emulator's bit for bit, unless kernels call functions or multiply 16-bit matrices.
    pub exact: bool,
    /// Further options of NVRTC's own.
    pub further: Vec<String>,
}

impl CompileOptions {
    /// For this architecture, with no constants.
    pub fn new(architecture: &str) -> Self {
        Self {
            architecture: architecture.to_owned(),
            constants: Vec::new(),
            kernel: None,
            by_value: 0,
            partial_simdgroups: false,
            exact: false,
            further: Vec::new(),
        }
    }

    fn arguments(&self) -> Result<Vec<String>, NvrtcError> {
        let mut all = vec![
            format!("--gpu-architecture={}", self.architecture),
            "--std=c++17".to_owned(),
            "--device-as-default-execution-space".to_owned(),
            // Constants make many a comparison pointless; the kernels are judged by other compilers.
            "--disable-warnings".to_owned(),
            // Profilers and checkers then name lines of the kernel files. It does not change the code.
            "--generate-line-info".to_owned(),
            format!("--fmad={}", !self.exact),
            format!("--prec-div={}", self.exact),
            format!("--prec-sqrt={}", self.exact),
            format!("--define-macro=MSL_BY_VALUE={:#x}u", self.by_value),
        ];
        let mut define = |text: String| all.push(format!("--define-macro={text}"));
        if self.partial_simdgroups {
            define("MSL_PARTIAL_SIMDGROUPS=1".to_owned());
        }
        if let Some(kernel) = &self.kernel {
            define("MSL_ONLY=1".to_owned());
            define(format!("MSL_ONLY_{kernel}=1"));
        }
        for constant in &self.constants {
            define(format!("MSL_FC_{}={}", constant.index, literal(constant)?));
        }
        all.extend(self.further.iter().cloned());
        Ok(all)
    }
}

fn literal(constant: &Constant) -> Result<String, NvrtcError> {
    match constant.value {
        ConstantValue::Bool(value) => Ok(value.to_string()),
        ConstantValue::UShort(value) => Ok(value.to_string()),
        ConstantValue::UInt(value) => Ok(format!("{value}u")),
        // The lowest has no literal of its own.
        ConstantValue::Int(value) => Ok(format!("(int){:#x}u", value.cast_unsigned())),
        ConstantValue::Float(value) if value.is_finite() => Ok(format!("{value:e}f")),
        ConstantValue::Float(value) => Err(NvrtcError::Argument(format!(
            "function constant {} is {value}, which has no literal",
            constant.index
        ))),
    }
}

/// What the compiler made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Compiled {
    /// What the driver loads; empty if the architecture is a `compute_` one.
    pub cubin: Vec<u8>,
    /// The code before the last step, which the driver can load too.
    pub ptx: String,
    /// The compiler's remarks; empty unless an option asks for some.
    pub log: String,
    /// The kernels by name; empty without a cubin.
    pub kernels: Vec<KernelResources>,
}

type Program = *mut c_void;

// As in NVRTC's header, since CUDA 11.
type GetErrorString = unsafe extern "C" fn(c_int) -> *const c_char;
type GetVersion = unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int;
type CreateProgram = unsafe extern "C" fn(
    *mut Program,
    *const c_char,
    *const c_char,
    c_int,
    *const *const c_char,
    *const *const c_char,
) -> c_int;
type DestroyProgram = unsafe extern "C" fn(*mut Program) -> c_int;
type CompileProgram = unsafe extern "C" fn(Program, c_int, *const *const c_char) -> c_int;
type GetSize = unsafe extern "C" fn(Program, *mut usize) -> c_int;
type Copy = unsafe extern "C" fn(Program, *mut c_char) -> c_int;

/// NVRTC's functions. They may be called from several threads.
struct Functions {
    error: GetErrorString,
    version: GetVersion,
    create: CreateProgram,
    destroy: DestroyProgram,
    compile: CompileProgram,
    log: Output,
    ptx: Output,
    cubin: Output,
}

/// Tells how many bytes a result has, and copies it.
struct Output {
    size: GetSize,
    copy: Copy,
}

/// The compiler. It stays loaded until the process ends.
pub struct Nvrtc {
    functions: Functions,
    path: PathBuf,
    version: (u32, u32),
}

impl fmt::Debug for Nvrtc {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (major, minor) = self.version;
        write!(out, "NVRTC {major}.{minor} ({})", self.path.display())
    }
}

impl Nvrtc {
    /// Finds the library: the one that `LILY_NVRTC` names, else the loader's (`LD_LIBRARY_PATH` included), else
    /// that of a CUDA toolkit below `/usr/local`, else that of a Python package (`nvidia-cuda-nvrtc`).
    pub fn load() -> Result<Self, NvrtcError> {
        if let Some(named) = std::env::var_os(VARIABLE).filter(|name| !name.is_empty()) {
            return Self::open(Path::new(&named));
        }
        let mut tried = Vec::new();
        for candidate in candidates() {
            match Self::open(&candidate) {
                Ok(found) => return Ok(found),
                Err(error) => tried.push(error.to_string()),
            }
        }
        let why = tried.first().cloned().unwrap_or_default();
        Err(NvrtcError::Missing(format!(
            "install a CUDA toolkit or the Python package nvidia-cuda-nvrtc, or name libnvrtc.so in {VARIABLE} \
             ({why})"
        )))
    }

    /// Loads this library.
    pub fn open(path: &Path) -> Result<Self, NvrtcError> {
        // It asks the loader for a second library, which may know no place but the first one's.
        for companion in companions(path) {
            // Where this one is wrong, the compiler says so.
            let _ = open_library(&companion);
        }
        let handle = open_library(path).map_err(NvrtcError::Missing)?;
        macro_rules! function {
            ($name:literal, $type:ty) => {{
                let address = symbol(handle, $name, path).map_err(NvrtcError::Missing)?;
                // SAFETY: NVRTC's function of this name has this type.
                unsafe { std::mem::transmute::<*mut c_void, $type>(address) }
            }};
        }
        let functions = Functions {
            error: function!(c"nvrtcGetErrorString", GetErrorString),
            version: function!(c"nvrtcVersion", GetVersion),
            create: function!(c"nvrtcCreateProgram", CreateProgram),
            destroy: function!(c"nvrtcDestroyProgram", DestroyProgram),
            compile: function!(c"nvrtcCompileProgram", CompileProgram),
            log: Output {
                size: function!(c"nvrtcGetProgramLogSize", GetSize),
                copy: function!(c"nvrtcGetProgramLog", Copy),
            },
            ptx: Output {
                size: function!(c"nvrtcGetPTXSize", GetSize),
                copy: function!(c"nvrtcGetPTX", Copy),
            },
            cubin: Output {
                size: function!(c"nvrtcGetCUBINSize", GetSize),
                copy: function!(c"nvrtcGetCUBIN", Copy),
            },
        };
        let (mut major, mut minor) = (0, 0);
        // SAFETY: both are valid for the call.
        unsafe { (functions.version)(&mut major, &mut minor) };
        Ok(Self {
            functions,
            path: path.to_owned(),
            version: (major.cast_unsigned(), minor.cast_unsigned()),
        })
    }

    /// Its version, major and minor.
    pub fn version(&self) -> (u32, u32) {
        self.version
    }

    /// Where it was found; a mere name if the loader knew the place.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Compiles a text that includes nothing.
    pub fn compile(&self, source: &str, options: &CompileOptions) -> Result<Compiled, NvrtcError> {
        let c_string = |text: &str| {
            CString::new(text).map_err(|_| NvrtcError::Argument("a zero byte in a text".to_owned()))
        };
        let source = c_string(source)?;
        let arguments = options.arguments()?;
        let arguments: Vec<_> = arguments
            .iter()
            .map(|argument| c_string(argument))
            .collect::<Result<_, _>>()?;
        let pointers: Vec<_> = arguments.iter().map(|argument| argument.as_ptr()).collect();
        let program = self.program(&source)?;
        // SAFETY: the program is valid, the pointers are to C strings that live until after the call.
        let status = unsafe {
            (self.functions.compile)(program.raw, pointers.len() as c_int, pointers.as_ptr())
        };
        let log = program.text(&self.functions.log)?;
        if status != 0 {
            let message = if log.is_empty() {
                self.message(status)
            } else {
                log
            };
            return Err(NvrtcError::Compile(message));
        }
        let ptx = program.text(&self.functions.ptx)?;
        let mut compiled = Compiled {
            cubin: Vec::new(),
            ptx,
            log,
            kernels: Vec::new(),
        };
        if options.architecture.starts_with("sm_") {
            compiled.cubin = program.bytes(&self.functions.cubin)?;
            compiled.kernels = cubin::kernels(&compiled.cubin).ok_or_else(|| {
                NvrtcError::Compile("a cubin of a form that is not known".to_owned())
            })?;
        }
        Ok(compiled)
    }

    fn program(&self, source: &CStr) -> Result<OwnedProgram<'_>, NvrtcError> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: the source and the name are C strings, which NVRTC copies; there are no headers.
        let status = unsafe {
            (self.functions.create)(
                &mut raw,
                source.as_ptr(),
                c"kernels.cu".as_ptr(),
                0,
                null(),
                null(),
            )
        };
        if status != 0 {
            return Err(NvrtcError::Compile(self.message(status)));
        }
        Ok(OwnedProgram { nvrtc: self, raw })
    }

    fn message(&self, status: c_int) -> String {
        // SAFETY: NVRTC gives a constant C string for every number.
        let text = unsafe { CStr::from_ptr((self.functions.error)(status)) };
        text.to_string_lossy().into_owned()
    }
}

struct OwnedProgram<'a> {
    nvrtc: &'a Nvrtc,
    raw: Program,
}

impl Drop for OwnedProgram<'_> {
    fn drop(&mut self) {
        // SAFETY: the program is valid and is not used again.
        unsafe { (self.nvrtc.functions.destroy)(&mut self.raw) };
    }
}

impl OwnedProgram<'_> {
    fn bytes(&self, output: &Output) -> Result<Vec<u8>, NvrtcError> {
        let failed = |status| NvrtcError::Compile(self.nvrtc.message(status));
        let mut size = 0;
        // SAFETY: the program is valid, and so is the size for the call.
        let status = unsafe { (output.size)(self.raw, &mut size) };
        if status != 0 {
            return Err(failed(status));
        }
        let mut bytes = vec![0; size];
        // SAFETY: NVRTC writes as many bytes as it has just said.
        let status = unsafe { (output.copy)(self.raw, bytes.as_mut_ptr().cast()) };
        if status != 0 {
            return Err(failed(status));
        }
        Ok(bytes)
    }

    /// Without the zero at its end.
    fn text(&self, output: &Output) -> Result<String, NvrtcError> {
        let bytes = self.bytes(output)?;
        let text = bytes.strip_suffix(&[0]).unwrap_or(&bytes);
        Ok(String::from_utf8_lossy(text).into_owned())
    }
}

/// Names under which the library may be found.
fn candidates() -> Vec<PathBuf> {
    let file = |version: u32| format!("libnvrtc.so.{version}");
    let mut all: Vec<PathBuf> = VERSIONS.iter().map(|v| file(*v).into()).collect();
    all.push("libnvrtc.so".into());
    for toolkit in entries("/usr/local".as_ref(), "cuda") {
        all.extend(VERSIONS.map(|v| toolkit.join("lib64").join(file(v))));
    }
    for packages in python_packages() {
        let nvidia = packages.join("nvidia");
        for version in VERSIONS {
            // Wheels had a directory for each library before CUDA 13.
            let directories = [format!("cu{version}"), "cuda_nvrtc".to_owned()];
            for directory in directories {
                all.push(nvidia.join(directory).join("lib").join(file(version)));
            }
        }
    }
    let is_there = |path: &PathBuf| path.parent() == Some(Path::new("")) || path.is_file();
    all.retain(is_there);
    all
}

/// Where Python keeps packages: of the active environment, of the user, of the system.
fn python_packages() -> Vec<PathBuf> {
    let variable = |name: &str| std::env::var_os(name).filter(|value: &OsString| !value.is_empty());
    let mut roots: Vec<PathBuf> = variable("VIRTUAL_ENV")
        .map(PathBuf::from)
        .into_iter()
        .collect();
    roots.extend(variable("HOME").map(|home| PathBuf::from(home).join(".local")));
    roots.extend(["/usr/local", "/usr"].map(PathBuf::from));
    let libraries = roots
        .iter()
        .flat_map(|root| entries(&root.join("lib"), "python3"));
    libraries
        .flat_map(|library| ["site-packages", "dist-packages"].map(|name| library.join(name)))
        .collect()
}

/// What of a directory begins so, the highest name first.
fn entries(directory: &Path, start: &str) -> Vec<PathBuf> {
    let read = std::fs::read_dir(directory).into_iter().flatten().flatten();
    let named = read.filter(|entry| entry.file_name().to_string_lossy().starts_with(start));
    let mut found: Vec<_> = named.map(|entry| entry.path()).collect();
    found.sort();
    found.reverse();
    found
}

/// The library that NVRTC itself loads, beside it.
fn companions(path: &Path) -> Vec<PathBuf> {
    let directory = path.parent().filter(|parent| *parent != Path::new(""));
    directory
        .map(|directory| entries(directory, "libnvrtc-builtins.so"))
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_written_as_literals() {
        for (value, expected) in [
            (ConstantValue::Bool(true), "true"),
            (ConstantValue::UShort(7), "7"),
            (ConstantValue::UInt(u32::MAX), "4294967295u"),
            (ConstantValue::Int(i32::MIN), "(int)0x80000000u"),
            (ConstantValue::Float(1e-6), "1e-6f"),
            (ConstantValue::Float(-2.0), "-2e0f"),
        ] {
            assert_eq!(literal(&Constant { index: 0, value }).unwrap(), expected);
        }
        let value = ConstantValue::Float(f32::NAN);
        let error = literal(&Constant { index: 3, value }).unwrap_err();
        assert_eq!(
            error.to_string(),
            "function constant 3 is NaN, which has no literal"
        );
    }

    #[test]
    fn a_library_that_is_not_there_is_named() {
        let error = Nvrtc::open(Path::new("/nowhere/libnvrtc.so")).unwrap_err();
        let message = error.to_string();
        assert!(
            message.starts_with("no NVRTC: /nowhere/libnvrtc.so"),
            "{message}"
        );
    }
}
