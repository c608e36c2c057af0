//! What each fused operation means: the unfused sequence it stands for. This one function is a fused
//! operation's reference, its ablation and the unfused plan.

use crate::model::ModelDescription;
use crate::operand::{ElementType, ScratchId, ScratchSpec};
use crate::operation::{Operation, Projection};
use lily_checkpoint::WeightId;

/// The scratch values of a plan under construction.
#[derive(Clone, Debug, Default)]
pub(crate) struct ScratchTable {
    pub specs: Vec<ScratchSpec>,
    pub layer: Option<u16>,
}

impl ScratchTable {
    pub fn add(
        &mut self,
        name: &'static str,
        rows: usize,
        columns: usize,
        element: ElementType,
    ) -> ScratchId {
        self.specs.push(ScratchSpec {
            name,
            layer: self.layer,
            rows,
            columns,
            element,
        });
        ScratchId(self.specs.len() as u32 - 1)
    }

    pub fn spec(&self, id: ScratchId) -> &ScratchSpec {
        &self.specs[id.index()]
    }

    /// An intermediate that the fused operation keeps in registers: f32, so that it is not rounded.
    fn unrounded(&mut self, name: &'static str, rows: usize, columns: usize) -> ScratchId {
        self.add(name, rows, columns, ElementType::F32)
    }
}

impl Operation {
    /// Whether this operation is defined by others.
    pub fn is_fused(&self) -> bool {
        matches!(
            self.product(),
            Operation::Projections { .. }
                | Operation::ProjectAdd { .. }
                | Operation::DeltaStep { .. }
                | Operation::QueryKeyPrepare { .. }
                | Operation::AttentionMergeGate { .. }
                | Operation::ExpertInput { .. }
                | Operation::ExpertOutput { .. }
                | Operation::CombineAdd { .. }
        )
    }

    /// The unfused sequence of a fused operation, its intermediates added to `scratch`; the operation
    /// itself where it is not fused.
    pub(crate) fn expand(
        &self,
        model: &ModelDescription,
        scratch: &mut ScratchTable,
    ) -> Vec<Operation> {
        let config = &model.config;
        let rows_of = |scratch: &ScratchTable, id: ScratchId| scratch.spec(id).rows;
        let normed = |scratch: &mut ScratchTable, sequence: &mut Vec<Operation>, input, norm| {
            let Some(weight) = norm else { return input };
            let ScratchSpec { rows, columns, .. } = *scratch.spec(input);
            let output = scratch.unrounded("normed", rows, columns);
            sequence.push(Operation::RmsNorm {
                input,
                weight,
                output,
            });
            output
        };
        match *self {
            Operation::Projections {
                input,
                norm,
                ref projections,
                arithmetic,
            } => {
                let mut sequence = Vec::new();
                let input = normed(scratch, &mut sequence, input, norm);
                for projection in projections {
                    match *projection {
                        Projection::Linear { weight, output } => {
                            sequence.push(Operation::Project {
                                input,
                                weight,
                                output,
                                arithmetic,
                            });
                        }
                        Projection::Gated { gate, up, output } => {
                            let ScratchSpec { rows, columns, .. } = *scratch.spec(output);
                            let halves = [("gate", gate), ("up", up)].map(|(name, weight)| {
                                let output = scratch.unrounded(name, rows, columns);
                                let product = Operation::Project {
                                    input,
                                    weight,
                                    output,
                                    arithmetic,
                                };
                                sequence.push(product);
                                output
                            });
                            sequence.push(Operation::GatedActivation {
                                gate: halves[0],
                                up: halves[1],
                                output,
                            });
                        }
                    }
                }
                sequence
            }
            Operation::ProjectAdd {
                input,
                weight,
                residual,
                output,
                arithmetic,
            } => {
                let ScratchSpec { rows, columns, .. } = *scratch.spec(output);
                let update = scratch.unrounded("projected", rows, columns);
                vec![
                    Operation::Project {
                        input,
                        weight,
                        output: update,
                        arithmetic,
                    },
                    Operation::ResidualAdd {
                        residual,
                        update,
                        output,
                    },
                ]
            }
            Operation::DeltaStep {
                layer,
                input,
                gate,
                a,
                b,
                taps,
                a_log,
                dt_bias,
                norm,
                output,
            } => {
                let rows = rows_of(scratch, input);
                let key_width = config.linear_key_heads * config.linear_key_dim;
                let convolved = scratch.unrounded("convolved", rows, config.conv_channels());
                let query_key = scratch.unrounded("query-key", rows, 2 * key_width);
                let decay = scratch.unrounded("decay", rows, config.linear_value_heads);
                let strength = scratch.unrounded("strength", rows, config.linear_value_heads);
                let scanned = scratch.unrounded("scanned", rows, config.linear_value_width());
                vec![
                    Operation::Convolve {
                        layer,
                        input,
                        taps,
                        output: convolved,
                    },
                    Operation::DeltaPrepare {
                        convolved,
                        a,
                        b,
                        a_log,
                        dt_bias,
                        query_key,
                        decay,
                        strength,
                    },
                    Operation::DeltaScan {
                        layer,
                        query_key,
                        convolved,
                        decay,
                        strength,
                        output: scanned,
                    },
                    Operation::GatedNorm {
                        input: scanned,
                        gate,
                        weight: norm,
                        output,
                    },
                ]
            }
            Operation::QueryKeyPrepare {
                layer,
                query_gate,
                keys,
                values,
                query_norm,
                key_norm,
                queries,
            } => {
                let rows = rows_of(scratch, keys);
                let (wide, narrow) = (config.attention_width(), config.key_value_width());
                let normed_queries = scratch.unrounded("normed-queries", rows, wide);
                let normed_keys = scratch.unrounded("normed-keys", rows, narrow);
                let rotated_keys = scratch.unrounded("rotated-keys", rows, narrow);
                vec![
                    Operation::HeadNorm {
                        input: query_gate,
                        weight: query_norm,
                        output: normed_queries,
                    },
                    Operation::HeadNorm {
                        input: keys,
                        weight: key_norm,
                        output: normed_keys,
                    },
                    Operation::Rotate {
                        input: normed_queries,
                        output: queries,
                    },
                    Operation::Rotate {
                        input: normed_keys,
                        output: rotated_keys,
                    },
                    Operation::CacheWrite {
                        layer,
                        keys: rotated_keys,
                        values,
                    },
                ]
            }
            Operation::AttentionMergeGate {
                partials,
                block_length,
                query_gate,
                output,
            } => {
                let ScratchSpec { rows, columns, .. } = *scratch.spec(output);
                let merged = scratch.unrounded("attended", rows, columns);
                vec![
                    Operation::AttentionMerge {
                        partials,
                        block_length,
                        output: merged,
                    },
                    Operation::OutputGate {
                        input: merged,
                        query_gate,
                        output,
                    },
                ]
            }
            Operation::ExpertInput {
                input,
                norm,
                ids,
                grouping,
                gate,
                up,
                output,
                arithmetic,
            } => {
                let mut sequence = Vec::new();
                let input = normed(scratch, &mut sequence, input, norm);
                let ScratchSpec { rows, columns, .. } = *scratch.spec(output);
                let halves = [("expert-gate", gate), ("expert-up", up)].map(|(name, weight)| {
                    let output = scratch.unrounded(name, rows, columns);
                    sequence.push(expert_project(
                        input, ids, grouping, weight, output, arithmetic,
                    ));
                    output
                });
                sequence.push(Operation::GatedActivation {
                    gate: halves[0],
                    up: halves[1],
                    output,
                });
                sequence
            }
            Operation::ExpertOutput {
                activated,
                ids,
                weights,
                down,
                shared,
                shared_down,
                shared_gate,
                residual,
                output,
            } => {
                let ScratchSpec { rows, columns, .. } = *scratch.spec(output);
                let pairs = rows_of(scratch, activated);
                let experts = scratch.unrounded("expert-down", pairs, columns);
                let shared_output = scratch.unrounded("shared-down", rows, columns);
                let exact = crate::operation::WeightArithmetic::Exact;
                let mut sequence = vec![
                    expert_project(activated, ids, None, down, experts, exact),
                    Operation::Project {
                        input: shared,
                        weight: shared_down,
                        output: shared_output,
                        arithmetic: exact,
                    },
                ];
                sequence.extend(combine_add(
                    scratch,
                    [
                        experts,
                        weights,
                        shared_output,
                        shared_gate,
                        residual,
                        output,
                    ],
                ));
                sequence
            }
            Operation::CombineAdd {
                experts,
                weights,
                shared,
                shared_gate,
                residual,
                output,
            } => combine_add(
                scratch,
                [experts, weights, shared, shared_gate, residual, output],
            )
            .to_vec(),
            Operation::WithDequantised {
                ref product,
                ref matrices,
            } => product
                .expand(model, scratch)
                .into_iter()
                .map(|part| part.with_dequantised(matrices))
                .collect(),
            ref unfused => vec![unfused.clone()],
        }
    }
}

impl Operation {
    /// The operation with those of its weights dequantised that are among `matrices`; itself if none is.
    pub(crate) fn with_dequantised(self, matrices: &[(WeightId, ScratchId)]) -> Operation {
        let weights = self.access().weights;
        let its = matrices.iter().filter(|(id, _)| weights.contains(id));
        let matrices: Vec<_> = its.copied().collect();
        if matrices.is_empty() {
            return self;
        }
        Operation::WithDequantised {
            product: Box::new(self),
            matrices,
        }
    }
}

fn expert_project(
    input: ScratchId,
    ids: ScratchId,
    grouping: Option<ScratchId>,
    weight: WeightId,
    output: ScratchId,
    arithmetic: crate::operation::WeightArithmetic,
) -> Operation {
    Operation::ExpertProject {
        input,
        ids,
        grouping,
        weight,
        output,
        arithmetic,
    }
}

fn combine_add(
    scratch: &mut ScratchTable,
    [experts, weights, shared, shared_gate, residual, output]: [ScratchId; 6],
) -> [Operation; 2] {
    let ScratchSpec { rows, columns, .. } = *scratch.spec(output);
    let update = scratch.unrounded("combined", rows, columns);
    [
        Operation::Combine {
            experts,
            weights,
            shared,
            shared_gate,
            output: update,
        },
        Operation::ResidualAdd {
            residual,
            update,
            output,
        },
    ]
}
