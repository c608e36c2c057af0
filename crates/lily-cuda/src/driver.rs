//! NVIDIA's driver, found when the program runs: the few functions that are used, with their errors.

use lily_plan::DeviceError;
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::ptr::{null, null_mut};
use std::sync::{Arc, Mutex, PoisonError};

/// A handle of the driver's.
pub type Handle = *mut c_void;
/// An address on the device.
pub type Address = u64;

const SUCCESS: c_int = 0;
const OUT_OF_MEMORY: c_int = 2;
const MULTIPROCESSORS: c_int = 16;
const MAJOR: c_int = 75;
const MINOR: c_int = 76;
const CAPTURE_THREAD_LOCAL: c_int = 1;

macro_rules! functions {
    ($($field:ident = $name:literal ( $($argument:ty),* );)*) => {
        struct Functions {
            $($field: unsafe extern "C" fn($($argument),*) -> c_int,)*
        }

        impl Functions {
            fn load(handle: *mut c_void) -> Result<Self, String> {
                Ok(Functions {
                    $($field: {
                        let name: &CStr = $name;
                        // SAFETY: the handle is open and stays so, the name is a C string.
                        let address = unsafe { libc::dlsym(handle, name.as_ptr()) };
                        if address.is_null() {
                            return Err(format!("the driver has no {name:?}; it is too old"));
                        }
                        // SAFETY: the driver's function of this name has this type (cuda.h, since CUDA 12).
                        unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($argument),*) -> c_int>(address) }
                    },)*
                })
            }
        }
    };
}

functions! {
    init = c"cuInit" (c_uint);
    error_string = c"cuGetErrorString" (c_int, *mut *const c_char);
    device_get = c"cuDeviceGet" (*mut c_int, c_int);
    device_name = c"cuDeviceGetName" (*mut c_char, c_int, c_int);
    device_attribute = c"cuDeviceGetAttribute" (*mut c_int, c_int, c_int);
    retain_context = c"cuDevicePrimaryCtxRetain" (*mut Handle, c_int);
    set_context = c"cuCtxSetCurrent" (Handle);
    memory_info = c"cuMemGetInfo_v2" (*mut usize, *mut usize);
    allocate = c"cuMemAlloc_v2" (*mut Address, usize);
    free = c"cuMemFree_v2" (Address);
    fill = c"cuMemsetD8Async" (Address, u8, usize, Handle);
    copy_in = c"cuMemcpyHtoDAsync_v2" (Address, *const c_void, usize, Handle);
    copy = c"cuMemcpyDtoDAsync_v2" (Address, Address, usize, Handle);
    copy_out = c"cuMemcpyDtoH_v2" (*mut c_void, Address, usize);
    load_module = c"cuModuleLoadData" (*mut Handle, *const c_void);
    get_function = c"cuModuleGetFunction" (*mut Handle, Handle, *const c_char);
    create_stream = c"cuStreamCreate" (*mut Handle, c_uint);
    synchronize = c"cuStreamSynchronize" (Handle);
    launch = c"cuLaunchKernel" (Handle, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Handle, *mut *mut c_void, *mut *mut c_void);
    begin_capture = c"cuStreamBeginCapture_v2" (Handle, c_int);
    end_capture = c"cuStreamEndCapture" (Handle, *mut Handle);
    instantiate = c"cuGraphInstantiateWithFlags" (*mut Handle, Handle, u64);
    destroy_graph = c"cuGraphDestroy" (Handle);
    launch_graph = c"cuGraphLaunch" (Handle, Handle);
    destroy_executable = c"cuGraphExecDestroy" (Handle);
    create_event = c"cuEventCreate" (*mut Handle, c_uint);
    record_event = c"cuEventRecord" (Handle, Handle);
    synchronize_event = c"cuEventSynchronize" (Handle);
    destroy_event = c"cuEventDestroy_v2" (Handle);
    elapsed = c"cuEventElapsedTime" (*mut f32, Handle, Handle);
}

/// One GPU with a stream. Its handles may be used from any thread, one at a time.
pub struct Driver {
    functions: Functions,
    context: Handle,
    stream: Handle,
    device: c_int,
    /// What went wrong where nobody could be told.
    fault: Mutex<Option<DeviceError>>,
}

// SAFETY: the driver's handles are not tied to a thread; each call makes the context current first, and callers are
// one at a time (`Gpu` is used through a lock).
unsafe impl Send for Driver {}
// SAFETY: as above: the driver's functions are safe to call from several threads.
unsafe impl Sync for Driver {}

impl Driver {
    /// The first GPU.
    pub fn open() -> Result<Arc<Self>, DeviceError> {
        let absent = |reason: String| DeviceError::Unsupported {
            device: "cuda".into(),
            what: "anything".into(),
            reason,
        };
        // SAFETY: the name is a C string; loading the driver runs its initialisers.
        let handle =
            unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if handle.is_null() {
            return Err(absent(
                "there is no NVIDIA driver (libcuda.so.1) on this machine".into(),
            ));
        }
        let functions = Functions::load(handle).map_err(absent)?;
        let mut driver = Driver {
            functions,
            context: null_mut(),
            stream: null_mut(),
            device: 0,
            fault: Mutex::new(None),
        };
        // SAFETY: called before every other function, as it must be; all pointers are valid for the calls.
        unsafe {
            driver.check((driver.functions.init)(0), "starting the driver", 0)?;
            let mut device = 0;
            driver.check(
                (driver.functions.device_get)(&mut device, 0),
                "finding a GPU",
                0,
            )?;
            driver.device = device;
            let mut context = null_mut();
            driver.check(
                (driver.functions.retain_context)(&mut context, driver.device),
                "opening the GPU",
                0,
            )?;
            driver.context = context;
            driver.current()?;
            let mut stream = null_mut();
            driver.check(
                (driver.functions.create_stream)(&mut stream, 1),
                "making a stream",
                0,
            )?;
            driver.stream = stream;
        }
        Ok(Arc::new(driver))
    }

    fn check(&self, status: c_int, what: &str, bytes: u64) -> Result<(), DeviceError> {
        if status == SUCCESS {
            return Ok(());
        }
        let mut text = null();
        // SAFETY: the pointer is valid for the call; the driver's texts are C strings that live on.
        let reason = unsafe {
            (self.functions.error_string)(status, &mut text);
            if text.is_null() {
                format!("error {status}")
            } else {
                CStr::from_ptr(text).to_string_lossy().into_owned()
            }
        };
        Err(if status == OUT_OF_MEMORY {
            DeviceError::OutOfMemory {
                what: what.into(),
                bytes,
                reason,
            }
        } else {
            DeviceError::Failed(format!("{what}: {reason}"))
        })
    }

    /// Keeps the first error for whoever waits next.
    fn remember(&self, result: Result<(), DeviceError>) {
        if let Err(error) = result {
            let mut fault = self.fault.lock().unwrap_or_else(PoisonError::into_inner);
            fault.get_or_insert(error);
        }
    }

    /// Tells what went wrong before where nobody could be told.
    pub fn tell_fault(&self) -> Result<(), DeviceError> {
        let mut fault = self.fault.lock().unwrap_or_else(PoisonError::into_inner);
        fault.take().map_or(Ok(()), Err)
    }

    fn current(&self) -> Result<(), DeviceError> {
        // SAFETY: the context was retained and lives as long as the process.
        self.check(
            unsafe { (self.functions.set_context)(self.context) },
            "choosing the GPU",
            0,
        )
    }

    fn attribute(&self, which: c_int) -> usize {
        let mut value = 0;
        // SAFETY: the pointer is valid for the call.
        unsafe { (self.functions.device_attribute)(&mut value, which, self.device) };
        value as usize
    }

    /// The GPU's name.
    pub fn name(&self) -> String {
        let mut name = [0; 128];
        // SAFETY: the buffer is as long as is said; the driver ends it with a zero.
        unsafe {
            (self.functions.device_name)(name.as_mut_ptr(), name.len() as c_int, self.device);
            CStr::from_ptr(name.as_ptr()).to_string_lossy().into_owned()
        }
    }

    /// Multiprocessors.
    pub fn multiprocessors(&self) -> usize {
        self.attribute(MULTIPROCESSORS)
    }

    /// `sm_90` and the like.
    pub fn architecture(&self) -> String {
        format!("sm_{}{}", self.attribute(MAJOR), self.attribute(MINOR))
    }

    /// Bytes free.
    pub fn free_memory(&self) -> Option<u64> {
        self.current().ok()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: both pointers are valid for the call.
        let status = unsafe { (self.functions.memory_info)(&mut free, &mut total) };
        (status == SUCCESS).then_some(free as u64)
    }

    /// Zeroed memory.
    pub fn allocate(
        self: &Arc<Self>,
        bytes: usize,
        what: &str,
    ) -> Result<DeviceBuffer, DeviceError> {
        self.current()?;
        let mut address = 0;
        // SAFETY: the pointer is valid for the call.
        let status = unsafe { (self.functions.allocate)(&mut address, bytes) };
        self.check(status, what, bytes as u64)?;
        let buffer = DeviceBuffer {
            driver: self.clone(),
            address,
            bytes,
        };
        // SAFETY: the memory is as long as is said. Work that is sent off later comes behind the filling.
        let status = unsafe { (self.functions.fill)(address, 0, bytes, self.stream) };
        self.check(status, what, 0)?;
        Ok(buffer)
    }

    /// A module from a cubin.
    pub fn load(&self, cubin: &[u8], kernel: &str) -> Result<Handle, DeviceError> {
        self.current()?;
        let (mut module, mut function) = (null_mut(), null_mut());
        let name = CString::new(kernel).expect("kernels have plain names");
        // SAFETY: the cubin is a whole one, made by NVRTC; the driver copies it. The module stays loaded.
        unsafe {
            let status = (self.functions.load_module)(&mut module, cubin.as_ptr().cast());
            self.check(status, kernel, 0)?;
            let status = (self.functions.get_function)(&mut function, module, name.as_ptr());
            self.check(status, kernel, 0)?;
        }
        Ok(function)
    }

    /// Launches a kernel on the stream.
    ///
    /// # Safety
    /// `parameters` are what the kernel takes, in order, and its addresses are those of live buffers.
    pub unsafe fn launch(
        &self,
        function: Handle,
        grid: [u32; 3],
        threads: u32,
        parameters: &mut [u64],
    ) -> Result<(), DeviceError> {
        let mut pointers: Vec<*mut c_void> = parameters
            .iter_mut()
            .map(|value| (value as *mut u64).cast())
            .collect();
        // SAFETY: by this function's contract; little-endian words lie at the start of their 64 bits.
        let status = unsafe {
            (self.functions.launch)(
                function,
                grid[0],
                grid[1],
                grid[2],
                threads,
                1,
                1,
                0,
                self.stream,
                pointers.as_mut_ptr(),
                null_mut(),
            )
        };
        self.check(status, "launching a kernel", 0)
    }

    /// Waits for the stream.
    pub fn synchronize(&self) -> Result<(), DeviceError> {
        self.current()?;
        // SAFETY: the stream was made in `open`.
        self.check(
            unsafe { (self.functions.synchronize)(self.stream) },
            "running kernels",
            0,
        )
    }

    /// Records what `launches` launches as a graph, in place of running it.
    pub fn capture(
        self: &Arc<Self>,
        launches: impl FnOnce() -> Result<(), DeviceError>,
    ) -> Result<Graph, DeviceError> {
        self.current()?;
        let (mut graph, mut executable) = (null_mut(), null_mut());
        // SAFETY: the stream was made in `open`; capture ends whatever the launches return.
        unsafe {
            let status = (self.functions.begin_capture)(self.stream, CAPTURE_THREAD_LOCAL);
            self.check(status, "recording a graph", 0)?;
            let launched = launches();
            let status = (self.functions.end_capture)(self.stream, &mut graph);
            launched?;
            self.check(status, "recording a graph", 0)?;
            let status = (self.functions.instantiate)(&mut executable, graph, 0);
            (self.functions.destroy_graph)(graph);
            self.check(status, "making a graph", 0)?;
        }
        Ok(Graph {
            driver: self.clone(),
            executable,
        })
    }

    /// Microseconds that the work `run` sends off takes on the GPU.
    pub fn time(
        self: &Arc<Self>,
        run: impl FnOnce() -> Result<(), DeviceError>,
    ) -> Result<f64, DeviceError> {
        let first = self.event()?;
        run()?;
        let last = self.event()?;
        last.wait()?;
        last.microseconds_since(&first)
    }

    /// An event behind all that was sent off so far.
    pub fn event(self: &Arc<Self>) -> Result<Event, DeviceError> {
        self.current()?;
        let mut event = null_mut();
        // SAFETY: the pointer is valid for the call; the event is recorded once it is made.
        unsafe {
            self.check((self.functions.create_event)(&mut event, 0), "an event", 0)?;
            let event = Event {
                driver: self.clone(),
                event,
            };
            let status = (self.functions.record_event)(event.event, self.stream);
            self.check(status, "an event", 0)?;
            Ok(event)
        }
    }
}

/// A point in the stream's work.
pub struct Event {
    driver: Arc<Driver>,
    event: Handle,
}

// SAFETY: as for `Driver`.
unsafe impl Send for Event {}

impl Event {
    /// Waits for the work before it.
    pub fn wait(&self) -> Result<(), DeviceError> {
        self.driver.current()?;
        // SAFETY: the event was recorded when it was made.
        let status = unsafe { (self.driver.functions.synchronize_event)(self.event) };
        self.driver.check(status, "running kernels", 0)
    }

    /// Microseconds from an earlier event to this one, both of which have been passed.
    pub fn microseconds_since(&self, first: &Event) -> Result<f64, DeviceError> {
        self.driver.current()?;
        let mut milliseconds = 0.0;
        // SAFETY: both events were recorded when they were made; where they have not been passed, the driver says so.
        let status =
            unsafe { (self.driver.functions.elapsed)(&mut milliseconds, first.event, self.event) };
        self.driver.check(status, "timing", 0)?;
        Ok(f64::from(milliseconds) * 1e3)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.driver.current().is_ok() {
            // SAFETY: it was made by this driver, and is not used again.
            unsafe { (self.driver.functions.destroy_event)(self.event) };
        }
    }
}

/// Memory of the GPU.
pub struct DeviceBuffer {
    driver: Arc<Driver>,
    /// Where it begins.
    pub address: Address,
    /// How long it is.
    pub bytes: usize,
}

impl DeviceBuffer {
    /// Copies to it. The bytes are there when this returns: what is sent off later finds them, and so does
    /// [`read`](Self::read). (A copy outside of the stream may still be on its way when it has returned, and work in
    /// the stream would not wait for it.) Whoever waits next is told where the GPU has failed.
    pub fn write(&self, offset: usize, bytes: &[u8]) {
        assert!(offset + bytes.len() <= self.bytes, "within the buffer");
        self.driver.remember(self.try_to_write(offset, bytes));
    }

    fn try_to_write(&self, offset: usize, bytes: &[u8]) -> Result<(), DeviceError> {
        let driver = &self.driver;
        driver.current()?;
        // SAFETY: the range lies in this buffer; no work that uses it is unfinished, by the contract of `Gpu`. The bytes
        // are borrowed until the stream has been waited for.
        let status = unsafe {
            (driver.functions.copy_in)(
                self.address + offset as u64,
                bytes.as_ptr().cast(),
                bytes.len(),
                driver.stream,
            )
        };
        driver.check(status, "copying to the GPU", 0)?;
        driver.synchronize()
    }

    /// Copies from another buffer of the GPU. The bytes are there when this returns. Whoever waits next is told where the
    /// GPU has failed.
    pub fn copy_from(&self, offset: usize, from: &DeviceBuffer, from_offset: usize, bytes: usize) {
        let fits = offset + bytes <= self.bytes && from_offset + bytes <= from.bytes;
        assert!(fits, "within both buffers");
        let driver = &self.driver;
        let copy = || {
            driver.current()?;
            // SAFETY: the ranges lie in these buffers, which no unfinished work uses, by the contract of `Gpu`; the
            // stream is waited for below.
            let status = unsafe {
                (driver.functions.copy)(
                    self.address + offset as u64,
                    from.address + from_offset as u64,
                    bytes,
                    driver.stream,
                )
            };
            driver.check(status, "copying on the GPU", 0)?;
            driver.synchronize()
        };
        driver.remember(copy());
    }

    /// Copies from it. Where the GPU has failed, whoever waits next is told, and nothing is copied.
    pub fn read(&self, offset: usize, bytes: &mut [u8]) {
        assert!(offset + bytes.len() <= self.bytes, "within the buffer");
        self.driver.remember(self.try_to_read(offset, bytes));
    }

    fn try_to_read(&self, offset: usize, bytes: &mut [u8]) -> Result<(), DeviceError> {
        let driver = &self.driver;
        driver.current()?;
        // SAFETY: the range lies in this buffer, and nothing unfinished writes it, by the contract of `Gpu`. The copy does
        // not wait for the stream, which was made not to be in step with others.
        let status = unsafe {
            (driver.functions.copy_out)(
                bytes.as_mut_ptr().cast(),
                self.address + offset as u64,
                bytes.len(),
            )
        };
        driver.check(status, "copying from the GPU", 0)
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        if self.driver.current().is_ok() {
            // SAFETY: it was allocated by this driver and nothing uses it any more, by the contract of `Gpu`.
            unsafe { (self.driver.functions.free)(self.address) };
        }
    }
}

/// Launches that are sent off together.
pub struct Graph {
    driver: Arc<Driver>,
    executable: Handle,
}

// SAFETY: as for `Driver`.
unsafe impl Send for Graph {}

impl Graph {
    /// Sends it off.
    pub fn launch(&self) -> Result<(), DeviceError> {
        self.driver.current()?;
        // SAFETY: the graph was instantiated, and the buffers it names are alive: whoever replaces one forgets the graph.
        let status =
            unsafe { (self.driver.functions.launch_graph)(self.executable, self.driver.stream) };
        self.driver.check(status, "launching a graph", 0)
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if self.driver.current().is_ok() {
            // SAFETY: it was instantiated by this driver, and is not used again.
            unsafe { (self.driver.functions.destroy_executable)(self.executable) };
        }
    }
}
