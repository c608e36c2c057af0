//! A built kernel file and its dispatches.

use std::path::PathBuf;

use crate::arguments::{Argument, Constant, Launch, Schedule};
use crate::emulator::{BuildKind, place};
use crate::native::{BUFFERS, Buffer, Dispatch, Loaded, RawReport, RawTraffic, TensorDescriptor};
use crate::report::{
    EmulatorError, Fault, FaultKind, MemoryCounters, Report, ThreadgroupTraffic, Traffic,
};
use crate::signature::{AddressSpace, KernelSignature};

const MAXIMUM_THREADS: u64 = 1024;
const MAXIMUM_THREADGROUP_BYTES: usize = 32 * 1024;
/// Arguments start at multiples of this, as far as kernels can tell.
const ALIGNMENT: usize = 16;

/// The kernels of one file, ready to run.
pub struct Library {
    loaded: Loaded,
    path: PathBuf,
    kernels: Vec<KernelSignature>,
    build: BuildKind,
}

/// A dispatch's arguments and what must outlive it: aligned copies and tensors' descriptors.
struct Bound {
    buffers: Vec<Buffer>,
    /// What kernels reach by address: behind the last index.
    residents: Vec<Buffer>,
    threadgroup: Vec<u32>,
    /// Each with the position of the argument whose bytes it holds.
    copies: Vec<(usize, Vec<u128>)>,
    #[expect(clippy::vec_box, reason = "buffers hold the descriptors' addresses")]
    _descriptors: Vec<Box<TensorDescriptor>>,
}

impl Library {
    pub(crate) fn new(
        loaded: Loaded,
        path: PathBuf,
        kernels: Vec<KernelSignature>,
        build: BuildKind,
    ) -> Self {
        Self {
            loaded,
            path,
            kernels,
            build,
        }
    }

    /// The kernels in the file.
    pub fn kernels(&self) -> &[KernelSignature] {
        &self.kernels
    }

    /// The kernel of that name.
    pub fn kernel(&self, name: &str) -> Option<&KernelSignature> {
        self.kernels.iter().find(|kernel| kernel.name == name)
    }

    /// Runs a kernel to its end, or to its first defect.
    ///
    /// A kernel is trusted code: in a plain build, one that leaves its buffers corrupts memory.
    pub fn dispatch(
        &self,
        kernel: &str,
        constants: &[Constant],
        launch: Launch,
        arguments: &mut [Argument],
    ) -> Result<Report, EmulatorError> {
        let refuse = |message: String| EmulatorError::Binding {
            kernel: kernel.to_owned(),
            message,
        };
        let signature = self
            .kernel(kernel)
            .ok_or_else(|| refuse("not in the library".to_owned()))?;
        let launched = check_launch(launch).map_err(&refuse)?;
        check_constants(signature, constants).map_err(&refuse)?;
        let bound = bind(signature, arguments).map_err(&refuse)?;
        let constants: Vec<_> = constants
            .iter()
            .map(|constant| (constant.index, constant.value.bytes()))
            .collect();
        let dispatch = Dispatch {
            buffers: &bound.buffers,
            threadgroup_bytes: &bound.threadgroup,
            constants: &constants,
            counters_only: launch.counters_only,
            grid: launch.threadgroups,
            threads: launch.threads,
            seed: match launch.schedule {
                Schedule::ProgramOrder => 0,
                // Zero stands for program order; no seed may mean that.
                Schedule::Shuffled(seed) => seed.wrapping_mul(2).wrapping_add(1),
            },
        };
        let raw = self
            .loaded
            .run(kernel, &dispatch)
            .ok_or_else(|| refuse("not in the built library".to_owned()))?;
        bound.write_back(arguments);
        let kind = match raw.fault {
            0 => return Ok(self.report(signature, launched, &raw)),
            1 => FaultKind::Divergence,
            2 => FaultKind::Race,
            3 => FaultKind::OutOfBounds,
            4 => FaultKind::Uninitialised,
            5 => FaultKind::Misaligned,
            6 => FaultKind::Limit,
            _ => return Err(refuse(raw.message())),
        };
        Err(EmulatorError::Fault(Box::new(Fault {
            kind,
            kernel: kernel.to_owned(),
            message: raw.message(),
            place: (raw.code_offset != 0)
                .then(|| place(&self.path, raw.code_offset))
                .flatten(),
            threadgroup: raw.threadgroup,
            thread: raw.thread,
        })))
    }

    fn report(&self, signature: &KernelSignature, launched: Launched, raw: &RawReport) -> Report {
        let memory = (self.build == BuildKind::Race).then(|| {
            let mut memory = MemoryCounters {
                threadgroup: ThreadgroupTraffic {
                    read_bytes: raw.threadgroup_read_bytes,
                    written_bytes: raw.threadgroup_written_bytes,
                    accesses: raw.threadgroup_accesses,
                    bank_conflicts: raw.bank_conflicts,
                },
                ..MemoryCounters::default()
            };
            let used = signature
                .buffers
                .iter()
                .map(|buffer| buffer.index as usize + 1);
            memory.buffers = vec![Traffic::default(); used.max().unwrap_or(0)];
            let traffic_of = |counted: &RawTraffic| Traffic {
                read_bytes: counted.read_bytes,
                written_bytes: counted.written_bytes,
                read_lines: counted.read_lines,
                written_lines: counted.written_lines,
                read_accesses: counted.read_accesses,
                written_accesses: counted.written_accesses,
            };
            memory.resident = traffic_of(&raw.buffers[BUFFERS]);
            memory.device += memory.resident;
            for binding in &signature.buffers {
                let traffic = traffic_of(&raw.buffers[binding.index as usize]);
                memory.buffers[binding.index as usize] = traffic;
                match binding.address_space {
                    AddressSpace::Constant => memory.constant += traffic,
                    AddressSpace::Device | AddressSpace::Tensor => memory.device += traffic,
                }
            }
            memory
        });
        Report {
            threadgroups: launched.threadgroups,
            simdgroups: launched.threadgroups * launched.threads.div_ceil(32),
            threads: launched.threadgroups * launched.threads,
            threadgroup_barriers: raw.threadgroup_barriers,
            simdgroup_barriers: raw.simdgroup_barriers,
            simdgroup_operations: raw.simdgroup_operations,
            partial_simdgroup_operations: raw.partial_simdgroup_operations,
            memory,
        }
    }
}

/// The size of a dispatch: threadgroups, and threads of each.
#[derive(Clone, Copy)]
struct Launched {
    threadgroups: u64,
    threads: u64,
}

fn check_launch(launch: Launch) -> Result<Launched, String> {
    let product = |sizes: [u32; 3]| {
        sizes
            .iter()
            .try_fold(1_u64, |all, size| all.checked_mul(u64::from(*size)))
    };
    let threads = product(launch.threads).filter(|threads| (1..=MAXIMUM_THREADS).contains(threads));
    let Some(threads) = threads else {
        let sizes = launch.threads;
        return Err(format!(
            "{sizes:?} threads in a threadgroup; 1 to {MAXIMUM_THREADS} can be"
        ));
    };
    let threadgroups = product(launch.threadgroups).filter(|all| *all <= u64::from(u32::MAX));
    let Some(threadgroups) = threadgroups else {
        return Err(format!(
            "{:?} threadgroups are too many",
            launch.threadgroups
        ));
    };
    Ok(Launched {
        threadgroups,
        threads,
    })
}

fn check_constants(signature: &KernelSignature, constants: &[Constant]) -> Result<(), String> {
    for constant in constants {
        let index = constant.index;
        let declared = signature
            .function_constants
            .iter()
            .find(|declared| declared.index == index)
            .ok_or_else(|| format!("it reads no function constant {index}"))?;
        let type_name = declared.type_name.as_str();
        if !constant.value.type_names().contains(&type_name) {
            let name = &declared.name;
            let value = constant.value;
            return Err(format!(
                "function constant {name} is {type_name}, not {value:?}"
            ));
        }
    }
    Ok(())
}

impl Bound {
    /// Copies what the kernel wrote to where the host reads it.
    fn write_back(&self, arguments: &mut [Argument]) {
        for (position, copy) in &self.copies {
            if let Argument::Buffer(bytes) | Argument::Tensor { data: bytes, .. } =
                &mut arguments[*position]
            {
                for (chunk, word) in bytes.chunks_mut(ALIGNMENT).zip(copy) {
                    chunk.copy_from_slice(&word.to_ne_bytes()[..chunk.len()]);
                }
            }
        }
    }
}

/// The bytes at an address that suits every type of a kernel's.
fn aligned_copy(bytes: &[u8]) -> Vec<u128> {
    let word = |chunk: &[u8]| {
        let mut whole = [0; ALIGNMENT];
        whole[..chunk.len()].copy_from_slice(chunk);
        u128::from_ne_bytes(whole)
    };
    bytes.chunks(ALIGNMENT).map(word).collect()
}

/// Brings the arguments into the library's form and holds them against the signature.
fn bind(signature: &KernelSignature, arguments: &mut [Argument]) -> Result<Bound, String> {
    let mut bound = Bound {
        buffers: Vec::new(),
        threadgroup: Vec::new(),
        residents: Vec::new(),
        copies: Vec::new(),
        _descriptors: Vec::new(),
    };
    let mut tensors = Vec::new();
    for (position, argument) in arguments.iter_mut().enumerate() {
        let mut buffer = Buffer {
            pointer: std::ptr::null_mut(),
            bytes: 0,
            line_offset: 0,
            descriptor: std::ptr::null(),
            read_only: 0,
            padding: 0,
        };
        match argument {
            Argument::Threadgroup(bytes) => {
                let total: usize = bound.threadgroup.iter().map(|bytes| *bytes as usize).sum();
                if *bytes > MAXIMUM_THREADGROUP_BYTES - total.min(MAXIMUM_THREADGROUP_BYTES) {
                    return Err("more than 32 KiB of threadgroup memory".to_owned());
                }
                bound.threadgroup.push(*bytes as u32);
                continue;
            }
            Argument::Unbound => {}
            Argument::Resident(shared) => {
                buffer.pointer = shared.start();
                buffer.bytes = shared.len() as u64;
                // Several allocations are counted together: their own addresses keep their lines apart.
                buffer.line_offset = shared.address();
                bound.residents.push(buffer);
                continue;
            }
            Argument::Buffer(bytes) => {
                buffer.pointer = bytes.as_mut_ptr();
                buffer.bytes = bytes.len() as u64;
            }
            Argument::ReadOnly(bytes) => {
                buffer.pointer = bytes.as_ptr().cast_mut();
                buffer.bytes = bytes.len() as u64;
                buffer.read_only = 1;
            }
            Argument::Shared {
                buffer: shared,
                offset,
                length,
            } => {
                if *offset > shared.len() || *length > shared.len() - *offset {
                    let all = shared.len();
                    return Err(format!("{length} bytes at {offset} of a buffer of {all}"));
                }
                buffer.pointer = shared.start().wrapping_add(*offset);
                buffer.bytes = *length as u64;
                buffer.line_offset = *offset as u64;
            }
            Argument::Bytes(bytes) => {
                let mut copy = aligned_copy(bytes);
                buffer.pointer = copy.as_mut_ptr().cast();
                buffer.bytes = bytes.len() as u64;
                buffer.read_only = 1;
                bound.copies.push((position, copy));
            }
            Argument::Tensor { data, extents } => {
                let descriptor = Box::new(TensorDescriptor {
                    pointer: data.as_mut_ptr(),
                    extents: *extents,
                    stride: i64::from(extents[0]),
                    offsets: [0; 2],
                });
                buffer.pointer = descriptor.pointer;
                buffer.bytes = data.len() as u64;
                buffer.descriptor = &raw const *descriptor;
                bound._descriptors.push(descriptor);
                tensors.push(bound.buffers.len());
            }
        }
        if let Argument::Buffer(bytes) | Argument::Tensor { data: bytes, .. } = argument
            && !buffer.pointer.addr().is_multiple_of(ALIGNMENT)
        {
            let mut copy = aligned_copy(bytes);
            buffer.pointer = copy.as_mut_ptr().cast();
            bound.copies.push((position, copy));
            if let Some(descriptor) = bound._descriptors.last_mut()
                && !buffer.descriptor.is_null()
            {
                descriptor.pointer = buffer.pointer;
            }
        } else if let Argument::ReadOnly(bytes) = argument
            && !buffer.pointer.addr().is_multiple_of(ALIGNMENT)
        {
            let mut copy = aligned_copy(bytes);
            buffer.pointer = copy.as_mut_ptr().cast();
            bound.copies.push((position, copy));
        }
        bound.buffers.push(buffer);
    }
    if bound.buffers.len() > BUFFERS {
        return Err(format!(
            "{} buffers; {BUFFERS} can be bound",
            bound.buffers.len()
        ));
    }
    for binding in &signature.buffers {
        let (index, name) = (binding.index, &binding.name);
        let Some(buffer) = bound.buffers.get_mut(index as usize) else {
            return Err(format!("buffer {index} ({name}) is not bound"));
        };
        let is_tensor = tensors.contains(&(index as usize));
        if is_tensor != (binding.address_space == AddressSpace::Tensor) {
            return Err(format!(
                "buffer {index} ({name}) is a tensor on one side only"
            ));
        }
        if buffer.pointer.is_null() && binding.condition.is_none() {
            return Err(format!("buffer {index} ({name}) is not bound"));
        }
        if buffer.read_only != 0 && !binding.read_only {
            return Err(format!(
                "buffer {index} ({name}) is written, but bound read-only"
            ));
        }
        buffer.read_only = u32::from(binding.read_only);
    }
    for index in 0..bound.buffers.len() {
        let known = |binding: &crate::BufferBinding| binding.index as usize == index;
        if !bound.buffers[index].pointer.is_null() && !signature.buffers.iter().any(known) {
            return Err(format!("it has no buffer {index}"));
        }
    }
    if !bound.residents.is_empty() {
        let unbound = Buffer {
            pointer: std::ptr::null_mut(),
            bytes: 0,
            line_offset: 0,
            descriptor: std::ptr::null(),
            read_only: 0,
            padding: 0,
        };
        bound.buffers.resize(BUFFERS, unbound);
        bound.buffers.append(&mut bound.residents);
    }
    for binding in &signature.threadgroup {
        if binding.index as usize >= bound.threadgroup.len() {
            let (index, name) = (binding.index, &binding.name);
            return Err(format!("threadgroup memory {index} ({name}) has no size"));
        }
    }
    Ok(bound)
}
