//! How many cores the GPU has, from the registry of devices that `ioreg` prints. Metal itself does not say.

use core::ffi::{CStr, c_char, c_void};
use core::ptr;
use objc2::rc::Retained;
use objc2_foundation::{NSNumber, NSObject, NSString};

/// The class of Apple's GPUs in the registry. An Apple Silicon Mac has one.
const GPU_CLASS: &CStr = c"AGXAccelerator";
/// Its property.
const CORES: &str = "gpu-core-count";
/// `kIOMainPortDefault`.
const MAIN_PORT: u32 = 0;

#[link(name = "IOKit", kind = "framework")]
unsafe extern "C" {
    fn IOServiceMatching(name: *const c_char) -> *mut c_void;
    fn IOServiceGetMatchingService(main_port: u32, matching: *mut c_void) -> u32;
    fn IORegistryEntryCreateCFProperty(
        entry: u32,
        key: *const c_void,
        allocator: *const c_void,
        options: u32,
    ) -> *mut c_void;
    fn IOObjectRelease(object: u32) -> i32;
}

/// The GPU's cores, if the registry has them.
pub(crate) fn gpu_cores() -> Option<usize> {
    // SAFETY: the name is a C string; the dictionary that comes back is ours.
    let matching = unsafe { IOServiceMatching(GPU_CLASS.as_ptr()) };
    if matching.is_null() {
        return None;
    }
    // SAFETY: `matching` is the dictionary made above, which this call takes from us.
    let entry = unsafe { IOServiceGetMatchingService(MAIN_PORT, matching) };
    if entry == 0 {
        return None;
    }
    let key = NSString::from_str(CORES);
    // SAFETY: the entry is alive until it is released below; a CFString is an NSString, and the key outlives the call;
    // a null allocator is the default one.
    let property = unsafe {
        IORegistryEntryCreateCFProperty(entry, Retained::as_ptr(&key).cast(), ptr::null(), 0)
    };
    // SAFETY: the entry is ours and is not used again.
    unsafe { IOObjectRelease(entry) };
    // SAFETY: the property is null or an object that is ours; every object of Core Foundation's property lists is an
    // NSObject.
    let property = unsafe { Retained::from_raw(property.cast::<NSObject>()) }?;
    let cores = property.downcast::<NSNumber>().ok()?.integerValue();
    usize::try_from(cores).ok().filter(|cores| *cores > 0)
}
