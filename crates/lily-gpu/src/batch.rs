//! How much work goes into a command buffer.
//!
//! A display shares the GPU of a Mac, and macOS ends a command buffer that keeps the display waiting ("Impacting
//! Interactivity", "Caused GPU Timeout Error"): users of other engines report it from about half a second on
//! (ml-explore/mlx#3267). So a run is cut into command buffers that are sent off one behind the other without waiting:
//! between stages, and where one dispatch alone is too long, within it. How long a dispatch takes is estimated from
//! what it computes and moves.

use crate::gpu::{Argument, Cost, Dispatch, Gpu, Stage};
use std::ops::Range;

/// What a command buffer may hold.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limits {
    /// Dispatches.
    pub dispatches: usize,
    /// Seconds, by the two rates.
    pub seconds: f64,
    /// Floating-point operations that the machine is sure to do in a second.
    pub operations_a_second: f64,
    /// Bytes that it is sure to move in a second.
    pub bytes_a_second: f64,
}

impl Limits {
    /// Seconds that a dispatch takes, if computing and moving do not overlap.
    pub fn seconds(&self, cost: Cost) -> f64 {
        cost.operations / self.operations_a_second + cost.bytes / self.bytes_a_second
    }

    /// How many parts a dispatch is cut into.
    fn parts<G: Gpu>(&self, dispatch: &Dispatch<'_, G>) -> u32 {
        let wanted = (self.seconds(dispatch.cost) / self.seconds).ceil() as u32;
        let most = dispatch.divisible.map_or(1, |cut| dispatch.grid[cut.axis]);
        wanted.clamp(1, most.max(1))
    }
}

/// What goes into one command buffer.
pub enum Batch<'a, G: Gpu> {
    /// Whole stages.
    Stages(Range<usize>),
    /// Some dispatches of a stage, or a part of one.
    Part(Stage<'a, G>),
}

impl<'a, G: Gpu> Batch<'a, G> {
    /// The dispatches, of `all` stages that were cut.
    pub fn stages<'b>(&'b self, all: &'b [Stage<'a, G>]) -> &'b [Stage<'a, G>] {
        match self {
            Batch::Stages(range) => &all[range.clone()],
            Batch::Part(stage) => std::slice::from_ref(stage),
        }
    }
}

/// Which dispatches go into which command buffer: as many stages as fit, at least one.
pub fn batches<'a, G: Gpu>(stages: &[Stage<'a, G>], limits: &Limits) -> Vec<Batch<'a, G>> {
    let mut all = Vec::new();
    let mut begin = 0;
    let (mut dispatches, mut seconds) = (0, 0.0);
    for (index, stage) in stages.iter().enumerate() {
        let longer: f64 = stage
            .iter()
            .map(|dispatch| limits.seconds(dispatch.cost))
            .sum();
        let is_cut = stage.iter().any(|dispatch| limits.parts(dispatch) > 1);
        let fits =
            dispatches + stage.len() <= limits.dispatches && seconds + longer <= limits.seconds;
        if index > begin && (is_cut || !fits) {
            all.push(Batch::Stages(begin..index));
            begin = index;
            (dispatches, seconds) = (0, 0.0);
        }
        if is_cut {
            all.extend(cut(stage, limits).into_iter().map(Batch::Part));
            begin = index + 1;
        } else {
            dispatches += stage.len();
            seconds += longer;
        }
    }
    if begin < stages.len() {
        all.push(Batch::Stages(begin..stages.len()));
    }
    all
}

/// A stage whose long dispatches are cut, each part for itself.
fn cut<'a, G: Gpu>(stage: &Stage<'a, G>, limits: &Limits) -> Vec<Stage<'a, G>> {
    let (long, short): (Vec<_>, Vec<_>) = stage
        .iter()
        .partition(|dispatch| limits.parts(dispatch) > 1);
    let mut all: Vec<Stage<'a, G>> = Vec::new();
    if !short.is_empty() {
        all.push(short.into_iter().cloned().collect());
    }
    for dispatch in long {
        let divisible = dispatch.divisible.expect("it has parts");
        let length = dispatch.grid[divisible.axis];
        let each = length.div_ceil(limits.parts(dispatch));
        for first in (0..length).step_by(each as usize) {
            let mut part = dispatch.clone();
            part.grid[divisible.axis] = each.min(length - first);
            part.arguments[divisible.first] = Argument::Word(first);
            all.push(vec![part]);
        }
    }
    all
}
