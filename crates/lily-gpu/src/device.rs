//! A device made of a [`Gpu`]: weights resident, plans recorded once and run many times.

use crate::gpu::{Argument, Dispatch, Gpu, Stage};
use crate::kernels::{Memory, Operand, Region};
use crate::record::{self, Recorded, Recording, launch};
use crate::state::{GpuState, StateLayout, decode, encode, lock};
use crate::switches::Switches;
use crate::weights::{self, Weights};
use lily_checkpoint::{Checkpoint, ModelConfig};
use lily_plan::{
    Device, DeviceDescription, DeviceError, ElementType, Launch, ModelDescription, Outcome, Phase,
    Plan, Precision, ScratchId, SessionBytes, SessionState,
};
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
    launch: Option<(G::Buffer, usize)>,
    pipelines: HashMap<PipelineKey, G::Pipeline>,
    recordings: RecordingCache,
    options: GpuOptions,
}

/// A kernel's name and the bits of its constants.
type PipelineKey = (&'static str, Vec<(u32, u32)>);

/// Recordings of the plans run lately.
#[derive(Default)]
struct RecordingCache(VecDeque<(Weak<Plan>, Arc<Recording>)>);

impl RecordingCache {
    const ENTRIES: usize = 16;

    fn find(&mut self, plan: &Arc<Plan>) -> Option<Arc<Recording>> {
        self.0.retain(|(known, _)| known.strong_count() > 0);
        let same = |known: &Weak<Plan>| std::ptr::eq(known.as_ptr(), Arc::as_ptr(plan));
        let found = self.0.iter().find(|(known, _)| same(known))?;
        Some(found.1.clone())
    }

    fn keep(&mut self, plan: &Arc<Plan>, recording: &Arc<Recording>) {
        self.0.push_front((Arc::downgrade(plan), recording.clone()));
        self.0.truncate(Self::ENTRIES);
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
            model: Arc::new(weights::describe(checkpoint)),
            gpu: Arc::new(Mutex::new(gpu)),
            weights,
            layouts,
            frequencies,
            arena: None,
            launch: None,
            pipelines: HashMap::new(),
            recordings: RecordingCache::default(),
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
        if let Some(recording) = self.recordings.find(plan) {
            return Ok(recording);
        }
        let layout = self.layout(plan.class.precision).clone();
        let device = lock(&self.gpu).describe().device;
        let recording = record::record(plan, &layout, &self.options.switches, device)?;
        let recording = Arc::new(recording);
        self.recordings.keep(plan, &recording);
        Ok(recording)
    }

    /// Makes the pipelines, the arena and the launch buffer that a recording needs.
    fn prepare(&mut self, plan: &Plan, recording: &Recording) -> Result<(), DeviceError> {
        let mut gpu = lock(&self.gpu);
        for recorded in recording.stages.iter().flatten() {
            let key = pipeline_key(recorded);
            if !self.pipelines.contains_key(&key) {
                let pipeline = gpu.pipeline(&recorded.bound, &recorded.bound.constants)?;
                self.pipelines.insert(key, pipeline);
            }
        }
        let grow = |held: &mut Option<(G::Buffer, usize)>, bytes: usize, what: &str| {
            if held.as_ref().is_none_or(|(_, size)| *size < bytes) {
                // The old one goes first.
                *held = None;
                *held = Some((gpu.allocate(bytes, what)?, bytes));
            }
            Ok::<(), DeviceError>(())
        };
        grow(
            &mut self.arena,
            recording.arena_bytes.max(4),
            "working memory",
        )?;
        grow(
            &mut self.launch,
            launch::bytes(plan.class.rows),
            "launch table",
        )
    }

    /// A dispatch with its memory.
    fn resolve<'a>(&'a self, recorded: &Recorded, reached: &'a [&'a G::Buffer]) -> Dispatch<'a, G> {
        let buffer = |region: &Region, written: bool| {
            let buffer = match region.memory {
                Memory::Arena => &self.arena.as_ref().expect("made before").0,
                Memory::Launch => &self.launch.as_ref().expect("made before").0,
                Memory::Frequencies => &self.frequencies,
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
            pipeline: &self.pipelines[&pipeline_key(recorded)],
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

    fn read_scratch(
        &self,
        gpu: &G,
        plan: &Plan,
        placement: &lily_plan::Placement,
        id: ScratchId,
    ) -> Vec<f32> {
        let spec = plan.spec(id);
        let mut bytes = vec![0; spec.bytes()];
        let arena = &self.arena.as_ref().expect("made before").0;
        gpu.read(arena, placement.range(id).start, &mut bytes);
        decode(&bytes, spec.element)
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
        // The arena and the launch table, and the logits as they are handed out.
        let logits = plan.logits.map_or(0, |id| plan.spec(id).elements() * 4);
        (plan.place(ElementType::bytes).arena_bytes + launch::bytes(plan.class.rows) + logits)
            as u64
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
        let Launch {
            tokens,
            sessions,
            preset,
            token_limit,
            mut observer,
        } = launch;
        let mut states = states::<G>(plan, tokens, sessions)?;
        let rows_each = plan.class.rows / states.len();
        let recording = self.recording(plan)?;
        self.prepare(plan, &recording)?;
        for state in &mut states {
            let end = state.position() + rows_each;
            state.reserve(end)?;
        }
        let placement = plan.place(ElementType::bytes);
        let this = &*self;
        let mut gpu = lock(&this.gpu);
        let arena = &this.arena.as_ref().expect("made before").0;
        let table = &this.launch.as_ref().expect("made before").0;
        for (index, state) in states.iter().enumerate() {
            gpu.write(table, launch::SESSIONS + index * 32, &state.describe(&gpu));
        }
        gpu.write(table, launch::LIMIT, &token_limit.to_le_bytes());
        let token_bytes: Vec<u8> = tokens
            .iter()
            .flat_map(|token| token.to_le_bytes())
            .collect();
        gpu.write(table, launch::TOKENS, &token_bytes);
        for (id, values) in preset {
            let spec = plan.spec(*id);
            if values.len() != spec.elements() {
                return Err(DeviceError::Launch(format!(
                    "{} values for {} of {} by {}",
                    values.len(),
                    spec.name,
                    spec.rows,
                    spec.columns
                )));
            }
            gpu.write(
                arena,
                placement.range(*id).start,
                &encode(values, spec.element),
            );
        }

        let reached: Vec<&G::Buffer> = states.iter().flat_map(|state| state.buffers()).collect();
        let resolve = |stage: &Vec<Recorded>| -> Stage<'_, G> {
            stage
                .iter()
                .map(|recorded| this.resolve(recorded, &reached))
                .collect()
        };
        if let Some(observer) = &mut observer {
            for (stage, steps) in recording.stages.iter().zip(&plan.stages) {
                gpu.submit(&[resolve(stage)])?;
                gpu.wait()?;
                for &step in steps {
                    observer.after_step(step, &|id| this.read_scratch(&gpu, plan, &placement, id));
                }
            }
        } else {
            let stages: Vec<Stage<'_, G>> = recording.stages.iter().map(resolve).collect();
            gpu.submit(&stages)?;
            gpu.wait()?;
        }

        let logits = plan.logits.map_or(Vec::new(), |id| {
            this.read_scratch(&gpu, plan, &placement, id)
        });
        let mut chosen = Vec::new();
        if plan.chooses_token() {
            let mut bytes = vec![0; plan.class.rows * 4];
            gpu.read(table, launch::CHOSEN, &mut bytes);
            let words = bytes.chunks_exact(4);
            chosen = words
                .map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]))
                .collect();
        }
        drop(gpu);
        states.iter_mut().for_each(|state| state.commit(rows_each));
        Ok(Outcome {
            logits,
            tokens: chosen,
        })
    }
}

/// Checks a launch and finds this device's own states in it.
fn states<'s, G: Gpu + 'static>(
    plan: &Plan,
    tokens: &[u32],
    sessions: &'s mut [&mut dyn SessionState],
) -> Result<Vec<&'s mut GpuState<G>>, DeviceError> {
    let refuse = |reason: String| Err(DeviceError::Launch(reason));
    let class = plan.class;
    let wanted = if class.phase == Phase::Prefill {
        1
    } else {
        class.rows
    };
    if tokens.len() != class.rows || sessions.len() != wanted {
        return refuse(format!(
            "the plan has {} rows and {wanted} sessions, the launch {} and {}",
            class.rows,
            tokens.len(),
            sessions.len()
        ));
    }
    let vocabulary = plan.model.config.vocab_size;
    if let Some(token) = tokens.iter().find(|&&token| token as usize >= vocabulary) {
        return refuse(format!("token {token} of a vocabulary of {vocabulary}"));
    }
    let rows_each = class.rows / wanted;
    let mut states = Vec::with_capacity(wanted);
    for session in sessions.iter_mut() {
        let Some(state) = session.as_any_mut().downcast_mut::<GpuState<G>>() else {
            return refuse("a session of another device".into());
        };
        if state.precision() != class.precision {
            let precision = state.precision();
            return refuse(format!(
                "a {precision} session in a {} plan",
                class.precision
            ));
        }
        let end = state.position() + rows_each;
        if end > state.capacity() {
            let capacity = state.capacity();
            return refuse(format!("position {end} of a session made for {capacity}"));
        }
        if class.phase == Phase::Decode && end > class.context {
            return refuse(format!(
                "position {end} in a plan for {} positions",
                class.context
            ));
        }
        states.push(state);
    }
    Ok(states)
}
