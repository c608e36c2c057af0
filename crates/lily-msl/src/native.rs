//! Loading libraries, and calling into one that the emulator has built. Unsafe code is here and in
//! [`crate::nvrtc`] alone.
//!
//! The layouts here are those of `shim/msl_cpu.h`.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::Path;

/// A bound buffer.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Buffer {
    pub pointer: *mut u8,
    pub bytes: u64,
    pub line_offset: u64,
    pub descriptor: *const TensorDescriptor,
    pub read_only: u32,
    pub padding: u32,
}

/// What a kernel sees of a tensor that is bound as a resource.
#[repr(C)]
pub(crate) struct TensorDescriptor {
    pub pointer: *mut u8,
    pub extents: [i32; 2],
    pub stride: i64,
    pub offsets: [i64; 2],
}

#[repr(C)]
struct RawConstant {
    value: *const u8,
    index: u32,
    bytes: u32,
}

#[repr(C)]
struct RawDispatch {
    buffers: *const Buffer,
    threadgroup_bytes: *const u32,
    constants: *const RawConstant,
    buffer_count: u32,
    threadgroup_count: u32,
    constant_count: u32,
    counters_only: u32,
    grid: [u32; 3],
    threads: [u32; 3],
    seed: u64,
}

pub(crate) const BUFFERS: usize = 31;

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct RawTraffic {
    pub read_bytes: u64,
    pub written_bytes: u64,
    pub read_lines: u64,
    pub written_lines: u64,
    pub read_accesses: u64,
    pub written_accesses: u64,
}

#[repr(C)]
pub(crate) struct RawReport {
    pub switches: u64,
    pub threadgroup_barriers: u64,
    pub simdgroup_barriers: u64,
    pub simdgroup_operations: u64,
    /// By index; the last are those that kernels reach by address.
    pub buffers: [RawTraffic; BUFFERS + 1],
    pub threadgroup_read_bytes: u64,
    pub threadgroup_written_bytes: u64,
    pub threadgroup_accesses: u64,
    pub bank_conflicts: u64,
    pub code_offset: u64,
    pub fault: u32,
    pub threadgroup: [u32; 3],
    pub thread: u32,
    pub partial_simdgroup_operations: u32,
    pub message: [c_char; 1024],
}

impl RawReport {
    fn empty() -> Self {
        let traffic = RawTraffic {
            read_bytes: 0,
            written_bytes: 0,
            read_lines: 0,
            written_lines: 0,
            read_accesses: 0,
            written_accesses: 0,
        };
        Self {
            switches: 0,
            threadgroup_barriers: 0,
            simdgroup_barriers: 0,
            simdgroup_operations: 0,
            buffers: [traffic; BUFFERS + 1],
            threadgroup_read_bytes: 0,
            threadgroup_written_bytes: 0,
            threadgroup_accesses: 0,
            bank_conflicts: 0,
            code_offset: 0,
            fault: 0,
            threadgroup: [0; 3],
            thread: 0,
            partial_simdgroup_operations: 0,
            message: [0; 1024],
        }
    }

    pub fn message(&self) -> String {
        let bytes: Vec<u8> = self
            .message
            .iter()
            .take_while(|c| **c != 0)
            .map(|c| c.cast_unsigned_byte())
            .collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

/// `c_char` is signed on some machines and unsigned on others.
trait CastUnsignedByte {
    fn cast_unsigned_byte(self) -> u8;
}

impl CastUnsignedByte for c_char {
    fn cast_unsigned_byte(self) -> u8 {
        self.to_ne_bytes()[0]
    }
}

/// Everything that a dispatch needs, in the library's own terms.
pub(crate) struct Dispatch<'a> {
    pub buffers: &'a [Buffer],
    pub threadgroup_bytes: &'a [u32],
    pub constants: &'a [(u32, Vec<u8>)],
    pub counters_only: bool,
    pub grid: [u32; 3],
    pub threads: [u32; 3],
    pub seed: u64,
}

type Find = unsafe extern "C" fn(*const c_char) -> *const c_void;
type Run = unsafe extern "C" fn(*const c_void, *const RawDispatch, *mut RawReport) -> c_int;

/// Loads a library, for good. Loading runs its initialisers: those of a library that [`crate::Emulator`] has built only
/// link the kernels and constants into lists (`Reg` and `FcReg` in msl_cpu.h).
pub(crate) fn open_library(path: &Path) -> Result<*mut c_void, String> {
    let name = CString::new(path.as_os_str().as_encoded_bytes())
        .map_err(|_| format!("{}: a name with a zero byte", path.display()))?;
    // SAFETY: the name is a C string; whoever calls this trusts the library.
    let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if !handle.is_null() {
        return Ok(handle);
    }
    // SAFETY: dlerror gives null or a C string that is valid until this thread's next call.
    let message = unsafe {
        let text = libc::dlerror();
        if text.is_null() {
            String::new()
        } else {
            CStr::from_ptr(text).to_string_lossy().into_owned()
        }
    };
    // The loader names most files itself.
    if message.starts_with(&*path.to_string_lossy()) {
        return Err(message);
    }
    Err(format!("{}: {message}", path.display()))
}

/// The address of a function of a library that [`open_library`] gave.
pub(crate) fn symbol(handle: *mut c_void, name: &CStr, path: &Path) -> Result<*mut c_void, String> {
    // SAFETY: the handle is open and stays so, the name is a C string.
    let address = unsafe { libc::dlsym(handle, name.as_ptr()) };
    if address.is_null() {
        return Err(format!("{}: no symbol {name:?}", path.display()));
    }
    Ok(address)
}

/// A library made from a kernel file. It stays loaded until the process ends: other handles may name the same
/// file, and its code is small.
pub(crate) struct Loaded {
    find: Find,
    run: Run,
}

impl Loaded {
    /// Loads a library that [`crate::Emulator`] has built.
    pub fn open(path: &Path) -> Result<Self, String> {
        let handle = open_library(path)?;
        let find = symbol(handle, c"msl_find", path)?;
        let run = symbol(handle, c"msl_dispatch", path)?;
        // SAFETY: both are functions of these types in msl_rt.cpp, which every such library contains.
        let (find, run) = unsafe {
            (
                std::mem::transmute::<*mut c_void, Find>(find),
                std::mem::transmute::<*mut c_void, Run>(run),
            )
        };
        Ok(Self { find, run })
    }

    /// Runs a kernel; `None` if there is none of that name.
    ///
    /// The kernel itself is trusted like any other code of the project: one that leaves its buffers corrupts
    /// memory in a plain build, as it would on a GPU. The race build stops it before the access.
    pub fn run(&self, kernel: &str, dispatch: &Dispatch) -> Option<Box<RawReport>> {
        let name = CString::new(kernel).ok()?;
        // SAFETY: the name is a C string; the library only compares it.
        let kernel = unsafe { (self.find)(name.as_ptr()) };
        if kernel.is_null() {
            return None;
        }
        let constants: Vec<_> = dispatch
            .constants
            .iter()
            .map(|(index, value)| RawConstant {
                value: value.as_ptr(),
                index: *index,
                bytes: value.len() as u32,
            })
            .collect();
        let raw = RawDispatch {
            buffers: dispatch.buffers.as_ptr(),
            threadgroup_bytes: dispatch.threadgroup_bytes.as_ptr(),
            constants: constants.as_ptr(),
            buffer_count: dispatch.buffers.len() as u32,
            threadgroup_count: dispatch.threadgroup_bytes.len() as u32,
            constant_count: constants.len() as u32,
            counters_only: u32::from(dispatch.counters_only),
            grid: dispatch.grid,
            threads: dispatch.threads,
            seed: dispatch.seed,
        };
        let mut report = Box::new(RawReport::empty());
        // SAFETY: `kernel` comes from this library; all pointers are valid for the call with the lengths given,
        // the buffers' as their owners' borrows are held by the caller (`Library::dispatch`), who has also
        // checked them against the kernel's signature. The library keeps none of them.
        unsafe { (self.run)(kernel, &raw, &mut *report) };
        Some(report)
    }
}
