//! Comparing the native kernels with the reference step by step: each step runs in both on the same
//! inputs, so that differences do not add up, and its outputs are held to a bound made from the size of the terms that
//! were added.

mod device;

pub use device::compare_device;

use crate::context::{Context, round_to_bf16};
use crate::device::{CpuDevice, Run};
use crate::reference;
use crate::state::NEXT;
use crate::weights::Weights;
use lily_plan::{
    DeviceError, ElementType, Launch, Operation, Outcome, Plan, Resource, ScratchId, StateSlot,
};
use std::sync::Arc;

/// The largest difference of a step, relative to what it may be: above 1 the kernel is wrong.
#[derive(Clone, Debug, PartialEq)]
pub struct StepDifference {
    /// The step's number in the plan.
    pub step: usize,
    /// Layer and operation.
    pub label: String,
    /// The output with the largest difference.
    pub output: String,
    /// Difference divided by bound.
    pub excess: f64,
    /// What the reference found there.
    pub expected: f32,
    /// What the native kernel found there.
    pub found: f32,
}

/// Rounding errors of a product, in units of f32 epsilon times the sum of |a||b|. A sum of n terms in
/// sixteen lanes errs by at most n/16 + 4 of them, and by far less when errors have either sign.
const PRODUCT_ROUNDINGS: f64 = 16.0;

/// Rounding errors of other operations, in units of f32 epsilon times the largest value of the head or row:
/// a few dozen operations each, the exponentials among them with arguments of up to some tens.
const OTHER_ROUNDINGS: f64 = 64.0;

impl CpuDevice {
    /// Runs `plan` with the native kernels, each step also with the reference on the same inputs, and
    /// tells each step's largest difference. Slow.
    pub fn compare_steps(
        &mut self,
        plan: &Arc<Plan>,
        launch: Launch<'_>,
    ) -> Result<(Outcome, Vec<StepDifference>), DeviceError> {
        self.compare(None, plan, launch)
    }

    /// [`compare_steps`](Self::compare_steps) with the reference on the weights of `right`: so the comparison
    /// itself is tested.
    pub fn compare_steps_with(
        &mut self,
        right: &CpuDevice,
        plan: &Arc<Plan>,
        launch: Launch<'_>,
    ) -> Result<(Outcome, Vec<StepDifference>), DeviceError> {
        self.compare(Some(&right.weights), plan, launch)
    }

    fn compare(
        &mut self,
        right: Option<&Weights>,
        plan: &Arc<Plan>,
        launch: Launch<'_>,
    ) -> Result<(Outcome, Vec<StepDifference>), DeviceError> {
        let mut differences = Vec::new();
        let outcome = self.run(plan, launch, |run, stage| {
            let weights = right.unwrap_or(run.context.weights);
            let reference = Context {
                weights,
                ..*run.context
            };
            differences.extend(stage.iter().map(|&step| compare(run, &reference, step)));
        })?;
        Ok((outcome, differences))
    }

    /// Runs `plan` with the reference and shows each step to `visit`. Slow.
    pub fn reference_steps(
        &mut self,
        plan: &Arc<Plan>,
        launch: Launch<'_>,
        mut visit: impl FnMut(ReferenceStep),
    ) -> Result<Outcome, DeviceError> {
        self.run(plan, launch, |run, stage| {
            for &step in stage {
                visit(reference_step(run.context, step));
            }
        })
    }
}

/// What the reference found in one output of a step, and how far another device may be from it.
#[derive(Clone, Debug)]
pub struct ExpectedOutput {
    /// What was written.
    pub resource: Resource,
    /// Its name, for people.
    pub name: String,
    /// Its element type.
    pub element: ElementType,
    /// The values: of a cache, those of this run's positions, as [row, KV head, D].
    pub values: Vec<f32>,
    /// For each value the largest difference that rounding accounts for.
    pub bounds: Vec<f64>,
}

/// A step as the reference ran it.
#[derive(Clone, Debug)]
pub struct ReferenceStep {
    /// The step's number in the plan.
    pub step: usize,
    /// Layer and operation.
    pub label: String,
    /// Everything it wrote.
    pub outputs: Vec<ExpectedOutput>,
}

impl ReferenceStep {
    /// The largest difference of what another device found, output by output, relative to what it may be. Where the
    /// reference left NaN, nothing was to be written: partial attention leaves blocks behind a row's position alone.
    pub fn difference(&self, found: &[Vec<f32>]) -> StepDifference {
        let mut worst = StepDifference {
            step: self.step,
            label: self.label.clone(),
            output: String::new(),
            excess: 0.0,
            expected: 0.0,
            found: 0.0,
        };
        for (output, found) in self.outputs.iter().zip(found) {
            assert_eq!(
                found.len(),
                output.values.len(),
                "{}: {}",
                self.label,
                output.name
            );
            let values = output.values.iter().zip(&output.bounds).zip(found);
            for ((&expected, &bound), &found) in values {
                let difference = f64::from(found) - f64::from(expected);
                let excess = if expected.is_nan() {
                    0.0
                } else if difference.is_nan() || is_unrounded(output.element, found) {
                    f64::INFINITY
                } else {
                    difference.abs() / bound.max(f64::MIN_POSITIVE)
                };
                if excess > worst.excess {
                    worst = StepDifference {
                        output: output.name.clone(),
                        excess,
                        expected,
                        found,
                        ..worst
                    };
                }
            }
        }
        worst
    }
}

/// Runs a step with the reference.
fn reference_step(right: &Context<'_>, step: usize) -> ReferenceStep {
    let operation = &right.plan.steps[step].operation;
    let writes = operation.access().writes;
    let magnitudes = reference::product_magnitudes(right, operation).unwrap_or_default();
    // It may not live on what anyone before has left.
    poison(right, &writes);
    reference::run_step(right, step);
    let output = |resource: Resource| {
        let values = capture(right, resource);
        let (name, element, width) = describe(right, operation, resource);
        let magnitude = magnitudes
            .iter()
            .find(|(id, _)| resource == Resource::Scratch(*id));
        let mut bounds = Vec::with_capacity(values.len());
        for (head, expected) in values.chunks(width).enumerate() {
            let largest = expected.iter().map(|x| x.abs()).filter(|x| x.is_finite());
            let largest = f64::from(largest.fold(0.0, f32::max));
            bounds.extend(expected.iter().enumerate().map(|(index, expected)| {
                let computed = match magnitude {
                    Some((_, values)) => PRODUCT_ROUNDINGS * values[head * width + index],
                    None => OTHER_ROUNDINGS * largest,
                };
                let stored = match element {
                    // Two values that straddle a tie land one step apart.
                    ElementType::Bf16 => f64::from(expected.abs()) / 128.0,
                    _ => 0.0,
                };
                match element {
                    ElementType::U32 => 0.0,
                    _ => computed * f64::from(f32::EPSILON) + stored + 1e-30,
                }
            }));
        }
        ExpectedOutput {
            resource,
            name,
            element,
            values,
            bounds,
        }
    };
    ReferenceStep {
        step,
        label: right.plan.steps[step].label(),
        outputs: writes.iter().map(|&resource| output(resource)).collect(),
    }
}

fn compare(run: &Run<'_>, right: &Context<'_>, step: usize) -> StepDifference {
    let expected = reference_step(right, step);
    let writes: Vec<Resource> = expected
        .outputs
        .iter()
        .map(|output| output.resource)
        .collect();
    poison(run.context, &writes);
    run.native(&[step]);
    let found: Vec<Vec<f32>> = writes
        .iter()
        .map(|&resource| capture(run.context, resource))
        .collect();
    expected.difference(&found)
}

/// A bfloat16 value that was not rounded: it may lie near the right one, and still is not what is promised.
fn is_unrounded(element: ElementType, found: f32) -> bool {
    element == ElementType::Bf16 && round_to_bf16(found) != found
}

/// Name, element type, and the width within which values are of one size.
fn describe(
    context: &Context<'_>,
    operation: &Operation,
    resource: Resource,
) -> (String, ElementType, usize) {
    let config = context.config;
    match resource {
        Resource::Scratch(id) => {
            let spec = context.plan.spec(id);
            let width = match operation {
                Operation::AttentionPartial { .. } => config.head_dim + 2,
                _ => spec.columns,
            };
            (spec.name.to_string(), spec.element, width)
        }
        Resource::State(slot) => {
            let activation = context.plan.class.precision.activation();
            let (element, width) = match slot {
                StateSlot::Tokens | StateSlot::NextToken => (ElementType::U32, 1),
                StateSlot::KeyCache(_) | StateSlot::ValueCache(_) => (activation, config.head_dim),
                StateSlot::ConvolutionHistory(..) => (activation, config.conv_channels()),
                StateSlot::RecurrentState(..) => (
                    ElementType::F32,
                    config.linear_value_dim * config.linear_key_dim,
                ),
            };
            (format!("{slot:?}"), element, width)
        }
    }
}

/// Everything a step wrote to a resource.
fn capture(context: &Context<'_>, resource: Resource) -> Vec<f32> {
    match resource {
        Resource::Scratch(id) => context.observe(id),
        Resource::State(StateSlot::NextToken) => context
            .next_tokens
            .get()
            .into_iter()
            .map(|token| token as f32)
            .collect(),
        Resource::State(slot) => {
            let mut values = Vec::new();
            visit_state(context, slot, |written| values.extend_from_slice(written));
            values
        }
    }
}

/// Overwrites what a step is about to write with NaN.
fn poison(context: &Context<'_>, writes: &[Resource]) {
    for &resource in writes {
        match resource {
            Resource::Scratch(id) => poison_scratch(context, id),
            Resource::State(slot) => visit_state(context, slot, |written| written.fill(f32::NAN)),
        }
    }
}

fn poison_scratch(context: &Context<'_>, id: ScratchId) {
    match context.element(id) {
        // SAFETY: between steps nothing else reads or writes.
        ElementType::U32 => unsafe { context.output_u32(id).all() }.fill(u32::MAX),
        // SAFETY: as above.
        _ => unsafe { context.output(id).memory.all() }.fill(f32::NAN),
    }
}

/// Shows `visit` the parts of a slot that this run writes; cache rows are written back afterwards.
fn visit_state(context: &Context<'_>, slot: StateSlot, mut visit: impl FnMut(&mut [f32])) {
    let (layer, which) = match slot {
        StateSlot::Tokens | StateSlot::NextToken => return,
        StateSlot::KeyCache(layer) => (layer, 0),
        StateSlot::ValueCache(layer) => (layer, 1),
        StateSlot::ConvolutionHistory(..) | StateSlot::RecurrentState(..) => {
            for session in context.sessions {
                let next = match slot {
                    StateSlot::ConvolutionHistory(layer, _) => session.history(layer)[NEXT],
                    StateSlot::RecurrentState(layer, _) => session.recurrent(layer)[NEXT],
                    _ => unreachable!("the arm names both"),
                };
                // SAFETY: between steps nothing else reads or writes.
                visit(unsafe { next.all() });
            }
            return;
        }
    };
    let mut stored = vec![0.0; context.config.head_dim];
    for row in 0..context.rows() {
        let row = context.row(row);
        let cache = row.session.cache(layer)[which];
        for head in 0..context.config.key_value_heads {
            // SAFETY: between steps nothing else reads or writes.
            unsafe {
                cache.read(head, row.position, &mut stored);
                visit(&mut stored);
                cache.write(head, row.position, &stored);
            }
        }
    }
}
