//! Mechanisms of plans that can be turned off one by one, by name, to see what each is worth. Each is a function from
//! a plan to the same plan without the mechanism; several may be applied, in any order.

use crate::expand::ScratchTable;
use crate::operand::{ElementType, Resource, ScratchId};
use crate::operation::{Operation, WeightArithmetic};
use crate::plan::{Plan, Step};
use lily_checkpoint::WeightFormat;
use std::collections::HashMap;

/// A mechanism of plans.
#[derive(Clone, Copy, Debug)]
pub struct PlanSwitch {
    /// Its name.
    pub name: &'static str,
    /// What it does; results are the same without it where nothing else is said.
    pub what: &'static str,
    /// The plan without it; the same plan where it plays no part.
    pub without: fn(&Plan) -> Plan,
}

/// Every mechanism that can be turned off.
pub const ALL: &[PlanSwitch] = &[
    PlanSwitch {
        name: "fused-projections",
        what: "products of one input are one step, with their norm, activation and residual",
        without: |plan| {
            plan.expanded_where(|operation| {
                matches!(
                    operation.product(),
                    Operation::Projections { .. } | Operation::ProjectAdd { .. }
                )
            })
        },
    },
    PlanSwitch {
        name: "fused-delta-step",
        what: "decode's convolution, preparation, recurrence and gated norm are one step",
        without: |plan| {
            plan.expanded_where(|operation| matches!(operation, Operation::DeltaStep { .. }))
        },
    },
    PlanSwitch {
        name: "fused-query-key",
        what: "norms and rotations of queries and keys and the cache write are one step",
        without: |plan| {
            plan.expanded_where(|operation| matches!(operation, Operation::QueryKeyPrepare { .. }))
        },
    },
    PlanSwitch {
        name: "fused-attention-merge",
        what: "decode's merge of attention blocks and its output gate are one step",
        without: |plan| {
            plan.expanded_where(|operation| {
                matches!(operation, Operation::AttentionMergeGate { .. })
            })
        },
    },
    PlanSwitch {
        name: "fused-expert-input",
        what: "experts' norm, gate and up products and activation are one step",
        without: |plan| {
            plan.expanded_where(|operation| {
                matches!(operation.product(), Operation::ExpertInput { .. })
            })
        },
    },
    PlanSwitch {
        name: "fused-expert-output",
        what: "decode's down products, their sum and the residual are one step",
        without: |plan| {
            plan.expanded_where(|operation| matches!(operation, Operation::ExpertOutput { .. }))
        },
    },
    PlanSwitch {
        name: "fused-combine",
        what: "prefill's combination of experts and its residual are one step",
        without: |plan| {
            plan.expanded_where(|operation| matches!(operation, Operation::CombineAdd { .. }))
        },
    },
    PlanSwitch {
        name: "blocked-attention",
        what: "decode's attention is spread over blocks of positions (without it the last bits differ: another order of sums)",
        without: without_blocked_attention,
    },
    PlanSwitch {
        name: "fused-dequantisation",
        what: "bf16 prefill's products dequantise their weights (without it whole matrices are written to memory before, \
               experts that no row chose among them: 1.1 GB for Qwen3.6-35B-A3B)",
        without: without_fused_dequantisation,
    },
];

/// The mechanism of this name.
pub fn find(name: &str) -> Option<&'static PlanSwitch> {
    ALL.iter().find(|switch| switch.name == name)
}

/// A plan's steps changed one by one: `change` is given each, the new plan's scratch values and its steps so far.
fn rewritten(
    plan: &Plan,
    mut change: impl FnMut(&Step, &mut ScratchTable, &mut Vec<Step>),
) -> Plan {
    let mut table = ScratchTable {
        specs: plan.scratch.clone(),
        layer: None,
    };
    let mut steps = Vec::new();
    for step in &plan.steps {
        table.layer = step.layer;
        change(step, &mut table, &mut steps);
    }
    let (logits, kept) = (plan.logits, plan.kept.clone());
    Plan::finish(plan.class, plan.model.clone(), steps, table, logits, kept)
}

/// Attention over all positions in the place of attention by blocks and of their merge.
fn without_blocked_attention(plan: &Plan) -> Plan {
    // By the partial results of blocks: the layer and the queries that they are made of.
    let mut blocks: HashMap<ScratchId, (u16, ScratchId)> = HashMap::new();
    rewritten(plan, |step, table, steps| {
        let layer = step.layer;
        let mut push = |operation| steps.push(Step { operation, layer });
        match step.operation {
            Operation::AttentionPartial {
                layer,
                queries,
                output,
                ..
            } => {
                blocks.insert(output, (layer, queries));
            }
            Operation::AttentionMerge {
                partials, output, ..
            } => {
                let (layer, queries) = blocks[&partials];
                push(Operation::Attention {
                    layer,
                    queries,
                    output,
                });
            }
            Operation::AttentionMergeGate {
                partials,
                query_gate,
                output,
                ..
            } => {
                let (layer, queries) = blocks[&partials];
                let gated = table.spec(output).clone();
                // Not rounded, as what the merge keeps in registers.
                let attended = table.add("attended", gated.rows, gated.columns, ElementType::F32);
                push(Operation::Attention {
                    layer,
                    queries,
                    output: attended,
                });
                push(Operation::OutputGate {
                    input: attended,
                    query_gate,
                    output,
                });
            }
            ref other => push(other.clone()),
        }
    })
}

/// Before each product of many rows its quantised weights as bfloats in scratch, which it reads in their place. A
/// matrix is there for the two stages of the one and the other, and then its memory is used again.
fn without_fused_dequantisation(plan: &Plan) -> Plan {
    rewritten(plan, |step, table, steps| {
        let layer = step.layer;
        let operation = &step.operation;
        let access = operation.access();
        let input = access.reads.iter().find_map(|resource| match resource {
            Resource::Scratch(id) => Some(*id),
            Resource::State(_) => None,
        });
        let (Some(WeightArithmetic::RoundedToBf16), Some(after)) = (operation.arithmetic(), input)
        else {
            steps.push(step.clone());
            return;
        };
        let mut matrices = Vec::new();
        for weight in access.weights {
            let shape = plan.model.shape(weight);
            let quantised = matches!(plan.model.format(weight), WeightFormat::Affine { .. });
            if !(quantised && shape.is_linear()) {
                continue;
            }
            let (rows, columns) = shape.rows_and_columns();
            let output = table.add("dequantised", rows, columns, ElementType::Bf16);
            let operation = Operation::Dequantise {
                weight,
                after,
                output,
            };
            steps.push(Step { operation, layer });
            matrices.push((weight, output));
        }
        let operation = operation.clone().with_dequantised(&matrices);
        steps.push(Step { operation, layer });
    })
}
