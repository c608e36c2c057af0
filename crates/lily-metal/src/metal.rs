//! The machine: what [`lily_gpu::Gpu`] asks of it.

use crate::capture::Capture;
use crate::compile::{Libraries, Pipeline};
use crate::encode::{Encoding, Sent, check};
use crate::fault::Fault;
use crate::machine::Machine;
use crate::memory::{Buffer, Memory};
use crate::probe::{packed_are_right, tensors_are_right};
use lily_gpu::batch::{Limits, batches};
use lily_gpu::kernels::{Bound, Constant};
use lily_gpu::timing::{Timings, batch_label, stage_label};
use lily_gpu::{Gpu, GpuDescription, MatrixUnits, Stage};
use lily_plan::{DeviceError, StageTiming};
use objc2::rc::{Retained, autoreleasepool};
use objc2::runtime::ProtocolObject;
use objc2_metal::{
    MTLBuffer, MTLCommandBuffer, MTLCommandBufferStatus, MTLCommandQueue,
    MTLCreateSystemDefaultDevice, MTLDevice, MTLFence,
};
use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// How the GPU is driven.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MetalOptions {
    /// The first work is written to this `.gputrace` document, for Xcode; METAL_CAPTURE_ENABLED=1 must be set.
    pub capture: Option<PathBuf>,
    /// Each stage is a command buffer of its own, so that [`Gpu::take_timings`] tells stages apart. Slower.
    pub stage_timing: bool,
}

/// The GPU of a Mac. It owns queue, compiled kernels and the work that is under way; buffers and pipelines that it
/// hands out belong to whoever asked for them.
pub struct Metal {
    device: Retained<ProtocolObject<dyn MTLDevice>>,
    queue: Retained<ProtocolObject<dyn MTLCommandQueue>>,
    fence: Retained<ProtocolObject<dyn MTLFence>>,
    memory: Arc<Memory>,
    libraries: Libraries,
    machine: Machine,
    matrices: Matrices,
    options: MetalOptions,
    capture: Capture,
    /// In the order in which they run.
    sent: VecDeque<Sent>,
    /// Command buffers that were waited for.
    ended: u64,
    timings: Timings,
}

/// What multiplies matrices, and why.
struct Matrices {
    units: MatrixUnits,
    reason: String,
}

impl Matrices {
    fn of(metal: &mut Metal) -> Self {
        let tried = metal.machine.has_tensors().and_then(|()| {
            tensors_are_right(metal).map_err(|error| wrong("tensor operations", &error))
        });
        let sizes_agree = match tried {
            Ok(sizes_agree) => sizes_agree,
            Err(reason) => {
                return Matrices {
                    units: MatrixUnits::SimdgroupMatrices,
                    reason,
                };
            }
        };
        let tried = metal.machine.has_packed_tensors().and_then(|()| {
            packed_are_right(metal).map_err(|error| wrong("codes of four bits", &error))
        });
        match tried {
            Ok(sizes_agree) => Matrices {
                units: MatrixUnits::PackedTensorOperations,
                reason: right(sizes_agree).into(),
            },
            Err(reason) => Matrices {
                units: MatrixUnits::TensorOperations,
                reason: format!("{}; {reason}", right(sizes_agree)),
            },
        }
    }
}

/// What small products have shown.
fn right(sizes_agree: bool) -> &'static str {
    if sizes_agree {
        "small products were right, the same to the bit on tiles of all sizes"
    } else {
        "small products were right; tiles of different sizes differ in the last bits, and so may a prompt that is cut \
         into other chunks"
    }
}

fn wrong(what: &str, error: &str) -> String {
    // A compiler's text is long, and its first line says what is wrong.
    let error = error.lines().next().unwrap_or("no reason");
    format!("{what} do not work here: {error}")
}

/// Opens the Mac's GPU, and finds out what it can do.
pub fn open(options: MetalOptions) -> Result<Metal, DeviceError> {
    autoreleasepool(|_| {
        let refuse = |what: &str, reason: &str| DeviceError::Unsupported {
            device: "metal".into(),
            what: what.into(),
            reason: reason.into(),
        };
        let device = MTLCreateSystemDefaultDevice().ok_or_else(|| {
            refuse(
                "anything here",
                "macOS offers this program no GPU; --device cpu runs everywhere",
            )
        })?;
        let machine = Machine::of(&device);
        machine.check()?;
        let queue = device
            .newCommandQueue()
            .ok_or_else(|| refuse("a command queue", "Metal made none"))?;
        let fence = device
            .newFence()
            .ok_or_else(|| refuse("a fence", "Metal made none"))?;
        let mut metal = Metal {
            memory: Memory::new(&device, &queue)?,
            libraries: Libraries::new(&device, &machine),
            // Until tensor operations are found to be right.
            matrices: Matrices {
                units: MatrixUnits::SimdgroupMatrices,
                reason: String::new(),
            },
            capture: Capture::default(),
            sent: VecDeque::new(),
            ended: 0,
            timings: Timings::default(),
            device,
            queue,
            fence,
            machine,
            options,
        };
        metal.matrices = Matrices::of(&mut metal);
        // The probe's own work is no one's business.
        metal.timings.take();
        if let Some(path) = metal.options.capture.clone() {
            metal.capture.ask(&path)?;
        }
        Ok(metal)
    })
}

impl Metal {
    /// Which Mac this is.
    pub fn machine(&self) -> &Machine {
        &self.machine
    }

    /// Writes the next work that is sent off, up to the next wait, to a `.gputrace` document.
    pub fn capture_next(&mut self, path: &Path) -> Result<(), DeviceError> {
        self.capture.ask(path)
    }

    /// Adds a kernel file beside those of the program, or takes another in its place: for tests and probes. Pipelines
    /// made before stay as they are.
    pub fn add_source(&mut self, file: &'static str, text: &'static str) {
        self.libraries.add_source(file, text);
    }

    /// What a command buffer holds. None of these numbers has been measured on a Mac: an M1's cores do at best 0.33
    /// TFLOP/s each and share 68 GB/s among eight; other GPUs have more of both for a core.
    fn limits(&self) -> Limits {
        // The fewest that there are, where the system does not tell.
        let cores = if self.machine.cores == 0 {
            7
        } else {
            self.machine.cores
        };
        Limits {
            // A decoded token of Qwen3.6-35B-A3B has 303, which makes three command buffers: the GPU begins with the
            // first while the others are encoded.
            dispatches: if self.options.stage_timing { 0 } else { 128 },
            seconds: 0.1,
            operations_a_second: cores as f64 * 0.1e12,
            bytes_a_second: cores as f64 * 6e9,
        }
    }

    fn label(&self, stages: &[Stage<'_, Self>]) -> String {
        let kernels = stages
            .iter()
            .flatten()
            .map(|dispatch| dispatch.pipeline.kernel);
        if self.options.stage_timing {
            stage_label(kernels)
        } else {
            let kernels: Vec<&str> = kernels.collect();
            batch_label(kernels.into_iter())
        }
    }

    /// What went wrong with a command buffer that has ended.
    fn fault(&self, sent: &Sent) -> Option<DeviceError> {
        if sent.buffer.status() != MTLCommandBufferStatus::Error {
            return None;
        }
        let (code, text) = match sent.buffer.error() {
            Some(error) => (error.code(), error.localizedDescription().to_string()),
            None => (0, "no reason".to_string()),
        };
        let fault = Fault {
            label: &format!("command buffer {} ({})", self.ended, sent.label),
            code,
            text: &text,
            allocated: self.device.currentAllocatedSize() as u64,
            recommended: self.memory.recommended(),
        };
        Some(fault.error())
    }
}

impl Drop for Metal {
    fn drop(&mut self) {
        // The work under way uses the queue's fence and the pipelines. There is no one left to tell an error.
        let _ = self.wait();
    }
}

impl Gpu for Metal {
    type Buffer = Buffer;
    type Pipeline = Pipeline;

    fn describe(&self) -> GpuDescription {
        GpuDescription {
            device: "metal",
            hardware: self.machine.hardware(),
            cores: self.machine.cores,
            matrix_units: self.matrices.units,
            matrices: self.matrices.units.to_string(),
            reason: self.matrices.reason.clone(),
        }
    }

    fn available_memory(&self) -> Option<u64> {
        let recommended = self.memory.recommended();
        Some(recommended.saturating_sub(self.memory.allocated()))
    }

    fn allocate(&self, bytes: usize, what: &str) -> Result<Buffer, DeviceError> {
        self.memory.allocate(bytes, what)
    }

    fn address(&self, buffer: &Buffer) -> u64 {
        buffer.raw.gpuAddress()
    }

    fn write(&self, buffer: &Buffer, offset: usize, bytes: &[u8]) {
        buffer.copy_in(offset, bytes);
    }

    fn read(&self, buffer: &Buffer, offset: usize, bytes: &mut [u8]) {
        buffer.copy_out(offset, bytes);
    }

    fn copy(&self, from: (&Buffer, usize), to: (&Buffer, usize), bytes: usize) {
        to.0.copy_from(to.1, from.0, from.1, bytes);
    }

    fn pipeline(
        &mut self,
        kernel: &Bound,
        constants: &[Constant],
    ) -> Result<Pipeline, DeviceError> {
        autoreleasepool(|_| self.libraries.pipeline(kernel, constants))
    }

    // Nothing is kept under the key: a plan is encoded each time it runs.
    fn submit(&mut self, _key: Option<u64>, stages: &[Stage<'_, Self>]) -> Result<(), DeviceError> {
        for dispatch in stages.iter().flatten() {
            check(dispatch)?;
        }
        self.memory.begin_work();
        let result = autoreleasepool(|_| {
            self.capture.start(&self.queue)?;
            for batch in batches(stages, &self.limits()) {
                let stages = batch.stages(stages);
                let encoding = Encoding {
                    queue: &self.queue,
                    fence: &self.fence,
                };
                let follows = !self.sent.is_empty();
                let sent = encoding.send(stages, self.label(stages), follows)?;
                self.sent.push_back(sent);
            }
            Ok(())
        });
        if result.is_err() {
            // A part of a run may be under way, and no one will wait for it. Its own error says less than this one.
            let _ = self.wait();
        }
        result
    }

    fn wait(&mut self) -> Result<(), DeviceError> {
        self.wait_for(u64::MAX)
    }

    fn mark(&mut self) -> Result<u64, DeviceError> {
        Ok(self.ended + self.sent.len() as u64)
    }

    fn wait_for(&mut self, mark: u64) -> Result<(), DeviceError> {
        autoreleasepool(|_| {
            // What is being written down is waited for as a whole.
            let mark = if self.capture.is_running() {
                u64::MAX
            } else {
                mark
            };
            let mut first = None;
            // What comes behind an error fails too, and says less.
            while (self.ended < mark || first.is_some())
                && let Some(sent) = self.sent.pop_front()
            {
                sent.buffer.waitUntilCompleted();
                self.ended += 1;
                let (begin, end) = (sent.buffer.GPUStartTime(), sent.buffer.GPUEndTime());
                // Zeros are of what never ran.
                let seconds = if begin > 0.0 { end - begin } else { 0.0 };
                self.timings.add(&sent.label, seconds.max(0.0) * 1e6);
                first = first.or_else(|| self.fault(&sent));
            }
            self.capture.stop();
            if self.sent.is_empty() {
                self.memory.end_work();
            }
            first.map_or(Ok(()), Err)
        })
    }

    /// By stage with [`MetalOptions::stage_timing`], otherwise by command buffer.
    fn take_timings(&mut self) -> Vec<StageTiming> {
        self.timings.take()
    }

    fn idle(&mut self) {
        autoreleasepool(|_| {
            if let Some(last) = self.sent.back() {
                last.buffer.waitUntilCompleted();
            }
            // What was dropped meanwhile may go, and what is dropped next.
            self.memory.end_work();
        });
    }
}
