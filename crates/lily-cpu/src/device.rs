//! The CPU device.

use crate::arena::{Arena, ELEMENT_BYTES, ScratchView};
use crate::context::{ChosenTokens, Context};
use crate::native::{InstructionSet, Native, Work};
use crate::reference;
use crate::state::{self, CpuState};
use crate::weights::Weights;
use lily_checkpoint::Checkpoint;
use lily_plan::{
    Device, DeviceDescription, DeviceError, Launch, ModelDescription, Outcome, Placement, Plan,
    Precision, RunAhead, SessionBytes, SessionState,
};
use rayon::prelude::*;
use std::collections::VecDeque;
use std::sync::{Arc, Weak};

/// Which implementation of the operations runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kernels {
    /// Vector instructions, all cores.
    Native,
    /// Plain loops, one step after the other, fused operations expanded: the oracle. Slow.
    Reference,
}

/// How to set up a [`CpuDevice`].
#[derive(Clone, Debug)]
pub struct CpuOptions {
    /// Which implementation.
    pub kernels: Kernels,
    /// Threads; all cores by default.
    pub threads: Option<usize>,
    /// Which vector instructions the native kernels use; the widest there are, if not given.
    pub instruction_set: Option<InstructionSet>,
    /// What working memory holds before it is written. NaN makes a value that is read too early show;
    /// tests that leave steps out want a number.
    pub fill: f32,
}

impl Default for CpuOptions {
    fn default() -> Self {
        CpuOptions {
            kernels: Kernels::Native,
            threads: None,
            instruction_set: None,
            fill: f32::NAN,
        }
    }
}

/// Executes plans on the processor.
pub struct CpuDevice {
    pub(crate) weights: Weights,
    pub(crate) arena: Arena,
    model: Arc<ModelDescription>,
    kernels: Kernels,
    set: InstructionSet,
    pool: rayon::ThreadPool,
    placements: PlacementCache,
}

/// Placements of the plans run lately.
#[derive(Default)]
struct PlacementCache(VecDeque<(Weak<Plan>, Arc<Placement>)>);

impl PlacementCache {
    const ENTRIES: usize = 16;

    fn get(&mut self, plan: &Arc<Plan>) -> Arc<Placement> {
        self.0.retain(|(known, _)| known.strong_count() > 0);
        if let Some((_, placement)) = self
            .0
            .iter()
            .find(|(known, _)| std::ptr::eq(known.as_ptr(), Arc::as_ptr(plan)))
        {
            return placement.clone();
        }
        let placement = Arc::new(plan.place(|_| ELEMENT_BYTES));
        self.0.push_front((Arc::downgrade(plan), placement.clone()));
        self.0.truncate(Self::ENTRIES);
        placement
    }
}

impl CpuDevice {
    /// A device for the weights of `checkpoint`, which stay where they are mapped.
    pub fn new(checkpoint: Arc<Checkpoint>, options: &CpuOptions) -> Result<Self, DeviceError> {
        let weights = Weights::new(checkpoint.clone())?;
        let config = weights.config();
        if !config.linear_key_dim.is_multiple_of(16) {
            return Err(DeviceError::Unsupported {
                device: "cpu".into(),
                what: format!("linear_key_head_dim {}", config.linear_key_dim),
                reason: "its kernels take key heads in sixteens".into(),
            });
        }
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(options.threads.unwrap_or(0))
            .thread_name(|index| format!("lily-cpu-{index}"))
            .build()
            .map_err(|error| DeviceError::OutOfMemory {
                what: "worker threads".into(),
                bytes: 0,
                reason: error.to_string(),
            })?;
        let set = options
            .instruction_set
            .unwrap_or_else(InstructionSet::detect);
        if !InstructionSet::available().contains(&set) {
            return Err(DeviceError::Unsupported {
                device: "cpu".into(),
                what: format!("{} kernels", set.name()),
                reason: "this processor does not have these instructions".into(),
            });
        }
        Ok(CpuDevice {
            model: Arc::new(ModelDescription::of(&checkpoint).expect("its weights were read")),
            weights,
            arena: Arena::new(options.fill),
            kernels: options.kernels,
            set,
            pool,
            placements: PlacementCache::default(),
        })
    }

    /// The model as plans see it.
    pub fn model(&self) -> &Arc<ModelDescription> {
        &self.model
    }
}

impl Device for CpuDevice {
    fn describe(&self) -> DeviceDescription {
        let kernels = match self.kernels {
            Kernels::Native => format!("native, {}", self.set.name()),
            Kernels::Reference => "reference (plain loops)".to_string(),
        };
        DeviceDescription {
            reason: String::new(),
            device: "cpu".into(),
            hardware: processor_name(),
            kernels,
            workers: self.pool.current_num_threads(),
        }
    }

    fn available_memory(&self) -> Option<u64> {
        available_memory()
    }

    fn session_bytes(&self, precision: Precision) -> SessionBytes {
        state::session_bytes(self.weights.config(), precision)
    }

    fn working_bytes(&self, plan: &Plan) -> u64 {
        // The arena, and the logits as they are handed out.
        let logits = plan
            .logits
            .map_or(0, |id| plan.spec(id).elements() * ELEMENT_BYTES);
        (plan.place(|_| ELEMENT_BYTES).arena_bytes + logits) as u64
    }

    fn can_sample(&self) -> bool {
        true
    }

    fn new_session(
        &self,
        precision: Precision,
        capacity: usize,
    ) -> Result<Box<dyn SessionState>, DeviceError> {
        Ok(Box::new(CpuState::new(
            self.weights.config(),
            precision,
            capacity,
        )?))
    }

    fn execute(&mut self, plan: &Arc<Plan>, launch: Launch<'_>) -> Result<Outcome, DeviceError> {
        let kernels = self.kernels;
        self.run(plan, launch, |run, stage| match kernels {
            Kernels::Native => run.native(stage),
            Kernels::Reference => {
                stage
                    .iter()
                    .for_each(|&step| reference::run_step(run.context, step));
            }
        })
    }

    fn run_ahead(&mut self) -> Result<&mut dyn RunAhead, &'static str> {
        Err("the CPU itself computes the steps")
    }
}

/// A run of a plan between two stages.
pub(crate) struct Run<'a> {
    pub context: &'a Context<'a>,
    pool: &'a rayon::ThreadPool,
    set: InstructionSet,
}

impl Run<'_> {
    /// Runs steps that do not depend on one another with the native kernels.
    pub fn native(&self, steps: &[usize]) {
        let native = Native {
            context: self.context,
            set: self.set,
            dequantised: &[],
        };
        let operation = |&step: &usize| &self.context.plan.steps[step].operation;
        let work: Vec<_> = steps
            .iter()
            .map(|step| native.prepare(operation(step)))
            .collect();
        run_work(self.pool, &work);
    }
}

impl CpuDevice {
    /// Sets a launch up, has `run_stage` run each stage, and commits the sessions.
    pub(crate) fn run(
        &mut self,
        plan: &Arc<Plan>,
        mut launch: Launch<'_>,
        mut run_stage: impl FnMut(&Run<'_>, &[usize]),
    ) -> Result<Outcome, DeviceError> {
        let (tokens, preset) = (launch.tokens, launch.preset);
        let (token_limit, sampling) = (launch.token_limit, launch.sampling);
        let mut observer = launch.observer.take();
        let mut states = launch.states::<CpuState>(plan)?;
        let placement = self.placements.get(plan);
        self.arena.reserve(placement.arena_bytes);

        let config = self.weights.config();
        let views: Vec<_> = states.iter_mut().map(|state| state.view(config)).collect();
        let chosen = ChosenTokens::default();
        let context = Context {
            plan,
            config,
            weights: &self.weights,
            tokens,
            token_limit,
            sampling,
            scratch: ScratchView::new(&self.arena, &placement, plan),
            sessions: &views,
            dequantised: &[],
            next_tokens: &chosen,
        };
        for (id, values) in preset {
            context.preset(*id, values);
        }
        let run = Run {
            context: &context,
            pool: &self.pool,
            set: self.set,
        };
        for stage in &plan.stages {
            run_stage(&run, stage);
            if let Some(observer) = &mut observer {
                for &step in stage {
                    observer.after_step(step, &|id| context.observe(id));
                }
            }
        }
        let logits = plan
            .logits
            .map_or(Vec::new(), |id| context.read(id).to_vec());
        let tokens = chosen.take();
        let rows_each = plan.class.rows / states.len();
        states.iter_mut().for_each(|state| state.commit(rows_each));
        Ok(Outcome { logits, tokens })
    }
}

/// Runs the items of a stage's steps on all cores and waits for them.
fn run_work(pool: &rayon::ThreadPool, work: &[Work<'_>]) {
    let items: usize = work.iter().map(|work| work.items).sum();
    let run = |mut item: usize| {
        for work in work {
            if item < work.items {
                return (work.run)(item);
            }
            item -= work.items;
        }
    };
    if items == 1 {
        run(0);
    } else {
        pool.install(|| (0..items).into_par_iter().with_max_len(1).for_each(run));
    }
}

/// The processor's own name for itself, where the system tells.
fn processor_name() -> String {
    std::fs::read_to_string("/proc/cpuinfo")
        .ok()
        .and_then(|text| {
            let line = text.lines().find(|line| line.starts_with("model name"))?;
            Some(line.split_once(':')?.1.trim().to_string())
        })
        .unwrap_or_else(|| std::env::consts::ARCH.to_string())
}

/// What the system says could be taken without swapping.
#[cfg(not(target_os = "macos"))]
fn available_memory() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim()
        .strip_suffix("kB")?
        .trim()
        .parse::<u64>()
        .ok()
        .map(|kibibytes| kibibytes << 10)
}

/// Three quarters of the memory: macOS gives no figure for what could be taken.
#[cfg(target_os = "macos")]
fn available_memory() -> Option<u64> {
    let (mut bytes, mut size) = (0u64, size_of::<u64>());
    // SAFETY: the name is a C string, and `bytes` has the `size` bytes that this value takes.
    let status = unsafe {
        libc::sysctlbyname(
            c"hw.memsize".as_ptr(),
            (&raw mut bytes).cast(),
            &raw mut size,
            std::ptr::null_mut(),
            0,
        )
    };
    (status == 0).then_some(bytes / 4 * 3)
}
