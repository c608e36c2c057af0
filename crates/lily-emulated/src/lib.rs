//! The emulated device: the unmodified kernels of `kernels/*.metal`, translated to C++ and run on the processor by
//! [`lily_msl`], behind the same interface as Metal. It proves plans, routes, bindings and kernels right and
//! counts what they move; it is slow, and no measure of any GPU's speed.

#![forbid(unsafe_code)]

use lily_gpu::batch::{Batch, Limits, batches};
use lily_gpu::kernels::{Bound, Constant, ConstantValue, SOURCES};
use lily_gpu::{Argument, Gpu, GpuDescription, MatrixUnits, Stage};
use lily_msl::{BuildKind, Emulator, Launch, Library, Report, Schedule, SharedBuffer, Sources};
use lily_plan::DeviceError;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

/// Bytes behind each buffer that no kernel may touch.
const SENTINEL: usize = 256;
/// What they hold.
const SENTINEL_BYTE: u8 = 0xa5;

/// How kernels are emulated.
#[derive(Clone, Copy, Debug)]
pub struct EmulatedOptions {
    /// The fast build, or the one that checks and counts every access.
    pub build: BuildKind,
    /// In which order threads run.
    pub schedule: Schedule,
    /// Whether dispatches are kept with their counts.
    pub keep_reports: bool,
    /// The build that checks counts alone, and bounds: large shapes take less memory and time so.
    pub counters_only: bool,
    /// The kind of machine whose forms of kernels run.
    pub matrix_units: MatrixUnits,
    /// A function constant beside those of the host, for kernels that read it: which barrier is taken away, in
    /// sources that [`lily_msl::removable_barriers`] made.
    pub further_constant: Option<Constant>,
    /// Runs are cut by these limits, as Metal's command buffers are.
    pub limits: Option<Limits>,
}

impl Default for EmulatedOptions {
    fn default() -> Self {
        EmulatedOptions {
            build: BuildKind::Plain,
            schedule: Schedule::ProgramOrder,
            keep_reports: false,
            counters_only: false,
            matrix_units: MatrixUnits::SimdgroupMatrices,
            further_constant: None,
            limits: None,
        }
    }
}

/// What a dispatch did.
#[derive(Clone, Debug)]
pub struct Ran {
    /// The kernel's host name.
    pub kernel: &'static str,
    /// Its function constants.
    pub constants: Vec<Constant>,
    /// Its counts.
    pub report: Report,
}

/// A machine that runs kernels on the processor.
pub struct Emulated {
    sources: Sources,
    emulator: Emulator,
    options: EmulatedOptions,
    libraries: HashMap<&'static str, Arc<Library>>,
    ran: Vec<Ran>,
    fault: Option<DeviceError>,
    unfinished: Vec<Unfinished>,
    /// The last mark.
    mark: u64,
}

/// Work that has been sent off and not been waited for. It has run all the same; what a GPU would still be busy with is
/// not to be touched.
struct Unfinished {
    mark: u64,
    /// Addresses that it may reach, and those that it may write.
    reached: Vec<Range<u64>>,
    written: Vec<Range<u64>>,
}

impl Unfinished {
    fn of(dispatch: &lily_gpu::Dispatch<'_, Emulated>, mark: u64) -> Self {
        let whole =
            |buffer: &SharedBuffer| buffer.address()..buffer.address() + buffer.len() as u64;
        let sessions = dispatch.reached.iter().map(|buffer| whole(buffer));
        let mut reached: Vec<Range<u64>> = sessions.collect();
        let mut written = reached.clone();
        for argument in &dispatch.arguments {
            if let Argument::Buffer {
                buffer,
                offset,
                bytes,
                written: is_written,
            } = argument
            {
                let start = buffer.address() + *offset as u64;
                let end = start.saturating_add(*bytes as u64).min(whole(buffer).end);
                reached.push(whole(buffer));
                if *is_written {
                    written.push(start..end);
                }
            }
        }
        Unfinished {
            mark,
            reached,
            written,
        }
    }
}

/// Bytes that may be read from what unfinished work writes: the tokens of a slot, which the kernel tells from the other
/// and its argument does not.
const SLOT: usize = 64;

/// A kernel with its constants.
pub struct Pipeline {
    library: Arc<Library>,
    kernel: &'static str,
    constants: Vec<Constant>,
}

impl Emulated {
    /// With the project's own kernels.
    pub fn new(options: EmulatedOptions) -> Self {
        let sources = SOURCES
            .iter()
            .fold(Sources::new(), |sources, (name, text)| {
                sources.with(name, text)
            });
        Self::with_sources(sources, options)
    }

    /// With other kernels of the same names, as mutation tests have them.
    pub fn with_sources(sources: Sources, options: EmulatedOptions) -> Self {
        Emulated {
            sources,
            emulator: Emulator::in_target_directory(),
            options,
            libraries: HashMap::new(),
            ran: Vec::new(),
            fault: None,
            unfinished: Vec::new(),
            mark: 0,
        }
    }

    /// The dispatches since this was last called, where they are kept.
    pub fn take_reports(&mut self) -> Vec<Ran> {
        std::mem::take(&mut self.ran)
    }

    fn dispatch(&mut self, dispatch: &lily_gpu::Dispatch<'_, Self>) -> Result<(), DeviceError> {
        let words: Vec<[u8; 4]> = dispatch
            .arguments
            .iter()
            .map(|argument| match argument {
                Argument::Word(word) => word.to_le_bytes(),
                _ => [0; 4],
            })
            .collect();
        let mut arguments: Vec<lily_msl::Argument<'_>> = dispatch
            .arguments
            .iter()
            .zip(&words)
            .map(|(argument, word)| match argument {
                Argument::None => lily_msl::Argument::Unbound,
                Argument::Word(_) => lily_msl::Argument::Bytes(word),
                Argument::Buffer {
                    buffer,
                    offset,
                    bytes,
                    ..
                } => lily_msl::Argument::Shared {
                    buffer,
                    offset: *offset,
                    length: (*bytes).min(buffer.len() - SENTINEL - offset),
                },
            })
            .collect();
        arguments.extend(
            dispatch
                .reached
                .iter()
                .map(|buffer| lily_msl::Argument::Resident(buffer)),
        );
        let mut launch =
            Launch::new(dispatch.grid, [dispatch.threads, 1, 1]).schedule(self.options.schedule);
        launch.counters_only = self.options.counters_only;
        let pipeline = dispatch.pipeline;
        let constants: Vec<lily_msl::Constant> = pipeline.constants.iter().map(constant).collect();
        let report = pipeline
            .library
            .dispatch(pipeline.kernel, &constants, launch, &mut arguments)
            .map_err(|error| failure(pipeline.kernel, error))?;
        if self.options.keep_reports {
            self.ran.push(Ran {
                kernel: pipeline.kernel,
                constants: pipeline.constants.clone(),
                report,
            });
        }
        // A plain build does not see a store outside of a buffer; what lies behind it does.
        for argument in &dispatch.arguments {
            if let Argument::Buffer { buffer, .. } = argument {
                check_sentinel(buffer, pipeline.kernel)?;
            }
        }
        Ok(())
    }
}

impl Emulated {
    /// What is asked of whoever uses a GPU.
    fn assert_untouched(
        &self,
        buffer: &SharedBuffer,
        offset: usize,
        bytes: usize,
        by: impl Fn(&Unfinished) -> &[Range<u64>],
    ) {
        let start = buffer.address() + offset as u64;
        let end = start + bytes as u64;
        let mut ranges = self.unfinished.iter().flat_map(by);
        let meets = ranges.any(|range| range.start < end && start < range.end);
        assert!(
            !meets,
            "{bytes} bytes of a buffer that unfinished work uses"
        );
    }
}

fn check_sentinel(buffer: &SharedBuffer, kernel: &str) -> Result<(), DeviceError> {
    let mut behind = [0; SENTINEL];
    buffer.read(buffer.len() - SENTINEL, &mut behind);
    if behind.iter().any(|byte| *byte != SENTINEL_BYTE) {
        return Err(DeviceError::Failed(format!(
            "kernel {kernel} wrote behind the end of a buffer"
        )));
    }
    Ok(())
}

fn constant(constant: &Constant) -> lily_msl::Constant {
    let value = match constant.value {
        ConstantValue::UInt(value) => lily_msl::ConstantValue::UInt(value),
        ConstantValue::Int(value) => lily_msl::ConstantValue::Int(value),
        ConstantValue::Bool(value) => lily_msl::ConstantValue::Bool(value),
        ConstantValue::Float(value) => lily_msl::ConstantValue::Float(value),
    };
    lily_msl::Constant {
        index: constant.index,
        value,
    }
}

fn failure(kernel: &str, error: lily_msl::EmulatorError) -> DeviceError {
    DeviceError::Failed(format!("kernel {kernel}: {error}"))
}

impl Gpu for Emulated {
    type Buffer = SharedBuffer;
    type Pipeline = Pipeline;

    fn describe(&self) -> GpuDescription {
        GpuDescription {
            device: "emulated",
            hardware: "Metal kernels emulated on this processor".into(),
            cores: 1,
            matrix_units: self.options.matrix_units,
            matrices: format!("{}, emulated", self.options.matrix_units),
            reason: String::new(),
        }
    }

    fn available_memory(&self) -> Option<u64> {
        None
    }

    fn allocate(&self, bytes: usize, _what: &str) -> Result<SharedBuffer, DeviceError> {
        let buffer = SharedBuffer::new(bytes + SENTINEL);
        buffer.write(bytes, &[SENTINEL_BYTE; SENTINEL]);
        Ok(buffer)
    }

    fn address(&self, buffer: &SharedBuffer) -> u64 {
        buffer.address()
    }

    fn write(&self, buffer: &SharedBuffer, offset: usize, bytes: &[u8]) {
        self.assert_untouched(buffer, offset, bytes.len(), |unfinished| {
            &unfinished.reached
        });
        buffer.write(offset, bytes);
    }

    fn read(&self, buffer: &SharedBuffer, offset: usize, bytes: &mut [u8]) {
        if bytes.len() > SLOT {
            self.assert_untouched(buffer, offset, bytes.len(), |unfinished| {
                &unfinished.written
            });
        }
        buffer.read(offset, bytes);
    }

    fn copy(&self, from: (&SharedBuffer, usize), to: (&SharedBuffer, usize), bytes: usize) {
        let mut copied = vec![0; bytes];
        self.read(from.0, from.1, &mut copied);
        self.write(to.0, to.1, &copied);
    }

    fn pipeline(
        &mut self,
        kernel: &Bound,
        constants: &[Constant],
    ) -> Result<Pipeline, DeviceError> {
        if !self.libraries.contains_key(kernel.file) {
            let library = self
                .emulator
                .compile(&self.sources, kernel.file, self.options.build)
                .map_err(|error| failure(kernel.name, error))?;
            self.libraries.insert(kernel.file, Arc::new(library));
        }
        let library = self.libraries[kernel.file].clone();
        let signature = library.kernel(kernel.name);
        let read = |constant: &Constant| {
            signature.is_some_and(|signature| {
                let constants = &signature.function_constants;
                constants.iter().any(|read| read.index == constant.index)
            })
        };
        let further = self.options.further_constant.filter(read);
        Ok(Pipeline {
            kernel: kernel.name,
            constants: constants.iter().copied().chain(further).collect(),
            library,
        })
    }

    fn submit(&mut self, _key: Option<u64>, stages: &[Stage<'_, Self>]) -> Result<(), DeviceError> {
        let batches = match &self.options.limits {
            None => vec![Batch::Stages(0..stages.len())],
            Some(limits) => batches(stages, limits),
        };
        let dispatches = batches
            .iter()
            .flat_map(|batch| batch.stages(stages))
            .flatten();
        for dispatch in dispatches {
            if self.fault.is_some() {
                break;
            }
            self.unfinished
                .push(Unfinished::of(dispatch, self.mark + 1));
            if let Err(error) = self.dispatch(dispatch) {
                self.fault = Some(error);
            }
        }
        Ok(())
    }

    fn wait(&mut self) -> Result<(), DeviceError> {
        self.unfinished.clear();
        self.fault.take().map_or(Ok(()), Err)
    }

    fn mark(&mut self) -> Result<u64, DeviceError> {
        self.mark += 1;
        Ok(self.mark)
    }

    fn wait_for(&mut self, mark: u64) -> Result<(), DeviceError> {
        self.unfinished.retain(|unfinished| unfinished.mark > mark);
        if self.fault.is_some() {
            return self.wait();
        }
        Ok(())
    }

    fn idle(&mut self) {
        self.unfinished.clear();
    }
}
