//! Plans bound to memory and sessions, and run.

use crate::cache::Kept;
use crate::device::GpuDevice;
use crate::gpu::{Argument, Cost, Dispatch, Gpu, Stage};
use crate::kernels::{Memory, Operand, Region};
use crate::record::{Recorded, launch};
use crate::sampling;
use crate::state::{GpuState, decode, encode, lock};
use lily_plan::{DeviceError, Launch, Observer, Operation, Outcome, Plan, ScratchId, SessionState};
use std::sync::Arc;

/// What [`GpuDevice::bind`] has bound: the plan as it is kept, and the sessions.
pub(crate) type BoundPlan<'a, G> = (Kept, Vec<&'a mut GpuState<G>>);

impl<G: Gpu + 'static> GpuDevice<G> {
    /// Runs a plan to its end.
    pub(crate) fn run(
        &mut self,
        plan: &Arc<Plan>,
        mut launch: Launch<'_>,
    ) -> Result<Outcome, DeviceError> {
        let observer = launch.observer.take();
        let (kept, mut states) = self.bind(plan, &mut launch, Some(&[]))?;
        let outcome = {
            let ready = self.ready(plan, kept, &states);
            let mut gpu = lock(&self.gpu);
            ready.run(&mut gpu, observer)?;
            let outcome = ready.outcome(&gpu);
            gpu.wait()?;
            outcome
        };
        let rows_each = plan.class.rows / states.len();
        states.iter_mut().for_each(|state| state.commit(rows_each));
        Ok(outcome)
    }

    /// Shows the stages that running `plan` would submit, bound and ready, to `look`, which may run them as often as it
    /// likes; no session moves on. For measuring.
    pub fn with_stages<T>(
        &mut self,
        plan: &Arc<Plan>,
        mut launch: Launch<'_>,
        look: impl FnOnce(&mut G, &[Stage<'_, G>]) -> Result<T, DeviceError>,
    ) -> Result<T, DeviceError> {
        let (kept, states) = self.bind(plan, &mut launch, None)?;
        let ready = self.ready(plan, kept, &states);
        look(&mut lock(&self.gpu), &ready.stages())
    }

    /// Checks a launch and writes down what it binds `plan` to. Behind which tokens a row's session stays where it is,
    /// `stops` says; without it, sessions stay in any case.
    pub(crate) fn bind<'a>(
        &mut self,
        plan: &Arc<Plan>,
        launch: &'a mut Launch<'_>,
        stops: Option<&[&[u32]]>,
    ) -> Result<BoundPlan<'a, G>, DeviceError> {
        let Launch {
            tokens,
            preset,
            token_limit,
            sampling,
            ..
        } = *launch;
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
        let gpu = lock(&self.gpu);
        let sessions = states.iter().enumerate().map(|(index, state)| {
            let session = state.describe(&gpu, stops.is_none());
            let stops = stops.and_then(|stops| stops.get(index)).copied();
            (session, launch::turn(stops.unwrap_or(&[])))
        });
        gpu.write(
            self.table(),
            0,
            &launch::encode(sessions, token_limit, tokens),
        );
        if !parameters.is_empty() {
            gpu.write(self.sampling(), 0, &parameters);
        }
        for (id, values) in preset {
            let spec = plan.spec(*id);
            let at = kept.recording.placement.range(*id).start;
            gpu.write(self.arena(), at, &encode(values, spec.element));
        }
        Ok((kept, states))
    }

    /// The plan as it can be sent off for these sessions.
    pub(crate) fn ready<'a>(
        &'a self,
        plan: &'a Plan,
        kept: Kept,
        states: &'a [&mut GpuState<G>],
    ) -> Ready<'a, G> {
        Ready {
            device: self,
            plan,
            kept,
            reached: states.iter().flat_map(|state| state.buffers()).collect(),
            context: states
                .iter()
                .map(|state| state.position())
                .max()
                .unwrap_or(0),
        }
    }

    /// The tokens that run `index` of a chain has chosen.
    pub(crate) fn chosen(&self, gpu: &G, plan: &Plan, index: usize) -> Vec<u32> {
        let mut bytes = vec![0; plan.chosen_rows() * 4];
        if !bytes.is_empty() {
            gpu.read(
                self.table(),
                launch::chosen(plan.class.rows, index),
                &mut bytes,
            );
        }
        let words = bytes.chunks_exact(4);
        words
            .map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]))
            .collect()
    }

    /// A dispatch with its pipeline and its memory.
    fn resolve<'a>(
        &'a self,
        recorded: &Recorded,
        pipeline: usize,
        reached: &'a [&'a G::Buffer],
        context: usize,
    ) -> Dispatch<'a, G> {
        let [near, each] = recorded.cost;
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
            cost: Cost {
                operations: near.operations + context as f64 * each.operations,
                bytes: near.bytes + context as f64 * each.bytes,
            },
            divisible: recorded.divisible,
        }
    }
}

/// A plan bound to memory and sessions, ready to be sent off.
pub(crate) struct Ready<'a, G: Gpu> {
    device: &'a GpuDevice<G>,
    plan: &'a Plan,
    kept: Kept,
    reached: Vec<&'a G::Buffer>,
    /// Positions before the run.
    context: usize,
}

impl<G: Gpu + 'static> Ready<'_, G> {
    /// Sends the plan off, as it was sent before if that can be.
    pub fn send(&self, gpu: &mut G) -> Result<(), DeviceError> {
        if gpu.replay(self.kept.key)? {
            return Ok(());
        }
        gpu.submit(Some(self.kept.key), &self.stages())
    }

    /// Runs the plan to its end.
    fn run(&self, gpu: &mut G, observer: Option<&mut dyn Observer>) -> Result<(), DeviceError> {
        if let Some(observer) = observer {
            for (stage, steps) in self.plan.stages.iter().enumerate() {
                gpu.submit(None, &[self.stage(stage)])?;
                gpu.wait()?;
                for &step in steps {
                    observer.after_step(step, &|id| self.read(gpu, id));
                }
            }
            return Ok(());
        }
        if self.device.options.switches.routing_through_cpu {
            return self.run_with_routing_through_cpu(gpu);
        }
        self.send(gpu)?;
        gpu.wait()
    }

    fn stage(&self, stage: usize) -> Stage<'_, G> {
        let dispatches = self.kept.recording.stages[stage].iter();
        dispatches
            .zip(&self.kept.pipelines[stage])
            .map(|(recorded, &pipeline)| {
                self.device
                    .resolve(recorded, pipeline, &self.reached, self.context)
            })
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

    fn outcome(&self, gpu: &G) -> Outcome {
        Outcome {
            logits: self.plan.logits.map_or(Vec::new(), |id| self.read(gpu, id)),
            tokens: self.device.chosen(gpu, self.plan, 0),
        }
    }
}
