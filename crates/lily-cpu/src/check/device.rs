//! Comparing any device with the reference, step by step: through the devices' common interface alone, so that
//! the same function proves a GPU wherever there is one.

use super::{ReferenceStep, StepDifference};
use crate::device::CpuDevice;
use lily_checkpoint::LayerKind;
use lily_plan::{
    Device, DeviceError, Launch, Observer, Plan, Resource, ScratchId, SessionState, StateCopy,
    StateSlot,
};
use std::collections::HashMap;
use std::sync::Arc;

/// The sessions of one side.
type Sessions<'a> = &'a mut [Box<dyn SessionState>];

/// Runs `plan` on the reference, then each of its steps on `device` alone, on the reference's inputs and states, and
/// tells each step's largest difference. `what` are the run's tokens and the first id that has none. Both sides' sessions stand at the same positions before, and behind the run
/// afterwards, the device's with the reference's states. Slow.
///
/// # Errors
/// What either device reports.
pub fn compare_device(
    reference: &mut CpuDevice,
    right: Sessions<'_>,
    device: &mut dyn Device,
    sessions: Sessions<'_>,
    plan: &Arc<Plan>,
    what: (&[u32], u32),
) -> Result<Vec<StepDifference>, DeviceError> {
    copy_states(plan, right, sessions, |_| true)?;
    let mut steps: Vec<ReferenceStep> = Vec::new();
    reference.reference_steps(plan, launch(what, &mut borrow(right)), |step| {
        steps.push(step)
    })?;

    // The cache rows of this run are there before any step runs alone: those of the reference.
    device.execute(plan, launch(what, &mut borrow(sessions)))?;
    copy_states(plan, right, sessions, is_cache)?;
    take_back(sessions);

    let mut values: HashMap<ScratchId, Vec<f32>> = HashMap::new();
    let mut differences = Vec::new();
    for expected in &steps {
        let alone = Arc::new(plan.only_step(expected.step));
        let access = plan.steps[expected.step].operation.access();
        let preset: Vec<(ScratchId, Vec<f32>)> = access
            .reads
            .iter()
            .filter_map(|resource| match resource {
                Resource::Scratch(id) => Some((*id, values[id].clone())),
                Resource::State(_) => None,
            })
            .collect();
        let mut keep = Keep {
            wanted: access.writes.clone(),
            values: HashMap::new(),
        };
        let mut borrowed = borrow(sessions);
        let launch = Launch {
            preset: &preset,
            observer: Some(&mut keep),
            ..launch(what, &mut borrowed)
        };
        let outcome = device.execute(&alone, launch)?;
        let found: Vec<Vec<f32>> = expected
            .outputs
            .iter()
            .map(|output| match output.resource {
                Resource::Scratch(id) => keep.values[&id].clone(),
                Resource::State(StateSlot::NextToken) => {
                    outcome.tokens.iter().map(|&token| token as f32).collect()
                }
                Resource::State(slot) => written(plan, sessions, slot),
            })
            .collect();
        differences.push(expected.difference(&found));
        for output in &expected.outputs {
            if let Resource::Scratch(id) = output.resource {
                values.insert(id, output.values.clone());
            }
        }
        copy_states(plan, right, sessions, |slot| {
            is_cache(slot) && access.writes.contains(&Resource::State(slot))
        })?;
        take_back(sessions);
    }

    // Behind the run, in the reference's state.
    device.execute(plan, launch(what, &mut borrow(sessions)))?;
    copy_states(plan, right, sessions, |_| true)?;
    Ok(differences)
}

fn borrow(sessions: Sessions<'_>) -> Vec<&mut dyn SessionState> {
    let mut borrowed: Vec<&mut dyn SessionState> = Vec::with_capacity(sessions.len());
    for session in sessions {
        borrowed.push(session.as_mut());
    }
    borrowed
}

fn launch<'a>(
    (tokens, token_limit): (&'a [u32], u32),
    sessions: &'a mut [&'a mut dyn SessionState],
) -> Launch<'a> {
    Launch {
        tokens,
        sessions,
        preset: &[],
        token_limit,
        sampling: &[],
        observer: None,
    }
}

fn take_back(sessions: Sessions<'_>) {
    for session in sessions.iter_mut() {
        assert!(session.step_back(), "a run can be taken back once");
    }
}

fn is_cache(slot: StateSlot) -> bool {
    matches!(slot, StateSlot::KeyCache(_) | StateSlot::ValueCache(_))
}

/// Everything that a session keeps between runs.
fn slots(plan: &Plan) -> Vec<StateSlot> {
    let config = &plan.model.config;
    (0..config.layers)
        .flat_map(|layer| {
            let number = layer as u16;
            match config.layer_kind(layer) {
                LayerKind::GatedDelta => [
                    StateSlot::ConvolutionHistory(number, StateCopy::Live),
                    StateSlot::RecurrentState(number, StateCopy::Live),
                ],
                LayerKind::Attention => {
                    [StateSlot::KeyCache(number), StateSlot::ValueCache(number)]
                }
            }
        })
        .collect()
}

fn copy_states(
    plan: &Plan,
    from: Sessions<'_>,
    to: Sessions<'_>,
    wanted: impl Fn(StateSlot) -> bool,
) -> Result<(), DeviceError> {
    for slot in slots(plan).into_iter().filter(|slot| wanted(*slot)) {
        for (from, to) in from.iter().zip(to.iter_mut()) {
            to.write(slot, &from.read(slot))?;
        }
    }
    Ok(())
}

/// What a run just committed has written to a slot, in the order of [`ReferenceStep`].
fn written(plan: &Plan, sessions: Sessions<'_>, slot: StateSlot) -> Vec<f32> {
    let config = &plan.model.config;
    let rows_each = plan.class.rows / sessions.len();
    let mut found = Vec::new();
    for session in sessions.iter() {
        // What was written as the next copy is live by now.
        let slot = match slot {
            StateSlot::ConvolutionHistory(layer, _) => {
                StateSlot::ConvolutionHistory(layer, StateCopy::Live)
            }
            StateSlot::RecurrentState(layer, _) => {
                StateSlot::RecurrentState(layer, StateCopy::Live)
            }
            other => other,
        };
        let values = session.read(slot);
        if !is_cache(slot) {
            found.extend(values);
            continue;
        }
        let (width, position) = (config.head_dim, session.position());
        for row in position - rows_each..position {
            for head in 0..config.key_value_heads {
                found.extend_from_slice(&values[(head * position + row) * width..][..width]);
            }
        }
    }
    found
}

/// Keeps a step's outputs.
struct Keep {
    wanted: Vec<Resource>,
    values: HashMap<ScratchId, Vec<f32>>,
}

impl Observer for Keep {
    fn after_step(&mut self, _: usize, read: &dyn Fn(ScratchId) -> Vec<f32>) {
        for resource in &self.wanted {
            if let Resource::Scratch(id) = resource {
                self.values.insert(*id, read(*id));
            }
        }
    }
}
