//! Counting: what each step of a plan moves and computes, from shapes and formats alone.
//!
//! Every byte that a step touches is counted once, however many work items touch it: this is what has to
//! move between memory and processor at least, and what a kernel's own counters are held against. Sizes
//! are those of a GPU's memory ([`ElementType::bytes`](crate::ElementType::bytes), stored weights).

use crate::model::ModelDescription;
use crate::operand::{ElementType, Resource, ScratchId, StateSlot};
use crate::operation::Operation;
use crate::plan::{Phase, Plan};
use lily_checkpoint::{WeightId, WeightShape};
use serde::Serialize;
use std::iter::Sum;
use std::ops::AddAssign;

/// What one step, or several together, move and compute.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Work {
    /// Bytes of weights read, in their stored formats.
    pub weight_bytes: u64,
    /// Bytes of session state read.
    pub state_read: u64,
    /// Bytes of session state written.
    pub state_written: u64,
    /// Bytes of scratch values read.
    pub scratch_read: u64,
    /// Bytes of scratch values written.
    pub scratch_written: u64,
    /// Floating-point operations of products, convolutions, the delta rule and attention, a
    /// multiply-add being two (docs/model.md, section 9). Element-wise work (norms, activations,
    /// rotations, softmax, sums of a few values) is left out: it is below 0.2 % of a token's.
    pub flops: u64,
    /// Results that could be computed independently before any sum is split: output elements of a
    /// product, heads of a recurrence, rows of a norm. A hint for choosing a grid.
    pub work_items_hint: u64,
}

impl Work {
    /// Bytes of session state, read and written.
    pub fn state_bytes(&self) -> u64 {
        self.state_read + self.state_written
    }

    /// Bytes of scratch, read and written.
    pub fn scratch_bytes(&self) -> u64 {
        self.scratch_read + self.scratch_written
    }

    /// All bytes moved.
    pub fn bytes(&self) -> u64 {
        self.weight_bytes + self.state_bytes() + self.scratch_bytes()
    }
}

impl AddAssign for Work {
    fn add_assign(&mut self, other: Self) {
        self.weight_bytes += other.weight_bytes;
        self.state_read += other.state_read;
        self.state_written += other.state_written;
        self.scratch_read += other.scratch_read;
        self.scratch_written += other.scratch_written;
        self.flops += other.flops;
        self.work_items_hint += other.work_items_hint;
    }
}

impl Sum for Work {
    fn sum<I: Iterator<Item = Self>>(works: I) -> Self {
        works.fold(Work::default(), |mut sum, work| {
            sum += work;
            sum
        })
    }
}

/// How many distinct experts the rows of a step are taken to need.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Routing {
    /// Each row's k experts are drawn evenly and independently of the other rows': E·(1 − (1 − k/E)^rows)
    /// distinct ones are expected.
    Uniform,
}

impl Routing {
    /// Expected number of distinct experts among the choices of `rows` rows.
    pub fn distinct_experts(self, experts: usize, chosen: usize, rows: usize) -> f64 {
        match self {
            Routing::Uniform => {
                let missed = 1.0 - chosen as f64 / experts as f64;
                experts as f64 * (1.0 - missed.powf(rows as f64))
            }
        }
    }
}

/// What a count depends on beside the plan.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Assumptions {
    /// Positions already in the cache when the plan runs: of each session in decode, before the chunk
    /// in prefill.
    pub context: usize,
    /// Which experts the rows choose.
    pub routing: Routing,
}

impl Assumptions {
    /// `context` positions in the cache, uniform routing.
    pub fn at_context(context: usize) -> Self {
        Assumptions {
            context,
            routing: Routing::Uniform,
        }
    }
}

/// A plan's count.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Totals {
    /// Steps: each is one dispatch.
    pub dispatches: usize,
    /// Stages: a barrier stands between each and the next.
    pub stages: usize,
    /// All steps together.
    pub work: Work,
}

impl Plan {
    /// What step `step` moves and computes.
    pub fn work(&self, step: usize, assumptions: &Assumptions) -> Work {
        let count = Count {
            plan: self,
            model: &self.model,
            assumptions,
        };
        count.step(&self.steps[step].operation)
    }

    /// What the whole plan moves and computes.
    pub fn totals(&self, assumptions: &Assumptions) -> Totals {
        Totals {
            dispatches: self.steps.len(),
            stages: self.stages.len(),
            work: (0..self.steps.len())
                .map(|step| self.work(step, assumptions))
                .sum(),
        }
    }
}

struct Count<'a> {
    plan: &'a Plan,
    model: &'a ModelDescription,
    assumptions: &'a Assumptions,
}

impl Count<'_> {
    fn step(&self, operation: &Operation) -> Work {
        let access = operation.access();
        let scratch = |resources: &[Resource], bytes: &dyn Fn(ScratchId) -> u64| -> u64 {
            resources
                .iter()
                .filter_map(|resource| match resource {
                    Resource::Scratch(id) => Some(bytes(*id)),
                    Resource::State(_) => None,
                })
                .sum()
        };
        let state = |resources: &[Resource], written: bool| -> u64 {
            resources
                .iter()
                .filter_map(|resource| match resource {
                    Resource::Scratch(_) => None,
                    Resource::State(slot) => Some(self.state(*slot, written)),
                })
                .sum()
        };
        Work {
            weight_bytes: access
                .weights
                .iter()
                .map(|&weight| self.weight(operation, weight))
                .sum(),
            state_read: state(&access.reads, false),
            state_written: state(&access.writes, true),
            scratch_read: scratch(&access.reads, &|id| self.read(operation, id)),
            scratch_written: scratch(&access.writes, &|id| self.written(operation, id)),
            flops: self.flops(operation),
            work_items_hint: self.work_items(operation),
        }
    }

    fn bytes(&self, id: ScratchId) -> u64 {
        self.plan.spec(id).bytes() as u64
    }

    fn elements(&self, id: ScratchId) -> u64 {
        self.plan.spec(id).elements() as u64
    }

    /// Bytes of `columns` columns of each row of a scratch value.
    fn columns(&self, id: ScratchId, columns: usize) -> u64 {
        let spec = self.plan.spec(id);
        (spec.rows * columns * spec.element.bytes()) as u64
    }

    fn rows(&self, id: ScratchId) -> u64 {
        self.plan.spec(id).rows as u64
    }

    /// Bytes of a scratch value that an operation reads: all of it, or what its contract names.
    fn read(&self, operation: &Operation, id: ScratchId) -> u64 {
        let config = &self.model.config;
        match *operation {
            Operation::DeltaPrepare { convolved, .. } if id == convolved => {
                self.columns(id, 2 * config.linear_key_heads * config.linear_key_dim)
            }
            Operation::DeltaScan { convolved, .. } if id == convolved => {
                self.columns(id, config.linear_value_width())
            }
            // The queries of an interleaved row, not its gates.
            Operation::HeadNorm { output, .. } => self.columns(id, self.plan.spec(output).columns),
            // Half of each head's 2D: the queries, or the gates.
            Operation::QueryKeyPrepare { query_gate, .. }
            | Operation::OutputGate { query_gate, .. }
            | Operation::AttentionMergeGate { query_gate, .. }
                if id == query_gate =>
            {
                self.columns(id, config.attention_width())
            }
            Operation::AttentionMerge { block_length, .. }
            | Operation::AttentionMergeGate { block_length, .. } => self.partials(id, block_length),
            Operation::SelectLastRow { .. } => self.bytes(id) / self.rows(id),
            // For the order alone.
            Operation::Dequantise { .. } => 0,
            Operation::WithDequantised {
                ref product,
                ref matrices,
            } => match matrices.iter().find(|(_, value)| *value == id) {
                Some((weight, _)) => (self.share(*weight) * self.bytes(id) as f64).round() as u64,
                None => self.read(product, id),
            },
            _ => self.bytes(id),
        }
    }

    /// The share of a weight that a product reads: that of the experts which some row has chosen.
    fn share(&self, weight: WeightId) -> f64 {
        let WeightShape::Experts { experts, .. } = self.model.shape(weight) else {
            return 1.0;
        };
        let (chosen, rows) = (self.model.config.experts_per_token, self.plan.class.rows);
        let routing = self.assumptions.routing;
        routing.distinct_experts(experts, chosen, rows) / experts as f64
    }

    /// Bytes of a scratch value that an operation writes.
    fn written(&self, operation: &Operation, id: ScratchId) -> u64 {
        match *operation {
            Operation::AttentionPartial { block_length, .. } => self.partials(id, block_length),
            // Touched only where bias, penalties or a mask act.
            Operation::Sample { .. } => 0,
            _ => self.bytes(id),
        }
    }

    /// Bytes of those partial results whose blocks hold positions.
    fn partials(&self, id: ScratchId, block_length: usize) -> u64 {
        let config = &self.model.config;
        let columns =
            config.attention_heads * self.used_blocks(block_length) * (config.head_dim + 2);
        self.columns(id, columns)
    }

    fn used_blocks(&self, block_length: usize) -> usize {
        (self.assumptions.context + 1)
            .div_ceil(block_length)
            .min(self.plan.attention_blocks(block_length))
    }

    /// Sequences that the plan's rows belong to, each with its own state.
    fn sequences(&self) -> u64 {
        match self.plan.class.phase {
            Phase::Prefill => 1,
            Phase::Decode => self.plan.class.rows as u64,
        }
    }

    /// Bytes of a state slot that a step reads or writes, over all sessions of the plan.
    fn state(&self, slot: StateSlot, written: bool) -> u64 {
        let config = &self.model.config;
        let rows = self.plan.class.rows as u64;
        let activation = self.plan.class.precision.activation().bytes() as u64;
        match slot {
            StateSlot::Tokens | StateSlot::NextToken => rows * ElementType::U32.bytes() as u64,
            StateSlot::KeyCache(_) | StateSlot::ValueCache(_) => {
                let position = config.key_value_width() as u64 * activation;
                if written {
                    rows * position
                } else {
                    // Once for each KV head, whatever the query heads and rows that share it.
                    self.positions_cached() * position
                }
            }
            StateSlot::ConvolutionHistory(..) => {
                let history = (config.conv_kernel - 1) * config.conv_channels();
                self.sequences() * history as u64 * activation
            }
            StateSlot::RecurrentState(..) => {
                let state = config.linear_value_width() * config.linear_key_dim;
                self.sequences() * (state * ElementType::F32.bytes()) as u64
            }
        }
    }

    /// Positions in the caches of all sessions once this run's own are written.
    fn positions_cached(&self) -> u64 {
        let (context, rows) = (self.assumptions.context as u64, self.plan.class.rows as u64);
        match self.plan.class.phase {
            Phase::Prefill => context + rows,
            Phase::Decode => rows * (context + 1),
        }
    }

    /// Positions that the rows attend to, summed over the rows: causal, so half of the chunk on average.
    fn positions_attended(&self) -> u64 {
        let (context, rows) = (self.assumptions.context as u64, self.plan.class.rows as u64);
        match self.plan.class.phase {
            Phase::Prefill => rows * context + rows * (rows + 1) / 2,
            Phase::Decode => rows * (context + 1),
        }
    }

    /// Stored bytes of a weight that an operation reads.
    fn weight(&self, operation: &Operation, weight: WeightId) -> u64 {
        let config = &self.model.config;
        match (operation, self.model.shape(weight)) {
            // A row for each token; as a tied head the same weight is read in full.
            (Operation::Embed { output, .. }, WeightShape::Matrix { inputs, .. }) => {
                self.rows(*output) * self.model.format(weight).row_bytes(inputs) as u64
            }
            (Operation::Dequantise { .. }, shape) => {
                let (rows, columns) = shape.rows_and_columns();
                rows as u64 * self.model.format(weight).row_bytes(columns) as u64
            }
            (_, WeightShape::Experts { experts, .. }) => {
                let distinct = self.assumptions.routing.distinct_experts(
                    experts,
                    config.experts_per_token,
                    self.plan.class.rows,
                );
                (distinct * self.model.bytes(weight) as f64).round() as u64
            }
            _ => self.model.bytes(weight),
        }
    }

    /// Operations of the product of `rows` rows with a weight (with one expert's matrix each).
    fn product(&self, rows: u64, weight: WeightId) -> u64 {
        let (outputs, inputs) = self.model.dimensions(weight);
        2 * rows * outputs as u64 * inputs as u64
    }

    fn flops(&self, operation: &Operation) -> u64 {
        let config = &self.model.config;
        let convolution =
            |rows: u64| 2 * rows * (config.conv_channels() * config.conv_kernel) as u64;
        // For each element of the state: one multiplication by g, and three multiply-adds for u, the
        // rank-1 update and y.
        let delta_rule =
            |rows: u64| 7 * rows * (config.linear_value_width() * config.linear_key_dim) as u64;
        match *operation {
            Operation::Project { weight, output, .. }
            | Operation::ProjectAdd { weight, output, .. }
            | Operation::ExpertProject { weight, output, .. } => {
                self.product(self.rows(output), weight)
            }
            Operation::Projections {
                ref projections, ..
            } => projections
                .iter()
                .flat_map(|projection| {
                    let rows = self.rows(projection.output());
                    projection
                        .weights()
                        .into_iter()
                        .map(move |weight| self.product(rows, weight))
                })
                .sum(),
            Operation::ExpertInput {
                gate, up, output, ..
            } => self.product(self.rows(output), gate) + self.product(self.rows(output), up),
            Operation::ExpertOutput {
                activated,
                down,
                shared,
                shared_down,
                ..
            } => {
                self.product(self.rows(activated), down)
                    + self.product(self.rows(shared), shared_down)
            }
            Operation::Convolve { output, .. } => convolution(self.rows(output)),
            Operation::DeltaScan { output, .. } => delta_rule(self.rows(output)),
            Operation::DeltaStep { output, .. } => {
                let rows = self.rows(output);
                convolution(rows) + delta_rule(rows)
            }
            // Scores, then weighted values.
            Operation::Attention { .. } | Operation::AttentionPartial { .. } => {
                4 * config.attention_width() as u64 * self.positions_attended()
            }
            Operation::Embed { .. }
            | Operation::RmsNorm { .. }
            | Operation::GatedActivation { .. }
            | Operation::ResidualAdd { .. }
            | Operation::DeltaPrepare { .. }
            | Operation::GatedNorm { .. }
            | Operation::HeadNorm { .. }
            | Operation::Rotate { .. }
            | Operation::CacheWrite { .. }
            | Operation::AttentionMerge { .. }
            | Operation::OutputGate { .. }
            | Operation::Route { .. }
            | Operation::GroupExperts { .. }
            | Operation::Combine { .. }
            | Operation::SelectLastRow { .. }
            | Operation::ArgMax { .. }
            | Operation::Sample { .. }
            | Operation::QueryKeyPrepare { .. }
            | Operation::AttentionMergeGate { .. }
            | Operation::Dequantise { .. }
            | Operation::CombineAdd { .. } => 0,
            Operation::WithDequantised { ref product, .. } => self.flops(product),
        }
    }

    fn work_items(&self, operation: &Operation) -> u64 {
        let config = &self.model.config;
        let rows = self.plan.class.rows as u64;
        let heads = |count: usize| rows * count as u64;
        match *operation {
            Operation::Embed { output, .. }
            | Operation::Project { output, .. }
            | Operation::ProjectAdd { output, .. }
            | Operation::GatedActivation { output, .. }
            | Operation::ResidualAdd { output, .. }
            | Operation::Convolve { output, .. }
            | Operation::OutputGate { output, .. }
            | Operation::ExpertProject { output, .. }
            | Operation::ExpertInput { output, .. }
            | Operation::ExpertOutput { output, .. }
            | Operation::Combine { output, .. }
            | Operation::CombineAdd { output, .. }
            | Operation::Dequantise { output, .. }
            | Operation::SelectLastRow { output, .. } => self.elements(output),
            Operation::WithDequantised { ref product, .. } => self.work_items(product),
            Operation::Projections {
                ref projections, ..
            } => projections
                .iter()
                .map(|projection| self.elements(projection.output()))
                .sum(),
            Operation::RmsNorm { output, .. } => self.rows(output),
            // A whole vector each.
            Operation::Route { logits, .. }
            | Operation::ArgMax { logits }
            | Operation::Sample { logits, .. } => self.rows(logits),
            Operation::GroupExperts { .. } => 1,
            Operation::DeltaPrepare { .. } => heads(2 * config.linear_key_heads),
            Operation::DeltaStep { .. } | Operation::GatedNorm { .. } => {
                heads(config.linear_value_heads)
            }
            // The rows of a sequence follow one another.
            Operation::DeltaScan { .. } => self.sequences() * config.linear_value_heads as u64,
            Operation::HeadNorm { output, .. } | Operation::Rotate { output, .. } => {
                self.elements(output) / config.head_dim as u64
            }
            Operation::CacheWrite { .. } => heads(2 * config.key_value_heads),
            Operation::QueryKeyPrepare { .. } => {
                heads(config.attention_heads + 2 * config.key_value_heads)
            }
            Operation::Attention { .. }
            | Operation::AttentionMerge { .. }
            | Operation::AttentionMergeGate { .. } => heads(config.attention_heads),
            // The query heads of a KV head share what is read.
            Operation::AttentionPartial { block_length, .. } => {
                heads(config.key_value_heads) * self.used_blocks(block_length) as u64
            }
        }
    }
}
