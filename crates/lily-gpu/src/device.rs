//! A device made of a [`Gpu`]: weights resident, plans recorded once and run many times.

use crate::ahead::Chains;
use crate::cache::{Kept, RecordingCache};
use crate::gpu::{Gpu, MatrixUnits};
use crate::record::{self, Recorded, Recording, launch};
use crate::sampling;
use crate::state::{GpuState, StateLayout, encode, lock};
use crate::switches::Switches;
use crate::weights::Weights;
use lily_checkpoint::{Checkpoint, ModelConfig};
use lily_plan::{
    Device, DeviceDescription, DeviceError, ElementType, Launch, ModelDescription, Outcome, Plan,
    Precision, RunAhead, SessionBytes, SessionState, StageTiming,
};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Mutex};

/// How to set up a [`GpuDevice`].
#[derive(Clone, Copy, Debug, Default)]
pub struct GpuOptions {
    /// Mechanisms to turn off.
    pub switches: Switches,
}

/// Executes plans on a GPU.
pub struct GpuDevice<G: Gpu> {
    pub(crate) gpu: Arc<Mutex<G>>,
    model: Arc<ModelDescription>,
    pub(crate) weights: Weights<G>,
    layouts: [Arc<StateLayout>; 2],
    pub(crate) frequencies: G::Buffer,
    arena: Option<(G::Buffer, usize)>,
    launch_table: Option<(G::Buffer, usize)>,
    sampling: Option<(G::Buffer, usize)>,
    pub(crate) pipelines: Vec<G::Pipeline>,
    pipeline_indices: HashMap<PipelineKey, usize>,
    recordings: RecordingCache,
    /// The last key that was given.
    keys: u64,
    pub(crate) chains: Chains,
    pub(crate) options: GpuOptions,
}

/// A kernel's name and the bits of its constants.
type PipelineKey = (&'static str, Vec<(u32, u32)>);

impl<G: Gpu + 'static> GpuDevice<G> {
    /// Loads the weights of `checkpoint`; `progress` is told the bytes read so far and in all.
    pub fn new(
        gpu: G,
        checkpoint: &Checkpoint,
        options: GpuOptions,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Self, DeviceError> {
        let config = checkpoint.config();
        refuse_shapes(&gpu, config)?;
        let weights = Weights::load(&gpu, checkpoint, progress)?;
        let frequencies = {
            let values: Vec<f32> = (0..config.rotary_dim / 2)
                .map(|pair| {
                    let exponent = -2.0 * pair as f64 / config.rotary_dim as f64;
                    config.rope_theta.powf(exponent) as f32
                })
                .collect();
            let bytes = encode(&values, ElementType::F32);
            let buffer = gpu.allocate(bytes.len().max(4), "rotary frequencies")?;
            gpu.write(&buffer, 0, &bytes);
            buffer
        };
        let layouts = [Precision::F32, Precision::Bf16]
            .map(|precision| Arc::new(StateLayout::new(config, precision)));
        Ok(GpuDevice {
            model: Arc::new(ModelDescription::of(checkpoint).expect("every weight was loaded")),
            gpu: Arc::new(Mutex::new(gpu)),
            weights,
            layouts,
            frequencies,
            arena: None,
            launch_table: None,
            sampling: None,
            pipelines: Vec::new(),
            pipeline_indices: HashMap::new(),
            recordings: RecordingCache::default(),
            keys: 0,
            chains: Chains::default(),
            options,
        })
    }

    /// The model as plans see it.
    pub fn model(&self) -> &Arc<ModelDescription> {
        &self.model
    }

    /// The machine: counters of what ran, for tests and tools.
    pub fn with_gpu<T>(&self, look: impl FnOnce(&mut G) -> T) -> T {
        look(&mut lock(&self.gpu))
    }

    fn layout(&self, precision: Precision) -> &Arc<StateLayout> {
        match precision {
            Precision::F32 => &self.layouts[0],
            Precision::Bf16 => &self.layouts[1],
        }
    }

    /// The plan's dispatches: what [`Device::execute`] runs.
    pub fn recording(&mut self, plan: &Arc<Plan>) -> Result<Arc<Recording>, DeviceError> {
        Ok(self.prepare(plan, 0)?.recording)
    }

    /// Waits for what is under way, records the plan and makes the pipelines, the arena, the launch table and the `sampling` bytes of sampling
    /// parameters that it needs, where they are not there from before.
    pub(crate) fn prepare(
        &mut self,
        plan: &Arc<Plan>,
        sampling: usize,
    ) -> Result<Kept, DeviceError> {
        self.settle();
        let mut forgotten = Vec::new();
        let shared = self.gpu.clone();
        let mut gpu = lock(&shared);
        if sampling > self.sampling.as_ref().map_or(0, |(_, size)| *size) {
            self.sampling = None;
            self.recordings.renew(&mut self.keys, &mut forgotten);
            // A history grows by a token at a time.
            let bytes = sampling.next_power_of_two();
            self.sampling = Some((gpu.allocate(bytes, "sampling parameters")?, bytes));
        }
        if let Some(kept) = self.recordings.find(plan, &mut forgotten) {
            forgotten.into_iter().for_each(|key| gpu.forget(key));
            return Ok(kept);
        }
        let layout = self.layout(plan.class.precision).clone();
        let recording = record::record(plan, &layout, &self.options.switches, &gpu.describe())?;
        let mut pipelines = Vec::with_capacity(recording.stages.len());
        for stage in &recording.stages {
            let indices: Result<Vec<usize>, DeviceError> = stage
                .iter()
                .map(|recorded| self.pipeline(&mut gpu, recorded))
                .collect();
            pipelines.push(indices?);
        }
        let memories = [
            (
                &mut self.arena,
                recording.placement.arena_bytes.max(4),
                "working memory",
            ),
            (&mut self.launch_table, launch::bytes(plan), "launch table"),
        ];
        for (held, bytes, what) in memories {
            if held.as_ref().is_none_or(|(_, size)| *size < bytes) {
                // The old one goes first, and what was submitted with it.
                *held = None;
                self.recordings.renew(&mut self.keys, &mut forgotten);
                *held = Some((gpu.allocate(bytes, what)?, bytes));
            }
        }
        self.keys += 1;
        let kept = Kept {
            recording: Arc::new(recording),
            pipelines: pipelines.into(),
            key: self.keys,
        };
        self.recordings.keep(plan, &kept, &mut forgotten);
        forgotten.into_iter().for_each(|key| gpu.forget(key));
        Ok(kept)
    }

    /// The index of the dispatch's pipeline, made if no dispatch before it had the same.
    fn pipeline(&mut self, gpu: &mut G, recorded: &Recorded) -> Result<usize, DeviceError> {
        let next = self.pipelines.len();
        match self.pipeline_indices.entry(pipeline_key(recorded)) {
            Entry::Occupied(known) => Ok(*known.get()),
            Entry::Vacant(place) => {
                let pipeline = gpu.pipeline(&recorded.bound, &recorded.bound.constants)?;
                self.pipelines.push(pipeline);
                Ok(*place.insert(next))
            }
        }
    }

    pub(crate) fn arena(&self) -> &G::Buffer {
        &self.arena.as_ref().expect("made before a launch").0
    }

    pub(crate) fn sampling(&self) -> &G::Buffer {
        &self.sampling.as_ref().expect("made before a launch").0
    }

    pub(crate) fn table(&self) -> &G::Buffer {
        &self.launch_table.as_ref().expect("made before a launch").0
    }
}

fn pipeline_key(recorded: &Recorded) -> PipelineKey {
    use crate::kernels::ConstantValue;
    let bits = |value: ConstantValue| match value {
        ConstantValue::UInt(value) => value,
        ConstantValue::Int(value) => value as u32,
        ConstantValue::Bool(value) => u32::from(value),
        ConstantValue::Float(value) => value.to_bits(),
    };
    let constants = recorded.bound.constants.iter();
    let constants = constants.map(|constant| (constant.index, bits(constant.value)));
    (recorded.bound.name, constants.collect())
}

/// Shapes that the kernels do not have.
fn refuse_shapes<G: Gpu>(gpu: &G, config: &ModelConfig) -> Result<(), DeviceError> {
    let limits = [
        (
            !config.head_dim.is_multiple_of(32) || config.head_dim > 256,
            format!("head_dim {}", config.head_dim),
            "its kernels take heads of 32 to 256 columns, in 32s",
        ),
        (
            !config.linear_key_dim.is_multiple_of(4) || config.linear_key_dim > 128,
            format!("linear_key_head_dim {}", config.linear_key_dim),
            "its kernels take key heads of up to 128 columns, in fours",
        ),
        (
            config.linear_value_dim > 128,
            format!("linear_value_head_dim {}", config.linear_value_dim),
            "its kernels take value heads of up to 128 columns",
        ),
    ];
    for (refused, what, reason) in limits {
        if refused {
            return Err(DeviceError::Unsupported {
                device: gpu.describe().device.into(),
                what,
                reason: reason.into(),
            });
        }
    }
    Ok(())
}

impl<G: Gpu + 'static> Device for GpuDevice<G> {
    fn describe(&self) -> DeviceDescription {
        let gpu = lock(&self.gpu).describe();
        let units = self.options.switches.units(gpu.matrix_units);
        let (kernels, reason) = if units == gpu.matrix_units {
            (gpu.matrices, gpu.reason)
        } else {
            (units.to_string(), "others are switched off".into())
        };
        DeviceDescription {
            device: gpu.device.into(),
            hardware: gpu.hardware,
            kernels,
            reason,
            workers: gpu.cores,
        }
    }

    fn available_memory(&self) -> Option<u64> {
        lock(&self.gpu).available_memory()
    }

    fn session_bytes(&self, precision: Precision) -> SessionBytes {
        self.layout(precision)
            .session_bytes(self.model.config.max_positions)
    }

    fn working_bytes(&self, plan: &Plan) -> u64 {
        // The arena, the launch table and sampling parameters, and the logits as they are handed out.
        let logits = plan.logits.map_or(0, |id| plan.spec(id).elements() * 4);
        let rows = plan.class.rows;
        let sampling = if plan.samples() {
            sampling::least_bytes(rows)
        } else {
            0
        };
        let arena = plan.place(ElementType::bytes).arena_bytes;
        (arena + launch::bytes(plan) + sampling + logits) as u64
    }

    fn suit(&self, plan: Plan) -> Plan {
        let gpu = lock(&self.gpu).describe();
        match self.options.switches.units(gpu.matrix_units) {
            MatrixUnits::PackedTensorOperations => plan.with_exact_weights(),
            _ => plan,
        }
    }

    fn most_decode_rows(&self) -> usize {
        lock(&self.gpu).most_decode_rows()
    }

    fn can_sample(&self) -> bool {
        self.model.config.vocab_size <= record::MOST_SAMPLED_TOKENS
    }

    fn new_session(
        &self,
        precision: Precision,
        capacity: usize,
    ) -> Result<Box<dyn SessionState>, DeviceError> {
        let layout = self.layout(precision).clone();
        let state = GpuState::new(self.gpu.clone(), layout, precision, capacity)?;
        Ok(Box::new(state))
    }

    fn execute(&mut self, plan: &Arc<Plan>, launch: Launch<'_>) -> Result<Outcome, DeviceError> {
        self.run(plan, launch)
    }

    fn take_timings(&mut self) -> Vec<StageTiming> {
        lock(&self.gpu).take_timings()
    }

    fn run_ahead(&mut self) -> Result<&mut dyn RunAhead, &'static str> {
        if self.options.switches.token_through_cpu {
            return Err("it is switched off");
        }
        if self.options.switches.routing_through_cpu {
            return Err("the CPU waits for the experts of each layer");
        }
        Ok(self)
    }
}

impl<G: Gpu> Drop for GpuDevice<G> {
    fn drop(&mut self) {
        // A run may be under way that nobody collects.
        lock(&self.gpu).idle();
    }
}
