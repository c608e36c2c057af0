//! The CUDA device: the unmodified kernels of `kernels/*.metal` on NVIDIA GPUs. They are translated when this crate
//! is built and compiled by NVRTC for the GPU at hand when it runs. A plan that runs again is replayed as a graph.

mod driver;

use driver::{DeviceBuffer, Driver, Event, Graph, Handle};
use lily_gpu::kernels::{Bound, Constant, ConstantValue};
use lily_gpu::timing::{Timings, stage_label};
use lily_gpu::{Argument, Dispatch, Gpu, GpuDescription, MatrixUnits, Stage};
use lily_msl::nvrtc::{CompileOptions, Nvrtc};
use lily_plan::{DeviceError, StageTiming};
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

include!(concat!(env!("OUT_DIR"), "/kernels.rs"));

/// How the device runs.
#[derive(Clone, Copy, Debug)]
pub struct CudaOptions {
    /// Whether plans that run again are replayed as graphs; else every kernel is launched by itself.
    pub graphs: bool,
    /// Whether each stage is timed by the GPU's own clock; then nothing is replayed. Slower.
    pub stage_timing: bool,
}

impl Default for CudaOptions {
    fn default() -> Self {
        CudaOptions {
            graphs: true,
            stage_timing: false,
        }
    }
}

/// The first NVIDIA GPU.
pub struct Cuda {
    driver: Arc<Driver>,
    compiler: Nvrtc,
    architecture: String,
    graphs: HashMap<u64, Graph>,
    /// Marks that were not waited for, in order; the last that was made.
    marks: VecDeque<(u64, Event)>,
    mark: u64,
    /// Stages that were timed, with the events before and behind each.
    timed: Vec<(String, Event, Event)>,
    options: CudaOptions,
    resources: Vec<Resources>,
}

/// What a compiled kernel takes of the machine.
#[derive(Clone, Debug)]
pub struct Resources {
    /// The kernel.
    pub kernel: &'static str,
    /// Registers of a thread.
    pub registers: u32,
    /// Bytes that a thread spills.
    pub local_bytes: u32,
    /// Threadgroup memory.
    pub threadgroup_bytes: u32,
}

/// A kernel compiled for its constants.
pub struct Pipeline {
    kernel: &'static str,
    function: Handle,
    parameters: &'static [(u32, bool)],
}

// SAFETY: a function of the driver's is not tied to a thread.
unsafe impl Send for Pipeline {}

impl Cuda {
    /// Opens the GPU, or tells what is missing.
    pub fn open(options: CudaOptions) -> Result<Self, DeviceError> {
        let driver = Driver::open()?;
        let compiler = Nvrtc::load().map_err(|error| DeviceError::Unsupported {
            device: "cuda".into(),
            what: "anything".into(),
            reason: error.to_string(),
        })?;
        let architecture = driver.architecture();
        Ok(Cuda {
            driver,
            compiler,
            architecture,
            graphs: HashMap::new(),
            marks: VecDeque::new(),
            mark: 0,
            timed: Vec::new(),
            options,
            resources: Vec::new(),
        })
    }

    /// What the kernels compiled so far take of the machine.
    pub fn resources(&self) -> &[Resources] {
        &self.resources
    }

    /// Microseconds that `stages` take on the GPU: the median of `times` runs after as many to warm up.
    pub fn time(&mut self, stages: &[Stage<'_, Self>], times: usize) -> Result<f64, DeviceError> {
        let graph = self.driver.capture(|| self.launch_all(stages))?;
        let mut all = Vec::new();
        for run in 0..2 * times {
            let microseconds = self.driver.time(|| graph.launch())?;
            if run >= times {
                all.push(microseconds);
            }
        }
        all.sort_by(f64::total_cmp);
        Ok(all[all.len() / 2])
    }

    fn launch_all(&self, stages: &[Stage<'_, Self>]) -> Result<(), DeviceError> {
        let mut dispatches = stages.iter().flatten();
        dispatches.try_for_each(|dispatch| self.launch(dispatch))
    }

    fn launch(&self, dispatch: &Dispatch<'_, Self>) -> Result<(), DeviceError> {
        let value = |&(index, _): &(u32, bool)| match dispatch.arguments.get(index as usize) {
            Some(Argument::Buffer { buffer, offset, .. }) => buffer.address + *offset as u64,
            Some(Argument::Word(word)) => u64::from(*word),
            Some(Argument::None) | None => 0,
        };
        let mut parameters: Vec<u64> = dispatch.pipeline.parameters.iter().map(value).collect();
        // SAFETY: the parameters are those of the kernel's signature in its order (build.rs); each buffer is borrowed
        // by the dispatch, and lives until the work has been waited for by the contract of `Gpu`.
        unsafe {
            self.driver.launch(
                dispatch.pipeline.function,
                dispatch.grid,
                dispatch.threads,
                &mut parameters,
            )
        }
    }
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

impl Gpu for Cuda {
    type Buffer = DeviceBuffer;
    type Pipeline = Pipeline;

    /// The kernels for several rows are slower here than as many runs of those for one: on an H200, with the shapes of
    /// Qwen3.6-35B-A3B behind 256 tokens, two rows have 0.74 times the rate of one after the other, four 0.58, eight 0.52
    /// (`measure -- batches`).
    fn most_decode_rows(&self) -> usize {
        1
    }

    fn describe(&self) -> GpuDescription {
        let (major, minor) = self.compiler.version();
        GpuDescription {
            device: "cuda",
            hardware: self.driver.name(),
            cores: self.driver.multiprocessors(),
            matrix_units: MatrixUnits::SixteenBitMatrices,
            matrices: format!(
                "tensor cores by mma ({}, NVRTC {major}.{minor})",
                self.architecture
            ),
            reason: String::new(),
        }
    }

    fn available_memory(&self) -> Option<u64> {
        self.driver.free_memory()
    }

    fn allocate(&self, bytes: usize, what: &str) -> Result<DeviceBuffer, DeviceError> {
        self.driver.allocate(bytes, what)
    }

    fn address(&self, buffer: &DeviceBuffer) -> u64 {
        buffer.address
    }

    fn write(&self, buffer: &DeviceBuffer, offset: usize, bytes: &[u8]) {
        buffer.write(offset, bytes);
    }

    fn read(&self, buffer: &DeviceBuffer, offset: usize, bytes: &mut [u8]) {
        buffer.read(offset, bytes);
    }

    fn copy(&self, from: (&DeviceBuffer, usize), to: (&DeviceBuffer, usize), bytes: usize) {
        to.0.copy_from(to.1, from.0, from.1, bytes);
    }

    fn pipeline(
        &mut self,
        kernel: &Bound,
        constants: &[Constant],
    ) -> Result<Pipeline, DeviceError> {
        let unknown = |what: &str| DeviceError::Unsupported {
            device: "cuda".into(),
            what: format!("kernel {}", kernel.name),
            reason: what.into(),
        };
        let (_, text) = TEXTS
            .iter()
            .find(|(file, _)| *file == kernel.file)
            .ok_or_else(|| unknown("it is not among those translated for NVIDIA GPUs"))?;
        let (_, parameters) = PARAMETERS
            .iter()
            .find(|(name, _)| *name == kernel.name)
            .ok_or_else(|| unknown("it has no signature"))?;
        let by_value = parameters.iter().filter(|(_, constant)| *constant);
        let options = CompileOptions {
            constants: constants.iter().map(constant).collect(),
            kernel: Some(kernel.name.into()),
            by_value: by_value.fold(0, |bits, (index, _)| bits | 1 << index),
            ..CompileOptions::new(&self.architecture)
        };
        let compiled = self
            .compiler
            .compile(text, &options)
            .map_err(|error| unknown(&error.to_string()))?;
        for found in compiled
            .kernels
            .iter()
            .filter(|found| found.name == kernel.name)
        {
            self.resources.push(Resources {
                kernel: kernel.name,
                registers: found.registers,
                local_bytes: found.local_bytes,
                threadgroup_bytes: found.threadgroup_bytes,
            });
        }
        Ok(Pipeline {
            kernel: kernel.name,
            function: self.driver.load(&compiled.cubin, kernel.name)?,
            parameters,
        })
    }

    fn submit(&mut self, key: Option<u64>, stages: &[Stage<'_, Self>]) -> Result<(), DeviceError> {
        if self.options.stage_timing {
            for stage in stages {
                let first = self.driver.event()?;
                self.launch_all(std::slice::from_ref(stage))?;
                let last = self.driver.event()?;
                let kernels = stage.iter().map(|dispatch| dispatch.pipeline.kernel);
                self.timed.push((stage_label(kernels), first, last));
            }
            return Ok(());
        }
        match key.filter(|_| self.options.graphs) {
            None => self.launch_all(stages),
            Some(key) => {
                let graph = self.driver.capture(|| self.launch_all(stages))?;
                graph.launch()?;
                self.graphs.insert(key, graph);
                Ok(())
            }
        }
    }

    fn replay(&mut self, key: u64) -> Result<bool, DeviceError> {
        let Some(graph) = self.graphs.get(&key) else {
            return Ok(false);
        };
        graph.launch()?;
        Ok(true)
    }

    fn forget(&mut self, key: u64) {
        self.graphs.remove(&key);
    }

    fn wait(&mut self) -> Result<(), DeviceError> {
        self.marks.clear();
        self.driver.synchronize()?;
        self.driver.tell_fault()
    }

    fn mark(&mut self) -> Result<u64, DeviceError> {
        let event = self.driver.event()?;
        self.mark += 1;
        self.marks.push_back((self.mark, event));
        Ok(self.mark)
    }

    fn wait_for(&mut self, mark: u64) -> Result<(), DeviceError> {
        let behind = self.marks.partition_point(|(known, _)| *known <= mark);
        // None where it was waited for before.
        if let Some((_, event)) = self.marks.drain(..behind).next_back() {
            event.wait()?;
        }
        self.driver.tell_fault()
    }

    fn take_timings(&mut self) -> Vec<StageTiming> {
        let mut timings = Timings::default();
        self.idle();
        for (label, first, last) in self.timed.drain(..) {
            // Whoever waits for work that failed is told so.
            if let Ok(microseconds) = last.microseconds_since(&first) {
                timings.add(&label, microseconds);
            }
        }
        timings.take()
    }

    fn idle(&mut self) {
        // The driver tells an error again to whoever waits.
        let _ = self.driver.synchronize();
    }
}
