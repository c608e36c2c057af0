//! A device made of a [`Gpu`]: weights resident, plans recorded once and run many times.

use crate::gpu::{Argument, Dispatch, Gpu, Stage};
use crate::kernels::{Memory, Operand, Region};
use crate::record::{self, Recorded, Recording, launch};
use crate::sampling;
use crate::state::{GpuState, StateLayout, decode, encode, lock};
use crate::switches::Switches;
use crate::weights::Weights;
use lily_checkpoint::{Checkpoint, ModelConfig};
use lily_plan::{
    Device, DeviceDescription, DeviceError, ElementType, Launch, ModelDescription, Observer,
    Operation, Outcome, Plan, Precision, ScratchId, SessionBytes, SessionState,
};
use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, Weak};

/// How to set up a [`GpuDevice`].
#[derive(Clone, Copy, Debug, Default)]
pub struct GpuOptions {
    /// Mechanisms to turn off.
    pub switches: Switches,
}

/// Executes plans on a GPU.
pub struct GpuDevice<G: Gpu> {
    gpu: Arc<Mutex<G>>,
    model: Arc<ModelDescription>,
    weights: Weights<G>,
    layouts: [Arc<StateLayout>; 2],
    frequencies: G::Buffer,
    arena: Option<(G::Buffer, usize)>,
    launch_table: Option<(G::Buffer, usize)>,
    sampling: Option<(G::Buffer, usize)>,
    pipelines: Vec<G::Pipeline>,
    pipeline_indices: HashMap<PipelineKey, usize>,
    recordings: RecordingCache,
    /// The last key that was given.
    keys: u64,
    options: GpuOptions,
}

/// A kernel's name and the bits of its constants.
type PipelineKey = (&'static str, Vec<(u32, u32)>);

/// Recordings of the plans run lately.
#[derive(Default)]
struct RecordingCache(VecDeque<(Weak<Plan>, Kept)>);

/// A recording, its dispatches' pipelines and the key that its submission is kept under.
#[derive(Clone)]
struct Kept {
    recording: Arc<Recording>,
    /// For each stage, the pipelines of its dispatches.
    pipelines: Arc<[Vec<usize>]>,
    key: u64,
}

impl RecordingCache {
    const ENTRIES: usize = 16;

    /// The plan's recording. Keys of recordings that are no longer kept go to `forgotten`.
    fn find(&mut self, plan: &Arc<Plan>, forgotten: &mut Vec<u64>) -> Option<Kept> {
        self.0.retain(|(known, kept)| {
            let alive = known.strong_count() > 0;
            if !alive {
                forgotten.push(kept.key);
            }
            alive
        });
        let same = |known: &Weak<Plan>| std::ptr::eq(known.as_ptr(), Arc::as_ptr(plan));
        let found = self.0.iter().find(|(known, _)| same(known))?;
        Some(found.1.clone())
    }

    fn keep(&mut self, plan: &Arc<Plan>, kept: &Kept, forgotten: &mut Vec<u64>) {
        self.0.push_front((Arc::downgrade(plan), kept.clone()));
        let more = self.0.len().min(Self::ENTRIES);
        forgotten.extend(self.0.drain(more..).map(|(_, kept)| kept.key));
    }

    /// Nothing submitted before may come again: its buffers are gone.
    fn renew(&mut self, keys: &mut u64, forgotten: &mut Vec<u64>) {
        for (_, kept) in &mut self.0 {
            forgotten.push(kept.key);
            *keys += 1;
            kept.key = *keys;
        }
    }
}

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

    /// Records the plan and makes the pipelines, the arena, the launch table and the `sampling` bytes of sampling
    /// parameters that it needs, where they are not there from before.
    fn prepare(&mut self, plan: &Arc<Plan>, sampling: usize) -> Result<Kept, DeviceError> {
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
            (
                &mut self.launch_table,
                launch::bytes(plan.class.rows),
                "launch table",
            ),
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

    /// A dispatch with its pipeline and its memory.
    fn resolve<'a>(
        &'a self,
        recorded: &Recorded,
        pipeline: usize,
        reached: &'a [&'a G::Buffer],
    ) -> Dispatch<'a, G> {
        let buffer = |region: &Region, written: bool| {
            let buffer = match region.memory {
                Memory::Arena => self.arena(),
                Memory::Launch => self.table(),
                Memory::Frequencies => &self.frequencies,
                Memory::Sampling => self.sampling(),
                Memory::Weight(id) => self.weights.buffer(id),
            };
            Argument::Buffer {
                buffer,
                offset: region.offset,
                bytes: region.bytes,
                written,
            }
        };
        let arguments = recorded.bound.operands.iter().map(|operand| match operand {
            Operand::None => Argument::None,
            Operand::Input(input) => buffer(&input.0, false),
            Operand::Output(output) => buffer(&output.0, true),
            Operand::Word(word) => Argument::Word(*word),
        });
        Dispatch {
            pipeline: &self.pipelines[pipeline],
            arguments: arguments.collect(),
            grid: recorded.grid,
            threads: recorded.threads,
            reached: if recorded.reaches_sessions {
                reached
            } else {
                &[]
            },
        }
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
        DeviceDescription {
            device: gpu.device.into(),
            hardware: gpu.hardware,
            kernels: gpu.matrices,
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
        (arena + launch::bytes(rows) + sampling + logits) as u64
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
        self.launch(plan, launch, true, |gpu, ready, observer| {
            if let Some(observer) = observer {
                for (stage, steps) in plan.stages.iter().enumerate() {
                    gpu.submit(None, &[ready.stage(stage)])?;
                    gpu.wait()?;
                    for &step in steps {
                        observer.after_step(step, &|id| ready.read(gpu, id));
                    }
                }
            } else if ready.device.options.switches.routing_through_cpu {
                ready.run_with_routing_through_cpu(gpu)?;
            } else {
                if !gpu.replay(ready.kept.key)? {
                    gpu.submit(Some(ready.kept.key), &ready.stages())?;
                }
                gpu.wait()?;
            }
            Ok(Outcome {
                logits: plan.logits.map_or(Vec::new(), |id| ready.read(gpu, id)),
                tokens: ready.chosen(gpu),
            })
        })
    }
}

/// A plan bound to memory and sessions, ready to be submitted.
struct Ready<'a, G: Gpu> {
    device: &'a GpuDevice<G>,
    plan: &'a Plan,
    kept: Kept,
    reached: Vec<&'a G::Buffer>,
}

impl<G: Gpu + 'static> Ready<'_, G> {
    fn stage(&self, stage: usize) -> Stage<'_, G> {
        let dispatches = self.kept.recording.stages[stage].iter();
        dispatches
            .zip(&self.kept.pipelines[stage])
            .map(|(recorded, &pipeline)| self.device.resolve(recorded, pipeline, &self.reached))
            .collect()
    }

    fn stages(&self) -> Vec<Stage<'_, G>> {
        let stages = (0..self.kept.recording.stages.len()).map(|stage| self.stage(stage));
        if self.device.options.switches.serial_encoding {
            return stages.flatten().map(|dispatch| vec![dispatch]).collect();
        }
        stages.collect()
    }

    /// Stops wherever experts were chosen, reads the choice and writes it back.
    fn run_with_routing_through_cpu(&self, gpu: &mut G) -> Result<(), DeviceError> {
        for (stage, steps) in self.plan.stages.iter().enumerate() {
            gpu.submit(None, &[self.stage(stage)])?;
            for &step in steps {
                if let Operation::Route { ids, weights, .. } = self.plan.steps[step].operation {
                    gpu.wait()?;
                    for id in [ids, weights] {
                        let mut bytes = vec![0; self.plan.spec(id).bytes()];
                        let at = self.kept.recording.placement.range(id).start;
                        gpu.read(self.device.arena(), at, &mut bytes);
                        gpu.write(self.device.arena(), at, &bytes);
                    }
                }
            }
        }
        gpu.wait()
    }

    fn read(&self, gpu: &G, id: ScratchId) -> Vec<f32> {
        let spec = self.plan.spec(id);
        let mut bytes = vec![0; spec.bytes()];
        gpu.read(
            self.device.arena(),
            self.kept.recording.placement.range(id).start,
            &mut bytes,
        );
        decode(&bytes, spec.element)
    }

    fn chosen(&self, gpu: &G) -> Vec<u32> {
        if !self.plan.chooses_token() {
            return Vec::new();
        }
        let mut bytes = vec![0; self.plan.class.rows * 4];
        gpu.read(self.device.table(), launch::CHOSEN, &mut bytes);
        let words = bytes.chunks_exact(4);
        words
            .map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]))
            .collect()
    }
}

impl<G: Gpu + 'static> GpuDevice<G> {
    /// Shows the stages that running `plan` would submit, bound and ready, to `look`, which may run them; no session
    /// moves on. For measuring.
    pub fn with_stages<T>(
        &mut self,
        plan: &Arc<Plan>,
        launch: Launch<'_>,
        look: impl FnOnce(&mut G, &[Stage<'_, G>]) -> Result<T, DeviceError>,
    ) -> Result<T, DeviceError> {
        self.launch(plan, launch, false, |gpu, ready, _| {
            look(gpu, &ready.stages())
        })
    }

    /// Binds a launch, has `body` run it, and moves the sessions on.
    fn launch<T>(
        &mut self,
        plan: &Arc<Plan>,
        mut launch: Launch<'_>,
        commit: bool,
        body: impl FnOnce(&mut G, &Ready<'_, G>, Option<&mut dyn Observer>) -> Result<T, DeviceError>,
    ) -> Result<T, DeviceError> {
        let Launch {
            tokens,
            preset,
            token_limit,
            sampling,
            ..
        } = launch;
        let observer = launch.observer.take();
        let mut states = launch.states::<GpuState<G>>(plan)?;
        let rows_each = plan.class.rows / states.len();
        let parameters = if plan.samples() {
            sampling::encode(sampling, plan.class.rows)
        } else {
            Vec::new()
        };
        let kept = self.prepare(plan, parameters.len())?;
        for state in &mut states {
            let end = state.position() + rows_each;
            state.reserve(end)?;
        }
        let this = &*self;
        let mut gpu = lock(&this.gpu);
        let table = this.table();
        for (index, state) in states.iter().enumerate() {
            gpu.write(table, launch::SESSIONS + index * 32, &state.describe(&gpu));
        }
        gpu.write(table, launch::LIMIT, &token_limit.to_le_bytes());
        let bytes: Vec<u8> = tokens
            .iter()
            .flat_map(|token| token.to_le_bytes())
            .collect();
        gpu.write(table, launch::TOKENS, &bytes);
        if !parameters.is_empty() {
            gpu.write(this.sampling(), 0, &parameters);
        }
        for (id, values) in preset {
            let spec = plan.spec(*id);
            let at = kept.recording.placement.range(*id).start;
            gpu.write(this.arena(), at, &encode(values, spec.element));
        }
        let ready = Ready {
            device: this,
            plan,
            kept,
            reached: states.iter().flat_map(|state| state.buffers()).collect(),
        };
        let result = body(&mut gpu, &ready, observer)?;
        drop(ready);
        drop(gpu);
        if commit {
            states.iter_mut().for_each(|state| state.commit(rows_each));
        }
        Ok(result)
    }

    fn arena(&self) -> &G::Buffer {
        &self.arena.as_ref().expect("made before a launch").0
    }

    fn sampling(&self) -> &G::Buffer {
        &self.sampling.as_ref().expect("made before a launch").0
    }

    fn table(&self) -> &G::Buffer {
        &self.launch_table.as_ref().expect("made before a launch").0
    }
}
