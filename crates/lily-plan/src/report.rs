//! Reports: the plans of a model with their counts, prices and boundaries, as data. The text for people
//! is made from the same data.

use crate::boundary::{BoundaryKind, boundaries, state_name};
use crate::cost::{Machine, MemoryPlan, Price};
use crate::count::{Assumptions, Work};
use crate::model::ModelDescription;
use crate::operand::{ElementType, Precision, Resource, StateSlot};
use crate::plan::{Phase, Plan, PlanClass, PlanOutput};
use crate::route;
use lily_checkpoint::WeightId;
use serde::{Serialize, Serializer};
use std::sync::Arc;

/// The decode and prefill plans of a model, fused and expanded, counted and priced.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PlanReport {
    /// The model.
    pub model: ModelSummary,
    /// `f32` or `bf16`.
    pub precision: String,
    /// What the counts assume.
    pub assumptions: Assumptions,
    /// The machines that plans are priced for, with the source of each number.
    pub machines: Vec<Machine>,
    /// Memory that the model takes with these plans, fused.
    pub memory: MemoryPlan,
    /// One session, the token chosen on the device.
    pub decode: PhaseReport,
    /// One chunk of a prompt, its last row's logits wanted.
    pub prefill: PhaseReport,
}

/// A model's outline.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ModelSummary {
    /// Layers in all.
    pub layers: usize,
    /// Those with a KV cache; the others have a recurrent state.
    pub attention_layers: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Experts of a layer.
    pub experts: usize,
    /// Experts a token is routed to.
    pub experts_per_token: usize,
    /// Rows of the head.
    pub vocab_size: usize,
    /// Longest sequence, in tokens.
    pub max_positions: usize,
}

/// A phase's plan, with and without fusion.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PhaseReport {
    /// What the plan is for, in words.
    pub class: String,
    /// Tokens of a run of the plan.
    pub rows: usize,
    /// As it runs.
    pub fused: PlanFigures,
    /// Every fused operation replaced by the sequence it stands for.
    pub expanded: PlanFigures,
}

/// A plan's figures.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PlanFigures {
    /// Steps: each is one dispatch.
    pub dispatches: usize,
    /// Stages: a barrier stands between each and the next.
    pub stages: usize,
    /// Bytes moved by one run.
    pub bytes: BytesReport,
    /// Floating-point operations of one run (see [`Work::flops`]).
    pub flops: u64,
    /// Bytes of the arena that holds the scratch values.
    pub arena_bytes: u64,
    /// Lower bound of a run's duration, by machine.
    pub price: ByMachine<Price>,
    /// The boundaries that remain.
    pub boundaries: Vec<BoundaryReport>,
    /// The steps of each operation together, in the order in which operations first occur.
    pub operations: Vec<OperationReport>,
    /// The steps in program order.
    pub steps: Vec<StepReport>,
}

/// Bytes moved, by kind of operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct BytesReport {
    /// Weights read.
    pub weights: u64,
    /// Session state, read and written.
    pub state: u64,
    /// Scratch, read and written.
    pub scratch: u64,
    /// All three.
    pub total: u64,
}

impl From<&Work> for BytesReport {
    fn from(work: &Work) -> Self {
        BytesReport {
            weights: work.weight_bytes,
            state: work.state_bytes(),
            scratch: work.scratch_bytes(),
            total: work.bytes(),
        }
    }
}

/// A value for each machine, in the order of [`PlanReport::machines`]; a table by name in JSON.
#[derive(Clone, Debug, PartialEq)]
pub struct ByMachine<T>(pub Vec<(String, T)>);

impl<T> ByMachine<T> {
    fn new(machines: &[Machine], value: impl Fn(&Machine) -> T) -> Self {
        ByMachine(
            machines
                .iter()
                .map(|machine| (machine.name.clone(), value(machine)))
                .collect(),
        )
    }
}

impl<T: Serialize> Serialize for ByMachine<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(name, value)| (name, value)))
    }
}

/// A kind of boundary with its price.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct BoundaryReport {
    /// Producers → consumers.
    pub name: String,
    /// What it is.
    #[serde(flatten)]
    pub kind: BoundaryKind,
    /// One of them, in seconds.
    pub seconds_each: ByMachine<f64>,
    /// All of them, in seconds.
    pub seconds: ByMachine<f64>,
}

/// All steps of one operation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct OperationReport {
    /// Its name.
    pub operation: &'static str,
    /// Steps.
    pub dispatches: usize,
    /// Bytes moved.
    pub bytes: BytesReport,
    /// Floating-point operations.
    pub flops: u64,
}

/// One step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct StepReport {
    /// Its number in program order.
    pub index: usize,
    /// Its stage.
    pub stage: usize,
    /// The layer it belongs to.
    pub layer: Option<u16>,
    /// Operation.
    pub operation: &'static str,
    /// Scratch values and state read.
    pub reads: Vec<OperandReport>,
    /// Scratch values and state written.
    pub writes: Vec<OperandReport>,
    /// Weights read.
    pub weights: Vec<WeightReport>,
    /// Bytes moved.
    pub bytes: BytesReport,
    /// Floating-point operations.
    pub flops: u64,
    /// Independent results (see [`Work::work_items_hint`]).
    pub work_items_hint: u64,
}

/// A scratch value or state slot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct OperandReport {
    /// Its name; a state slot's is the same in every layer.
    pub name: &'static str,
    /// Whether it is session state, and not scratch.
    pub state: bool,
    /// Its shape (of one session's slot, for state).
    pub shape: Vec<usize>,
    /// Its element type.
    pub element: String,
}

/// A weight.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct WeightReport {
    /// Module path in the checkpoint.
    pub name: String,
    /// Its shape; experts come first where there are several matrices.
    pub shape: Vec<usize>,
    /// How it is stored.
    pub format: String,
}

impl PlanReport {
    /// Records, counts and prices the plans of `model`: decode of one session with `context` positions
    /// in its cache, and prefill of a chunk of `chunk_rows` tokens behind as many.
    pub fn new(
        model: &Arc<ModelDescription>,
        precision: Precision,
        context: usize,
        chunk_rows: usize,
        machines: &[Machine],
    ) -> PlanReport {
        let config = &model.config;
        let assumptions = Assumptions::at_context(context);
        let plan = |phase, rows, context, output| {
            let class = PlanClass {
                phase,
                precision,
                rows,
                context,
                output,
            };
            Plan::record(model, class)
        };
        let decode = plan(
            Phase::Decode,
            1,
            route::context_band(context + 1),
            PlanOutput::Token,
        );
        let limit = config.max_positions.max(context + chunk_rows);
        let prefill = plan(Phase::Prefill, chunk_rows, limit, PlanOutput::LastLogits);
        PlanReport {
            model: ModelSummary {
                layers: config.layers,
                attention_layers: config.attention_layers(),
                hidden_size: config.hidden_size,
                experts: config.experts,
                experts_per_token: config.experts_per_token,
                vocab_size: config.vocab_size,
                max_positions: config.max_positions,
            },
            precision: precision.to_string(),
            assumptions,
            machines: machines.to_vec(),
            memory: MemoryPlan::new(model, precision, &[&decode, &prefill]),
            decode: PhaseReport::new(&decode, &assumptions, machines),
            prefill: PhaseReport::new(&prefill, &assumptions, machines),
        }
    }
}

impl PhaseReport {
    fn new(plan: &Plan, assumptions: &Assumptions, machines: &[Machine]) -> Self {
        PhaseReport {
            class: plan.class.to_string(),
            rows: plan.class.rows,
            fused: PlanFigures::new(plan, assumptions, machines),
            expanded: PlanFigures::new(&plan.expanded(), assumptions, machines),
        }
    }
}

impl PlanFigures {
    /// The figures of one plan.
    pub fn new(plan: &Plan, assumptions: &Assumptions, machines: &[Machine]) -> Self {
        let totals = plan.totals(assumptions);
        let mut stage_of = vec![0; plan.steps.len()];
        for (stage, steps) in plan.stages.iter().enumerate() {
            for &step in steps {
                stage_of[step] = stage;
            }
        }
        let steps: Vec<StepReport> = (0..plan.steps.len())
            .map(|step| StepReport::new(plan, step, stage_of[step], assumptions))
            .collect();
        let mut operations: Vec<OperationReport> = Vec::new();
        for step in &steps {
            match operations
                .iter_mut()
                .find(|known| known.operation == step.operation)
            {
                Some(known) => known.add(step),
                None => operations.push(OperationReport {
                    operation: step.operation,
                    dispatches: 1,
                    bytes: step.bytes,
                    flops: step.flops,
                }),
            }
        }
        PlanFigures {
            dispatches: totals.dispatches,
            stages: totals.stages,
            bytes: BytesReport::from(&totals.work),
            flops: totals.work.flops,
            arena_bytes: plan.place(ElementType::bytes).arena_bytes as u64,
            price: ByMachine::new(machines, |machine| plan.price(machine, assumptions)),
            boundaries: boundaries(plan)
                .into_iter()
                .map(|kind| BoundaryReport {
                    name: kind.name(),
                    seconds_each: ByMachine::new(machines, |machine| machine.boundary_seconds),
                    seconds: ByMachine::new(machines, |machine| {
                        kind.count as f64 * machine.boundary_seconds
                    }),
                    kind,
                })
                .collect(),
            operations,
            steps,
        }
    }
}

impl OperationReport {
    fn add(&mut self, step: &StepReport) {
        self.dispatches += 1;
        self.bytes.weights += step.bytes.weights;
        self.bytes.state += step.bytes.state;
        self.bytes.scratch += step.bytes.scratch;
        self.bytes.total += step.bytes.total;
        self.flops += step.flops;
    }
}

impl StepReport {
    fn new(plan: &Plan, index: usize, stage: usize, assumptions: &Assumptions) -> Self {
        let step = &plan.steps[index];
        let access = step.operation.access();
        let work = plan.work(index, assumptions);
        let operands = |resources: &[Resource]| {
            resources
                .iter()
                .map(|&resource| OperandReport::new(plan, resource, assumptions))
                .collect()
        };
        StepReport {
            index,
            stage,
            layer: step.layer,
            operation: step.operation.name(),
            reads: operands(&access.reads),
            writes: operands(&access.writes),
            weights: access
                .weights
                .iter()
                .map(|&weight| WeightReport::new(&plan.model, weight))
                .collect(),
            bytes: BytesReport::from(&work),
            flops: work.flops,
            work_items_hint: work.work_items_hint,
        }
    }
}

impl OperandReport {
    fn new(plan: &Plan, resource: Resource, assumptions: &Assumptions) -> Self {
        let config = &plan.model.config;
        let activation = plan.class.precision.activation();
        let (name, shape, element) = match resource {
            Resource::Scratch(id) => {
                let spec = plan.spec(id);
                (spec.name, vec![spec.rows, spec.columns], spec.element)
            }
            Resource::State(slot) => {
                let (shape, element) = match slot {
                    StateSlot::Tokens | StateSlot::NextToken => {
                        (vec![plan.class.rows], ElementType::U32)
                    }
                    StateSlot::KeyCache(_) | StateSlot::ValueCache(_) => {
                        let run = match plan.class.phase {
                            Phase::Prefill => plan.class.rows,
                            Phase::Decode => 1,
                        };
                        let positions = assumptions.context + run;
                        let shape = vec![config.key_value_heads, positions, config.head_dim];
                        (shape, activation)
                    }
                    StateSlot::ConvolutionHistory(..) => {
                        let shape = vec![config.conv_kernel - 1, config.conv_channels()];
                        (shape, activation)
                    }
                    StateSlot::RecurrentState(..) => {
                        let shape = vec![
                            config.linear_value_heads,
                            config.linear_value_dim,
                            config.linear_key_dim,
                        ];
                        (shape, ElementType::F32)
                    }
                };
                (state_name(slot), shape, element)
            }
        };
        OperandReport {
            name,
            state: matches!(resource, Resource::State(_)),
            shape,
            element: element.to_string(),
        }
    }
}

impl WeightReport {
    fn new(model: &ModelDescription, weight: WeightId) -> Self {
        WeightReport {
            name: weight.to_string(),
            shape: model.shape(weight).stored(),
            format: model.format(weight).to_string(),
        }
    }
}
