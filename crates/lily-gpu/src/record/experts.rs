//! Products with routed experts: kernels/experts.metal.

use super::dense::TILE_OUTPUTS;
use super::{Recorder, instance};
use crate::kernels::{ExpertOutput, ProjectExperts, TileExperts};
use crate::route;
use lily_checkpoint::WeightId;
use lily_plan::{DeviceError, Operation, ScratchId, WeightArithmetic};

/// Outputs of a threadgroup of `expert_output` (kernels/experts.metal, TILE).
const TILE: usize = 16;

impl Recorder<'_> {
    /// `weights` are gate and up, or twice the one there is.
    pub(super) fn project_experts(
        &mut self,
        input: ScratchId,
        norm: Option<WeightId>,
        (ids, grouping): (ScratchId, Option<ScratchId>),
        [weight, up]: [WeightId; 2],
        output: ScratchId,
        arithmetic: WeightArithmetic,
    ) -> Result<(), DeviceError> {
        let (outputs, columns) = self.plan.model.dimensions(weight);
        let pairs = self.plan.spec(ids).elements();
        let has_up = weight != up;
        if let Some(tiles) = self.tiles(input, norm, arithmetic) {
            let (Some(grouping), None) = (grouping, norm) else {
                let what = "ungrouped or normalised experts on matrix units".to_string();
                return Err(self.unsupported(what, "plans group the rows of a prompt by expert"));
            };
            debug_assert!(self.is_bfloat(input), "what matrix units take");
            let form = match self.switches.small_tiles {
                true => route::small_tile(),
                false => route::expert_tile(pairs, self.config.experts),
            };
            let kernel = TileExperts {
                kernel: instance(
                    TileExperts::NAMES,
                    &format!("{tiles}_experts_{}", form.rows),
                ),
                columns: columns as u32,
                outputs: outputs as u32,
                experts: self.config.experts as u32,
                pairs_a_row: (pairs / self.rows_of(input)) as u32,
                bits: self.bits(weight),
                has_up,
                up_bits: self.bits(up),
                output_bfloat: self.is_bfloat(output),
                input: self.input(input),
                grouping: self.input(grouping),
                weight: self.weight(weight),
                up: has_up.then(|| self.weight(up)),
                output: self.output(output),
            };
            let width = if has_up {
                TILE_OUTPUTS / 2
            } else {
                TILE_OUTPUTS
            };
            let tiles = pairs / form.rows + self.config.experts.min(pairs);
            self.dispatch(kernel, [outputs.div_ceil(width), tiles, 1], form.threads);
            return Ok(());
        }
        let together = match grouping {
            Some(_) => 8,
            None => route::vector_rows(self.rows()),
        };
        // One threadgroup row a pair, or a tile of an expert's pairs: at most one unfinished tile an expert.
        let tiles = match grouping {
            Some(_) => pairs / together + self.config.experts.min(pairs),
            None => pairs,
        };
        let blocks = outputs.div_ceil(4);
        let choices = self.config.experts_per_token;
        let shape = route::vector_shape(columns, blocks, together, choices, self.gpu.cores);
        let shape = route::VectorShape { rounds: 1, ..shape };
        let kernel = ProjectExperts {
            kernel: instance(
                ProjectExperts::NAMES,
                &format!("project_experts_{together}"),
            ),
            columns: columns as u32,
            input_bfloat: self.is_bfloat(input),
            has_norm: norm.is_some(),
            epsilon: self.epsilon(),
            simdgroups: shape.simdgroups as u32,
            split: shape.split as u32,
            by_chunk: shape.by_chunk,
            outputs: outputs as u32,
            experts: self.config.experts as u32,
            pairs_a_row: (pairs / self.rows_of(input)) as u32,
            bits: self.bits(weight),
            has_up,
            up_bits: self.bits(up),
            output_bfloat: self.is_bfloat(output),
            grouped: grouping.is_some(),
            input: self.input(input),
            norm: norm.map(|id| self.weight(id)),
            ids: self.input(ids),
            grouping: grouping.map(|id| self.input(id)),
            weight: self.weight(weight),
            up: has_up.then(|| self.weight(up)),
            output: self.output(output),
            pair_count: pairs as u32,
        };
        self.dispatch(
            kernel,
            [blocks.div_ceil(shape.blocks()), tiles, 1],
            shape.simdgroups * 32,
        );
        Ok(())
    }

    pub(super) fn expert_output(&mut self, operation: &Operation) {
        let Operation::ExpertOutput {
            activated,
            ids,
            weights,
            down,
            shared,
            shared_down,
            shared_gate,
            residual,
            output,
        } = *operation
        else {
            unreachable!("called for this operation")
        };
        let rows = self.rows();
        let together = route::vector_rows(rows);
        // One for each expert of a row and one for the shared expert; more rows take turns.
        let simdgroups = (self.columns(ids) + 1).min(16);
        let outputs = self.columns(output);
        let kernel = ExpertOutput {
            kernel: instance(ExpertOutput::NAMES, &format!("expert_output_{together}")),
            columns: self.columns(activated) as u32,
            input_bfloat: self.is_bfloat(activated),
            simdgroups: simdgroups as u32,
            outputs: outputs as u32,
            choices: self.columns(ids) as u32,
            bits: self.bits(down),
            shared_columns: self.columns(shared) as u32,
            shared_bits: self.bits(shared_down),
            shared_bfloat: self.is_bfloat(shared),
            activated: self.input(activated),
            ids: self.input(ids),
            weights: self.input(weights),
            down: self.weight(down),
            shared_input: self.input(shared),
            shared_down: self.weight(shared_down),
            shared_gate: self.input(shared_gate),
            residual: self.input(residual),
            output: self.output(output),
            row_count: rows as u32,
        };
        self.dispatch(kernel, [outputs.div_ceil(TILE), 1, 1], simdgroups * 32);
    }
}
