//! Buffers, and the set that keeps them within the GPU's reach.

use core::ptr::NonNull;
use lily_plan::DeviceError;
use objc2::rc::Retained;
use objc2::runtime::ProtocolObject;
use objc2_foundation::NSString;
use objc2_metal::{
    MTLAllocation, MTLBuffer, MTLCommandQueue, MTLDevice, MTLResidencySet,
    MTLResidencySetDescriptor, MTLResource, MTLResourceOptions,
};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Memory that processor and GPU share, and that is this buffer's own. When the buffer is dropped it goes back (to the
/// system when memory is next taken, asked about or used); while work is under way, when that has been waited for.
pub struct Buffer {
    pub(crate) raw: Retained<ProtocolObject<dyn MTLBuffer>>,
    /// Bytes that were asked for.
    pub(crate) bytes: usize,
    memory: Arc<Memory>,
}

// SAFETY: Metal's buffers may be used from any thread; counting references is atomic. What lies in one is read and
// written by copies only, through `Buffer::copy_in`, `copy_out` and `copy_from`.
unsafe impl Send for Buffer {}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.memory.release(&self.raw);
    }
}

impl Buffer {
    /// Copies into it. Panics beyond its end.
    pub(crate) fn copy_in(&self, offset: usize, bytes: &[u8]) {
        let to = self.part(offset, bytes.len());
        // SAFETY: `part` has checked that the range lies in the buffer, which is mapped as long as it lives; `bytes`
        // is other memory, because nothing hands out references into buffers. That no unfinished work uses the range
        // is the caller's promise (`Gpu::write`); if it is broken, numbers are wrong, and no memory but the
        // buffer's own is touched.
        unsafe { to.copy_from_nonoverlapping(NonNull::from(bytes).cast(), bytes.len()) };
    }

    /// Copies out of it. Panics beyond its end.
    pub(crate) fn copy_out(&self, offset: usize, bytes: &mut [u8]) {
        let from = self.part(offset, bytes.len());
        let count = bytes.len();
        // SAFETY: as in `copy_in`; that no unfinished work writes the range is the caller's promise (`Gpu::read`).
        unsafe { from.copy_to_nonoverlapping(NonNull::from(bytes).cast(), count) };
    }

    /// Copies from another buffer. Panics beyond the end of either.
    pub(crate) fn copy_from(&self, offset: usize, from: &Buffer, from_offset: usize, count: usize) {
        let (to, from) = (self.part(offset, count), from.part(from_offset, count));
        // SAFETY: `part` has checked both ranges, which may overlap. That no unfinished work uses them is the caller's
        // promise (`Gpu::copy`).
        unsafe { to.copy_from(from, count) };
    }

    fn part(&self, offset: usize, count: usize) -> NonNull<u8> {
        let inside = offset <= self.bytes && count <= self.bytes - offset;
        assert!(inside, "{count} bytes at {offset} of {}", self.bytes);
        // SAFETY: the buffer is in shared storage and has at least `bytes` bytes, of which `offset` is not beyond the
        // end.
        unsafe { self.raw.contents().cast::<u8>().add(offset) }
    }
}

/// The GPU's memory: shared by the machine and by all of its buffers.
///
/// After a second or so without work macOS lets go of what is resident, and the next work waits until it is back (users
/// of other engines tell of a quarter of a second: ggml-org/llama.cpp#17766). Nothing is done about that yet.
pub(crate) struct Memory {
    device: Retained<ProtocolObject<dyn MTLDevice>>,
    residents: Mutex<Residents>,
}

struct Residents {
    /// All buffers that live. Its methods are not safe to call from two threads at once, which the lock sees to.
    set: Retained<ProtocolObject<dyn MTLResidencySet>>,
    /// Whether buffers wait to get into the set, and out of it. Putting a change into force takes time, so it is done
    /// when it must be.
    added: bool,
    removed: bool,
    /// Whether work may be under way.
    busy: bool,
    /// Buffers that were dropped while work was under way.
    dropped: Vec<Retained<ProtocolObject<dyn MTLBuffer>>>,
}

// SAFETY: Metal's objects may be used from any thread; those that may not be used from two at once are behind
// `Memory`'s lock.
unsafe impl Send for Residents {}

impl Residents {
    fn add(&mut self, buffer: &ProtocolObject<dyn MTLBuffer>) {
        self.set.addAllocation(as_allocation(buffer));
        self.added = true;
    }

    fn remove(&mut self, buffer: &ProtocolObject<dyn MTLBuffer>) {
        self.set.removeAllocation(as_allocation(buffer));
        self.removed = true;
    }

    fn settle(&mut self) {
        if self.added || self.removed {
            self.set.commit();
        }
        if self.added {
            // What the queue would do for the first command buffer.
            self.set.requestResidency();
        }
        (self.added, self.removed) = (false, false);
    }
}

fn as_allocation(buffer: &ProtocolObject<dyn MTLBuffer>) -> &ProtocolObject<dyn MTLAllocation> {
    ProtocolObject::from_ref(buffer)
}

impl Memory {
    /// Memory whose buffers are ready for all work of `queue`.
    pub fn new(
        device: &Retained<ProtocolObject<dyn MTLDevice>>,
        queue: &ProtocolObject<dyn MTLCommandQueue>,
    ) -> Result<Arc<Self>, DeviceError> {
        let descriptor = MTLResidencySetDescriptor::new();
        let set = device
            .newResidencySetWithDescriptor_error(&descriptor)
            .map_err(|error| DeviceError::Unsupported {
                device: "metal".into(),
                what: "a residency set".into(),
                reason: error.localizedDescription().to_string(),
            })?;
        queue.addResidencySet(&set);
        Ok(Arc::new(Memory {
            device: device.clone(),
            residents: Mutex::new(Residents {
                set,
                added: false,
                removed: false,
                busy: false,
                dropped: Vec::new(),
            }),
        }))
    }

    fn residents(&self) -> MutexGuard<'_, Residents> {
        // Nothing that holds the lock can leave the set half changed.
        self.residents
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes that Metal has given out in this process.
    pub fn allocated(&self) -> u64 {
        let mut residents = self.residents();
        if residents.removed {
            // What was dropped is gone once the set has let go of it.
            residents.settle();
        }
        self.device.currentAllocatedSize() as u64
    }

    /// Bytes that the system recommends to keep ready for the GPU at most.
    pub fn recommended(&self) -> u64 {
        self.device.recommendedMaxWorkingSetSize()
    }

    /// A buffer of zeros. `what` names it in an error.
    pub fn allocate(self: &Arc<Self>, bytes: usize, what: &str) -> Result<Buffer, DeviceError> {
        let refuse = |reason: String| DeviceError::OutOfMemory {
            what: what.to_string(),
            bytes: bytes as u64,
            reason,
        };
        let largest = self.device.maxBufferLength();
        if bytes > largest {
            return Err(refuse(format!(
                "a buffer has at most {largest} bytes on this GPU"
            )));
        }
        // All buffers are kept ready for the GPU. More than the system wants to keep ready would be noticed only
        // when a run fails.
        let (allocated, recommended) = (self.allocated(), self.recommended());
        if allocated.saturating_add(bytes as u64) > recommended {
            return Err(refuse(format!(
                "{allocated} bytes are taken of {recommended} that the system keeps ready for the GPU at most \
                 (sysctl iogpu.wired_limit_mb raises it)"
            )));
        }
        // Metal clears what this makes. There is no empty buffer.
        let options =
            MTLResourceOptions::StorageModeShared | MTLResourceOptions::HazardTrackingModeUntracked;
        let raw = self
            .device
            .newBufferWithLength_options(bytes.max(4), options)
            .ok_or_else(|| {
                refuse(format!(
                    "the system gave none; {allocated} bytes are taken of {recommended}"
                ))
            })?;
        raw.setLabel(Some(&NSString::from_str(what)));
        self.residents().add(&raw);
        Ok(Buffer {
            raw,
            bytes,
            memory: self.clone(),
        })
    }

    /// Before work is sent off: puts all buffers within its reach.
    pub fn begin_work(&self) {
        let mut residents = self.residents();
        residents.settle();
        residents.busy = true;
    }

    /// When all work has been waited for: buffers that were dropped meanwhile go.
    pub fn end_work(&self) {
        let mut residents = self.residents();
        residents.busy = false;
        for buffer in std::mem::take(&mut residents.dropped) {
            residents.remove(&buffer);
        }
        if residents.removed {
            residents.settle();
        }
    }

    fn release(&self, buffer: &Retained<ProtocolObject<dyn MTLBuffer>>) {
        let mut residents = self.residents();
        if residents.busy {
            residents.dropped.push(buffer.clone());
        } else {
            residents.remove(buffer);
        }
    }
}
