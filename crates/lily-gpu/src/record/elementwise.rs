//! Embedding, norms, activations, sums, routing: kernels/elementwise.metal and kernels/routing.metal.

use super::{Recorder, launch};
use crate::kernels::{
    ArgMax, Combine, Dequantise, Embed, GatedActivation, GroupExperts, Input, ResidualAdd, RmsNorm,
    Route, SelectRow,
};
use lily_checkpoint::WeightId;
use lily_plan::{DeviceError, ScratchId};

/// Threads of a threadgroup where each thread works for itself.
const THREADS: usize = 64;

impl Recorder<'_> {
    pub(super) fn embed(&mut self, table: WeightId, output: ScratchId) {
        let (table_rows, columns) = self.plan.model.dimensions(table);
        let rows = self.rows();
        let kernel = Embed {
            columns: columns as u32,
            output_bfloat: self.is_bfloat(output),
            bits: self.bits(table),
            tokens: Input(self.launch(launch::TOKENS, rows * 4)),
            table: self.weight(table),
            output: self.output(output),
            table_rows: table_rows as u32,
        };
        self.dispatch(kernel, [(columns / 4).div_ceil(THREADS), rows, 1], THREADS);
    }

    /// All matrices of a weight.
    pub(super) fn dequantise(&mut self, weight: WeightId, output: ScratchId) {
        let (rows, columns) = self.plan.model.dimensions(weight);
        debug_assert!(self.is_bfloat(output), "what products of many rows read");
        let kernel = Dequantise {
            columns: columns as u32,
            bits: self.bits(weight),
            weight: self.weight(weight),
            output: self.output(output),
            matrix_rows: rows as u32,
        };
        let matrices = self.rows_of(output) / rows;
        let grid = [(columns / 4).div_ceil(THREADS), rows, matrices];
        self.dispatch(kernel, grid, THREADS);
    }

    pub(super) fn rms_norm(&mut self, input: ScratchId, weight: WeightId, output: ScratchId) {
        let kernel = RmsNorm {
            columns: self.columns(input) as u32,
            input_bfloat: self.is_bfloat(input),
            output_bfloat: self.is_bfloat(output),
            epsilon: self.epsilon(),
            input: self.input(input),
            weight: self.weight(weight),
            output: self.output(output),
        };
        self.dispatch(kernel, [self.rows_of(input), 1, 1], 256);
    }

    pub(super) fn gated_activation(&mut self, gate: ScratchId, up: ScratchId, output: ScratchId) {
        let count = self.plan.spec(output).elements();
        let kernel = GatedActivation {
            input_bfloat: self.is_bfloat(gate),
            output_bfloat: self.is_bfloat(output),
            other_bfloat: self.is_bfloat(up),
            gate: self.input(gate),
            up: self.input(up),
            output: self.output(output),
            count: count as u32,
        };
        self.dispatch(kernel, [(count / 4).div_ceil(THREADS), 1, 1], THREADS);
    }

    pub(super) fn residual_add(
        &mut self,
        residual: ScratchId,
        update: ScratchId,
        output: ScratchId,
    ) {
        let count = self.plan.spec(output).elements();
        let kernel = ResidualAdd {
            input_bfloat: self.is_bfloat(residual),
            output_bfloat: self.is_bfloat(output),
            other_bfloat: self.is_bfloat(update),
            residual: self.input(residual),
            update: self.input(update),
            output: self.output(output),
            count: count as u32,
        };
        self.dispatch(kernel, [(count / 4).div_ceil(THREADS), 1, 1], THREADS);
    }

    pub(super) fn select_last_row(&mut self, input: ScratchId, output: ScratchId) {
        let columns = self.columns(input);
        let kernel = SelectRow {
            columns: columns as u32,
            input_bfloat: self.is_bfloat(input),
            output_bfloat: self.is_bfloat(output),
            input: self.input(input),
            output: self.output(output),
            row: self.rows_of(input) as u32 - 1,
        };
        self.dispatch(kernel, [(columns / 4).div_ceil(THREADS), 1, 1], THREADS);
    }

    pub(super) fn combine(
        &mut self,
        [experts, weights, shared, shared_gate]: [ScratchId; 4],
        residual: Option<ScratchId>,
        output: ScratchId,
    ) {
        let columns = self.columns(output);
        let kernel = Combine {
            columns: columns as u32,
            input_bfloat: self.is_bfloat(experts),
            output_bfloat: self.is_bfloat(output),
            choices: self.columns(weights) as u32,
            shared_bfloat: self.is_bfloat(shared),
            has_residual: residual.is_some(),
            experts: self.input(experts),
            weights: self.input(weights),
            shared_output: self.input(shared),
            shared_gate: self.input(shared_gate),
            residual: residual.map(|id| self.input(id)),
            output: self.output(output),
        };
        let rows = self.rows_of(output);
        self.dispatch(kernel, [(columns / 4).div_ceil(THREADS), rows, 1], THREADS);
    }

    pub(super) fn route(
        &mut self,
        logits: ScratchId,
        ids: ScratchId,
        weights: ScratchId,
    ) -> Result<(), DeviceError> {
        let choices = self.columns(ids);
        if choices > 32 {
            let what = format!("{choices} experts a token");
            return Err(self.unsupported(what, "its kernels choose at most 32"));
        }
        let kernel = Route {
            experts: self.columns(logits) as u32,
            choices: choices as u32,
            logits: self.input(logits),
            ids: self.output(ids),
            weights: self.output(weights),
        };
        self.dispatch(kernel, [self.rows_of(logits), 1, 1], 32);
        Ok(())
    }

    pub(super) fn group_experts(
        &mut self,
        ids: ScratchId,
        grouping: ScratchId,
    ) -> Result<(), DeviceError> {
        let (experts, pairs) = (self.config.experts, self.plan.spec(ids).elements());
        if experts > 256 || pairs > usize::from(u16::MAX) {
            let what = format!("{experts} experts and {pairs} choices of a chunk");
            let reason =
                "its kernels group at most 256 experts and 65,535 choices; take shorter chunks";
            return Err(self.unsupported(what, reason));
        }
        let kernel = GroupExperts {
            experts: experts as u32,
            ids: self.input(ids),
            grouping: self.output(grouping),
            pair_count: pairs as u32,
        };
        self.dispatch(kernel, [1, 1, 1], 1024);
        Ok(())
    }

    pub(super) fn arg_max(&mut self, logits: ScratchId) {
        let rows = self.rows_of(logits);
        let kernel = ArgMax {
            vocabulary: self.columns(logits) as u32,
            logits: self.input(logits),
            sequence: self.is_sequence(),
            table: self.table(),
            tokens: self.next_tokens(),
            chosen: self.chosen(),
        };
        self.dispatch(kernel, [rows, 1, 1], 1024);
    }
}
