//! What each operation touches: the only source of hazards.

use crate::operand::{Resource, ScratchId, StateCopy, StateSlot};
use crate::operation::{Operation, Projection};
use lily_checkpoint::WeightId;

/// What an operation touches.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Access {
    /// Resources read.
    pub reads: Vec<Resource>,
    /// Resources written.
    pub writes: Vec<Resource>,
    /// Weights read.
    pub weights: Vec<WeightId>,
}

impl Access {
    fn scratch(reads: &[ScratchId], writes: &[ScratchId], weights: &[WeightId]) -> Self {
        Access {
            reads: reads.iter().copied().map(Resource::Scratch).collect(),
            writes: writes.iter().copied().map(Resource::Scratch).collect(),
            weights: weights.to_vec(),
        }
    }

    fn reading(mut self, slots: &[StateSlot]) -> Self {
        self.reads
            .extend(slots.iter().copied().map(Resource::State));
        self
    }

    fn writing(mut self, slots: &[StateSlot]) -> Self {
        self.writes
            .extend(slots.iter().copied().map(Resource::State));
        self
    }

    fn also(mut self, more: &[Option<ScratchId>]) -> Self {
        self.reads
            .extend(more.iter().flatten().copied().map(Resource::Scratch));
        self
    }
}

impl Operation {
    /// What the operation reads and writes. The only source of hazards.
    pub fn access(&self) -> Access {
        use StateSlot::*;
        let key_value = |layer: &u16| [KeyCache(*layer), ValueCache(*layer)];
        match self {
            Operation::Embed { table, output } => {
                Access::scratch(&[], &[*output], &[*table]).reading(&[Tokens])
            }
            Operation::RmsNorm {
                input,
                weight,
                output,
            }
            | Operation::Project {
                input,
                weight,
                output,
                ..
            }
            | Operation::HeadNorm {
                input,
                weight,
                output,
            } => Access::scratch(&[*input], &[*output], &[*weight]),
            Operation::GatedActivation { gate, up, output } => {
                Access::scratch(&[*gate, *up], &[*output], &[])
            }
            Operation::ResidualAdd {
                residual,
                update,
                output,
            } => Access::scratch(&[*residual, *update], &[*output], &[]),
            Operation::Convolve {
                layer,
                input,
                taps,
                output,
            } => Access::scratch(&[*input], &[*output], &[*taps])
                .reading(&[ConvolutionHistory(*layer, StateCopy::Live)])
                .writing(&[ConvolutionHistory(*layer, StateCopy::Next)]),
            Operation::DeltaPrepare {
                convolved,
                a,
                b,
                a_log,
                dt_bias,
                query_key,
                decay,
                strength,
            } => Access::scratch(
                &[*convolved, *a, *b],
                &[*query_key, *decay, *strength],
                &[*a_log, *dt_bias],
            ),
            Operation::DeltaScan {
                layer,
                query_key,
                convolved,
                decay,
                strength,
                output,
            } => Access::scratch(
                &[*query_key, *convolved, *decay, *strength],
                &[*output],
                &[],
            )
            .reading(&[RecurrentState(*layer, StateCopy::Live)])
            .writing(&[RecurrentState(*layer, StateCopy::Next)]),
            Operation::GatedNorm {
                input,
                gate,
                weight,
                output,
            } => Access::scratch(&[*input, *gate], &[*output], &[*weight]),
            Operation::Rotate { input, output } | Operation::SelectLastRow { input, output } => {
                Access::scratch(&[*input], &[*output], &[])
            }
            Operation::CacheWrite {
                layer,
                keys,
                values,
            } => Access::scratch(&[*keys, *values], &[], &[]).writing(&key_value(layer)),
            Operation::Attention {
                layer,
                queries,
                output,
            }
            | Operation::AttentionPartial {
                layer,
                queries,
                output,
                ..
            } => Access::scratch(&[*queries], &[*output], &[]).reading(&key_value(layer)),
            Operation::AttentionMerge {
                partials, output, ..
            } => Access::scratch(&[*partials], &[*output], &[]),
            Operation::OutputGate {
                input,
                query_gate,
                output,
            } => Access::scratch(&[*input, *query_gate], &[*output], &[]),
            Operation::Route {
                logits,
                ids,
                weights,
            } => Access::scratch(&[*logits], &[*ids, *weights], &[]),
            Operation::GroupExperts { ids, grouping } => {
                Access::scratch(&[*ids], &[*grouping], &[])
            }
            Operation::ExpertProject {
                input,
                ids,
                grouping,
                weight,
                output,
                ..
            } => Access::scratch(&[*input, *ids], &[*output], &[*weight]).also(&[*grouping]),
            Operation::Combine {
                experts,
                weights,
                shared,
                shared_gate,
                output,
            } => Access::scratch(
                &[*experts, *weights, *shared, *shared_gate],
                &[*output],
                &[],
            ),
            Operation::ArgMax { logits } => {
                Access::scratch(&[*logits], &[], &[]).writing(&[NextToken])
            }
            Operation::Sample { logits, adjusted } => {
                Access::scratch(&[*logits], &[*adjusted], &[]).writing(&[NextToken])
            }
            Operation::Projections {
                input,
                norm,
                projections,
                ..
            } => {
                let outputs: Vec<_> = projections.iter().map(Projection::output).collect();
                let mut access = Access::scratch(&[*input], &outputs, &[]);
                access.weights.extend(norm);
                access
                    .weights
                    .extend(projections.iter().flat_map(Projection::weights));
                access
            }
            Operation::ProjectAdd {
                input,
                weight,
                residual,
                output,
                ..
            } => Access::scratch(&[*input, *residual], &[*output], &[*weight]),
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
            } => Access::scratch(
                &[*input, *gate, *a, *b],
                &[*output],
                &[*taps, *a_log, *dt_bias, *norm],
            )
            .reading(&[
                ConvolutionHistory(*layer, StateCopy::Live),
                RecurrentState(*layer, StateCopy::Live),
            ])
            .writing(&[
                ConvolutionHistory(*layer, StateCopy::Next),
                RecurrentState(*layer, StateCopy::Next),
            ]),
            Operation::QueryKeyPrepare {
                layer,
                query_gate,
                keys,
                values,
                query_norm,
                key_norm,
                queries,
            } => Access::scratch(
                &[*query_gate, *keys, *values],
                &[*queries],
                &[*query_norm, *key_norm],
            )
            .writing(&key_value(layer)),
            Operation::AttentionMergeGate {
                partials,
                query_gate,
                output,
                ..
            } => Access::scratch(&[*partials, *query_gate], &[*output], &[]),
            Operation::ExpertInput {
                input,
                norm,
                ids,
                grouping,
                gate,
                up,
                output,
                ..
            } => {
                let mut access =
                    Access::scratch(&[*input, *ids], &[*output], &[*gate, *up]).also(&[*grouping]);
                access.weights.extend(norm);
                access
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
            } => Access::scratch(
                &[*activated, *ids, *weights, *shared, *shared_gate, *residual],
                &[*output],
                &[*down, *shared_down],
            ),
            Operation::CombineAdd {
                experts,
                weights,
                shared,
                shared_gate,
                residual,
                output,
            } => Access::scratch(
                &[*experts, *weights, *shared, *shared_gate, *residual],
                &[*output],
                &[],
            ),
            Operation::Dequantise {
                weight,
                after,
                output,
            } => Access::scratch(&[*after], &[*output], &[*weight]),
            Operation::WithDequantised { product, matrices } => {
                let mut access = product.access();
                let dequantised = |weight: &WeightId| matrices.iter().any(|(id, _)| id == weight);
                access.weights.retain(|weight| !dequantised(weight));
                let values = matrices.iter().map(|(_, value)| *value);
                access.reads.extend(values.map(Resource::Scratch));
                access
            }
        }
    }
}
