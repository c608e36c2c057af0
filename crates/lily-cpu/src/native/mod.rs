//! The native kernels: every operation, fused or not, cut into work items for all cores.

mod attention;
mod bandwidth;
mod delta;
mod dense;
mod experts;
mod kernels;
mod simd;
mod work;

pub use bandwidth::measure_bandwidth;
pub use kernels::InstructionSet;
pub(crate) use work::Work;

use crate::context::Context;
use crate::sample::{arg_max, sample};
use lily_checkpoint::WeightId;
use lily_plan::{Operation, ScratchId};

/// What a native kernel works with.
#[derive(Clone, Copy)]
pub(crate) struct Native<'a> {
    pub context: &'a Context<'a>,
    pub set: InstructionSet,
    /// Weights that the step finds dequantised in scratch.
    pub dequantised: &'a [(WeightId, ScratchId)],
}

impl<'a> Native<'a> {
    /// Cuts a step into work. Everything it reads has been written.
    pub fn prepare(self, operation: &'a Operation) -> Work<'a> {
        match *operation {
            Operation::Embed { table, output } => self.embed(table, output),
            Operation::RmsNorm {
                input,
                weight,
                output,
            } => self.rms_norm(input, weight, output),
            Operation::Project {
                input,
                weight,
                output,
                arithmetic,
            } => self.project(input, weight, None, output, arithmetic),
            Operation::GatedActivation { gate, up, output } => {
                let (gate, up) = (self.context.read(gate), self.context.read(up));
                self.elementwise(output, move |i| dense::silu(gate[i]) * up[i])
            }
            Operation::ResidualAdd {
                residual,
                update,
                output,
            } => {
                let (a, b) = (self.context.read(residual), self.context.read(update));
                self.elementwise(output, move |i| a[i] + b[i])
            }
            Operation::SelectLastRow { input, output } => {
                let rows = self.context.read(input);
                let first = rows.len() - self.context.columns(input);
                self.elementwise(output, move |i| rows[first + i])
            }
            Operation::ArgMax { logits } => Work::new(1, move |_| arg_max(self.context, logits)),
            Operation::Sample { logits, .. } => Work::new(1, move |_| sample(self.context, logits)),
            Operation::Projections {
                input,
                norm,
                ref projections,
                arithmetic,
            } => self.projections(input, norm, projections, arithmetic),
            Operation::ProjectAdd {
                input,
                weight,
                residual,
                output,
                arithmetic,
            } => self.project(input, weight, Some(residual), output, arithmetic),
            Operation::Convolve {
                layer,
                input,
                taps,
                output,
            } => self.convolve(layer, input, taps, output),
            Operation::DeltaPrepare {
                convolved,
                a,
                b,
                a_log,
                dt_bias,
                query_key,
                decay,
                strength,
            } => self.delta_prepare(
                [convolved, a, b],
                [a_log, dt_bias],
                [query_key, decay, strength],
            ),
            Operation::DeltaScan {
                layer,
                query_key,
                convolved,
                decay,
                strength,
                output,
            } => self.delta_scan(layer, [query_key, convolved, decay, strength], output),
            Operation::GatedNorm {
                input,
                gate,
                weight,
                output,
            } => self.gated_norm(input, gate, weight, output),
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
            } => self.delta_step(
                layer,
                [input, gate, a, b],
                [taps, a_log, dt_bias, norm],
                output,
            ),
            Operation::HeadNorm {
                input,
                weight,
                output,
            } => self.head_norm(input, weight, output),
            Operation::Rotate { input, output } => self.rotate(input, output),
            Operation::CacheWrite {
                layer,
                keys,
                values,
            } => self.cache_write(layer, keys, values),
            Operation::QueryKeyPrepare {
                layer,
                query_gate,
                keys,
                values,
                query_norm,
                key_norm,
                queries,
            } => self.query_key_prepare(
                layer,
                [query_gate, keys, values],
                [query_norm, key_norm],
                queries,
            ),
            Operation::Attention {
                layer,
                queries,
                output,
            } => self.attention(layer, queries, output),
            Operation::AttentionPartial {
                layer,
                queries,
                block_length,
                output,
            } => self.attention_partial(layer, queries, block_length, output),
            Operation::AttentionMerge {
                partials,
                block_length,
                output,
            } => self.attention_merge(partials, block_length, None, output),
            Operation::AttentionMergeGate {
                partials,
                block_length,
                query_gate,
                output,
            } => self.attention_merge(partials, block_length, Some(query_gate), output),
            Operation::OutputGate {
                input,
                query_gate,
                output,
            } => self.output_gate(input, query_gate, output),
            Operation::Route {
                logits,
                ids,
                weights,
            } => self.route(logits, ids, weights),
            Operation::GroupExperts { ids, grouping } => self.group_experts(ids, grouping),
            Operation::ExpertProject {
                input,
                ids,
                grouping,
                weight,
                output,
                arithmetic,
            } => self.expert_project(input, (ids, grouping), weight, output, arithmetic),
            Operation::ExpertInput {
                input,
                norm,
                ids,
                grouping,
                gate,
                up,
                output,
                arithmetic,
            } => self.expert_input(input, norm, (ids, grouping), [gate, up], output, arithmetic),
            Operation::Combine {
                experts,
                weights,
                shared,
                shared_gate,
                output,
            } => self.combine([experts, weights, shared, shared_gate], None, output),
            Operation::CombineAdd {
                experts,
                weights,
                shared,
                shared_gate,
                residual,
                output,
            } => self.combine(
                [experts, weights, shared, shared_gate],
                Some(residual),
                output,
            ),
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
            } => self.expert_output(
                [activated, weights, shared, shared_gate, residual],
                ids,
                [down, shared_down],
                output,
            ),
            Operation::Dequantise { weight, output, .. } => self.dequantise(weight, output),
            Operation::WithDequantised {
                ref product,
                ref matrices,
            } => Native {
                dequantised: matrices,
                ..self
            }
            .prepare(product),
        }
    }
}
