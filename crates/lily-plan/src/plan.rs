//! Plans: the forward pass as data.

use crate::expand::ScratchTable;
use crate::model::ModelDescription;
use crate::operand::{ElementType, Precision, Resource, ScratchId, ScratchSpec};
use crate::operation::{Operation, WeightArithmetic};
use crate::placement::Placement;
use crate::stages;
use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;

/// The two shapes of work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Phase {
    /// Many rows of one sequence at once, matrix-oriented.
    Prefill,
    /// One row for each of a few sessions, vector-oriented. What a row computes does not depend on the others: on the CPU
    /// it has the bits that it has in a plan of one row. On a GPU its last bits may depend on how many rows there are, where
    /// sums are shared out otherwise (kernels/vector.h), and never on what the others hold.
    Decode,
}

/// What a plan leaves behind for its caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PlanOutput {
    /// Only the session's state (a chunk in the middle of a prompt).
    State,
    /// The logits of the last row (prefill).
    LastLogits,
    /// The logits of every row.
    AllLogits,
    /// The most probable token of each row, chosen on the device; the logits stay there.
    Token,
    /// The token that each row's sampling parameters choose, on the device; the logits stay there.
    Sampled,
}

/// What a plan is recorded for. Plans of one class are replayed; what varies inside a class (tokens,
/// positions, sessions) is bound at launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PlanClass {
    /// Prefill or decode.
    pub phase: Phase,
    /// Arithmetic.
    pub precision: Precision,
    /// Tokens of the chunk, or sessions decoded together.
    pub rows: usize,
    /// Decode: the longest context, in tokens, that the plan serves (a band of
    /// [`route::context_band`](crate::route::context_band)). Prefill: the model's limit.
    pub context: usize,
    /// What is wanted.
    pub output: PlanOutput,
}

impl fmt::Display for PlanClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let phase = match self.phase {
            Phase::Prefill => "prefill",
            Phase::Decode => "decode",
        };
        write!(
            f,
            "{phase}, {}, {} row{}, context up to {}, output {:?}",
            self.precision,
            self.rows,
            if self.rows == 1 { "" } else { "s" },
            self.context,
            self.output
        )
    }
}

/// One step of a plan.
#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    /// What is done.
    pub operation: Operation,
    /// The layer it belongs to.
    pub layer: Option<u16>,
}

impl Step {
    /// Layer and operation, e.g. `layer 3: attention-partial`.
    pub fn label(&self) -> String {
        match self.layer {
            Some(layer) => format!("layer {layer}: {}", self.operation.name()),
            None => self.operation.name().to_string(),
        }
    }
}

/// A recorded forward pass: steps in program order, the stages their hazards allow, and the scratch
/// values they exchange.
#[derive(Clone, Debug)]
pub struct Plan {
    /// What it was recorded for.
    pub class: PlanClass,
    /// The model it was recorded for.
    pub model: Arc<ModelDescription>,
    /// The steps in program order.
    pub steps: Vec<Step>,
    /// Scratch values by [`ScratchId`].
    pub scratch: Vec<ScratchSpec>,
    /// The value that holds the logits, where the class wants them.
    pub logits: Option<ScratchId>,
    /// Further values that the caller reads when the plan has run.
    pub kept: Vec<ScratchId>,
    /// Step numbers by stage: the steps of a stage do not depend on one another, and every step comes
    /// in the earliest stage its hazards allow.
    pub stages: Vec<Vec<usize>>,
}

impl Plan {
    /// Finishes a recording: drops steps nobody needs, computes the stages.
    pub(crate) fn finish(
        class: PlanClass,
        model: Arc<ModelDescription>,
        steps: Vec<Step>,
        scratch: ScratchTable,
        logits: Option<ScratchId>,
        kept: Vec<ScratchId>,
    ) -> Self {
        let scratch = scratch.specs;
        let stages = Vec::new();
        let mut plan = Plan {
            class,
            model,
            steps,
            scratch,
            logits,
            kept,
            stages,
        };
        plan.remove_dead_steps();
        plan.stages = stages::levels(&plan.steps);
        plan
    }

    /// The values that the caller reads when the plan has run.
    pub(crate) fn outputs(&self) -> impl Iterator<Item = ScratchId> + '_ {
        self.logits.into_iter().chain(self.kept.iter().copied())
    }

    /// The same plan with every fused operation replaced by the sequence it stands for.
    pub fn expanded(&self) -> Plan {
        self.expanded_where(|_| true)
    }

    /// The same plan with those fused operations expanded that `choose` names: one switch a chain.
    pub fn expanded_where(&self, choose: impl Fn(&Operation) -> bool) -> Plan {
        let mut table = ScratchTable {
            specs: self.scratch.clone(),
            layer: None,
        };
        let mut steps = Vec::new();
        for step in &self.steps {
            if choose(&step.operation) {
                table.layer = step.layer;
                let operations = step.operation.expand(&self.model, &mut table);
                steps.extend(operations.into_iter().map(|operation| Step {
                    operation,
                    layer: step.layer,
                }));
            } else {
                steps.push(step.clone());
            }
        }
        let (logits, kept) = (self.logits, self.kept.clone());
        Plan::finish(self.class, self.model.clone(), steps, table, logits, kept)
    }

    /// The same plan with no weight rounded to bfloat16: for devices whose products of many rows apply scale and bias to
    /// sums of a group. A prompt then has the arithmetic of decode. Weights that a step of their own has dequantised stay
    /// rounded.
    pub fn with_exact_weights(&self) -> Plan {
        let mut plan = self.clone();
        for step in &mut plan.steps {
            match &mut step.operation {
                Operation::Project { arithmetic, .. }
                | Operation::ProjectAdd { arithmetic, .. }
                | Operation::Projections { arithmetic, .. }
                | Operation::ExpertProject { arithmetic, .. }
                | Operation::ExpertInput { arithmetic, .. } => {
                    *arithmetic = WeightArithmetic::Exact;
                }
                _ => {}
            }
        }
        plan
    }

    /// One step's own small plan, unfused: the reference of a fused operation. Its scratch values keep
    /// their ids; intermediates are added behind them.
    pub fn expanded_step(&self, step: usize) -> Plan {
        let mut table = ScratchTable {
            specs: self.scratch.clone(),
            layer: self.steps[step].layer,
        };
        let layer = self.steps[step].layer;
        let steps: Vec<Step> = self.steps[step]
            .operation
            .expand(&self.model, &mut table)
            .into_iter()
            .map(|operation| Step { operation, layer })
            .collect();
        let stages = stages::levels(&steps);
        Plan {
            class: self.class,
            model: self.model.clone(),
            steps,
            scratch: table.specs,
            logits: self.logits,
            kept: self.kept.clone(),
            stages,
        }
    }

    /// The plan without step `index`: what a test executes to see that the step matters.
    pub fn without_step(&self, index: usize) -> Plan {
        let mut plan = self.clone();
        plan.steps.remove(index);
        plan.stages = stages::levels(&plan.steps);
        plan
    }

    /// Step `index` alone, its outputs kept: what a test executes to compare one step. What it reads is preset.
    pub fn only_step(&self, index: usize) -> Plan {
        let mut plan = self.clone();
        plan.steps = vec![self.steps[index].clone()];
        plan.stages = vec![vec![0]];
        plan.logits = None;
        let writes = plan.steps[0].operation.access().writes;
        let scratch = |resource: &Resource| match resource {
            Resource::Scratch(id) => Some(*id),
            Resource::State(_) => None,
        };
        plan.kept = writes.iter().filter_map(scratch).collect();
        plan
    }

    /// Shape and type of a scratch value.
    pub fn spec(&self, id: ScratchId) -> &ScratchSpec {
        &self.scratch[id.index()]
    }

    /// The largest context, in blocks, of a step's partial attention.
    pub fn attention_blocks(&self, block_length: usize) -> usize {
        self.class.context.div_ceil(block_length)
    }

    /// Where each scratch value lies in one arena, for a device that stores elements in
    /// `element_bytes` bytes.
    pub fn place(&self, element_bytes: impl Fn(ElementType) -> usize) -> Placement {
        Placement::compute(self, element_bytes)
    }

    /// Removes steps that write neither state nor anything a later step or the caller reads (the rest
    /// of the last layer where only the state is wanted).
    fn remove_dead_steps(&mut self) {
        let mut wanted: HashSet<ScratchId> = self.outputs().collect();
        let mut kept = Vec::with_capacity(self.steps.len());
        for step in std::mem::take(&mut self.steps).into_iter().rev() {
            let access = step.operation.access();
            let alive = access.writes.iter().any(|resource| match resource {
                Resource::Scratch(id) => wanted.contains(id),
                Resource::State(_) => true,
            });
            if alive {
                wanted.extend(access.reads.iter().filter_map(|resource| match resource {
                    Resource::Scratch(id) => Some(*id),
                    Resource::State(_) => None,
                }));
                kept.push(step);
            }
        }
        kept.reverse();
        self.steps = kept;
    }

    /// Whether the plan chooses by the launch's sampling parameters.
    pub fn samples(&self) -> bool {
        let samples = |step: &Step| matches!(step.operation, Operation::Sample { .. });
        self.steps.iter().any(samples)
    }

    /// Whether the plan chooses the next token itself.
    pub fn chooses_token(&self) -> bool {
        self.chosen_rows() > 0
    }

    /// For how many rows it does.
    pub fn chosen_rows(&self) -> usize {
        let mut steps = self.steps.iter();
        let logits = steps.find_map(|step| match step.operation {
            Operation::ArgMax { logits } | Operation::Sample { logits, .. } => Some(logits),
            _ => None,
        });
        logits.map_or(0, |logits| self.spec(logits).rows)
    }
}
