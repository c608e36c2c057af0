//! What the kernels of one run see: the plan's scratch values, weights, session states, rows.

use crate::arena::{Output, ScratchView};
use crate::state::StateView;
use crate::weights::Weights;
use lily_checkpoint::{ModelConfig, WeightId, bf16_to_f32, f32_to_bf16};
use lily_plan::{ElementType, Phase, Plan, SamplingRow, ScratchId};
use std::cell::UnsafeCell;

/// One run of a plan.
#[derive(Clone, Copy)]
pub(crate) struct Context<'a> {
    pub plan: &'a Plan,
    pub config: &'a ModelConfig,
    pub weights: &'a Weights,
    pub tokens: &'a [u32],
    pub token_limit: u32,
    pub sampling: &'a [SamplingRow<'a>],
    pub scratch: ScratchView<'a>,
    pub sessions: &'a [StateView<'a>],
    /// Weights that the running step finds dequantised in scratch; native kernels have a list of their own.
    pub dequantised: &'a [(WeightId, ScratchId)],
    /// The tokens chosen by the plan.
    pub next_tokens: &'a ChosenTokens,
}

/// Tokens written by the plan's last step.
#[derive(Default)]
pub(crate) struct ChosenTokens(UnsafeCell<Vec<u32>>);

// SAFETY: one step, run by one work item, writes; the caller reads after the run.
unsafe impl Sync for ChosenTokens {}

impl ChosenTokens {
    /// Replaces the tokens.
    ///
    /// # Safety
    /// Only from the one work item of the step that declares writing the token slot.
    pub unsafe fn set(&self, tokens: Vec<u32>) {
        // SAFETY: exclusive by this function's contract.
        unsafe { *self.0.get() = tokens };
    }

    /// The tokens so far.
    pub fn get(&self) -> Vec<u32> {
        // SAFETY: called between steps, when nobody writes.
        unsafe { (*self.0.get()).clone() }
    }

    pub fn take(self) -> Vec<u32> {
        self.0.into_inner()
    }
}

/// The session and position of a row.
#[derive(Clone, Copy)]
pub(crate) struct Row<'a> {
    pub session: &'a StateView<'a>,
    pub position: usize,
}

impl<'a> Context<'a> {
    /// Rows of the run.
    pub fn rows(&self) -> usize {
        self.plan.class.rows
    }

    /// Whether the rows are consecutive tokens of one sequence.
    fn is_sequence(&self) -> bool {
        self.plan.class.phase == Phase::Prefill
    }

    /// Where row `row` belongs.
    pub fn row(&self, row: usize) -> Row<'a> {
        if self.is_sequence() {
            let session = &self.sessions[0];
            Row {
                session,
                position: session.position + row,
            }
        } else {
            let session = &self.sessions[row];
            Row {
                session,
                position: session.position,
            }
        }
    }

    /// The rows of each session: all of one, or one of each.
    pub fn sequences(
        &self,
    ) -> impl Iterator<Item = (&'a StateView<'a>, std::ops::Range<usize>)> + use<'a> {
        let each = if self.is_sequence() { self.rows() } else { 1 };
        self.sessions
            .iter()
            .enumerate()
            .map(move |(index, session)| (session, index * each..(index + 1) * each))
    }

    pub fn columns(&self, id: ScratchId) -> usize {
        self.plan.spec(id).columns
    }

    pub fn element(&self, id: ScratchId) -> ElementType {
        self.plan.spec(id).element
    }

    /// A value that the running step declares reading.
    pub fn read(&self, id: ScratchId) -> &'a [f32] {
        // SAFETY: kernels call this only for operands that their step reads; the executor runs a stage's
        // steps only after all earlier stages, and the plan's hazards keep writers out of this stage.
        unsafe { self.scratch.read(id) }
    }

    /// The rows of a weight, if it is among `dequantised`, which the running step declares reading.
    pub fn rows_of_weight(
        &self,
        dequantised: &[(WeightId, ScratchId)],
        weight: WeightId,
    ) -> Option<&'a [f32]> {
        let (_, value) = dequantised.iter().find(|(id, _)| *id == weight)?;
        Some(self.read(*value))
    }

    /// A value of integers that the running step declares reading.
    pub fn read_u32(&self, id: ScratchId) -> &'a [u32] {
        // SAFETY: as in `read`.
        unsafe { self.scratch.read_u32(id) }
    }

    /// Where the running step writes.
    pub fn output(&self, id: ScratchId) -> Rounded<'a> {
        Rounded {
            memory: self.scratch.output(id),
            element: self.element(id),
        }
    }

    /// Where the running step writes integers.
    pub fn output_u32(&self, id: ScratchId) -> Output<'a, u32> {
        self.scratch.output_u32(id)
    }

    /// Sets a value before anything runs.
    pub fn preset(&self, id: ScratchId, values: &[f32]) {
        match self.element(id) {
            // SAFETY: no step runs yet, so nothing else reads or writes.
            ElementType::U32 => unsafe { self.output_u32(id).all() }
                .iter_mut()
                .zip(values)
                .for_each(|(out, &value)| *out = value as u32),
            // SAFETY: as above.
            _ => unsafe { self.output(id).write(0, values) },
        }
    }

    /// A scratch value for an observer, integers converted.
    pub fn observe(&self, id: ScratchId) -> Vec<f32> {
        match self.element(id) {
            ElementType::U32 => self
                .read_u32(id)
                .iter()
                .map(|&value| value as f32)
                .collect(),
            _ => self.read(id).to_vec(),
        }
    }
}

/// An output that rounds to its element type.
#[derive(Clone, Copy)]
pub(crate) struct Rounded<'a> {
    pub memory: Output<'a, f32>,
    pub element: ElementType,
}

impl Rounded<'_> {
    /// Writes `values` from element `start` on.
    ///
    /// # Safety
    /// The calling work item owns the range; see [`Output::slice`].
    pub unsafe fn write(&self, start: usize, values: &[f32]) {
        // SAFETY: forwarded.
        let out = unsafe { self.memory.slice(start, values.len()) };
        match self.element {
            ElementType::Bf16 => {
                for (out, &value) in out.iter_mut().zip(values) {
                    *out = round_to_bf16(value);
                }
            }
            _ => out.copy_from_slice(values),
        }
    }
}

/// The nearest bfloat16, ties to even.
#[inline(always)]
pub(crate) fn round_to_bf16(value: f32) -> f32 {
    bf16_to_f32(f32_to_bf16(value))
}

/// `value` rounded to `element`.
#[inline(always)]
pub(crate) fn round_to(element: ElementType, value: f32) -> f32 {
    match element {
        ElementType::Bf16 => round_to_bf16(value),
        _ => value,
    }
}
