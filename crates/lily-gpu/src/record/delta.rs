//! Gated DeltaNet: kernels/delta.metal and kernels/delta_chunk.metal.

use super::Recorder;
use crate::kernels::{Convolve, DeltaChunk, DeltaPrepare, DeltaScan, DeltaStep, GatedNorm};
use crate::route;
use lily_checkpoint::WeightId;
use lily_plan::{Operation, ScratchId};

impl Recorder<'_> {
    pub(super) fn convolve(
        &mut self,
        layer: u16,
        input: ScratchId,
        taps: WeightId,
        output: ScratchId,
    ) {
        let config = self.config;
        let (history, _) = self.layout.delta(layer);
        let rows = self.rows();
        let kernel = Convolve {
            key_heads: config.linear_key_heads as u32,
            value_heads: config.linear_value_heads as u32,
            key_width: config.linear_key_dim as u32,
            value_width: config.linear_value_dim as u32,
            taps: config.conv_kernel as u32,
            input_bfloat: self.is_bfloat(input),
            output_bfloat: self.is_bfloat(output),
            history_bfloat: self.is_bfloat_plan(),
            sequence: self.is_sequence(),
            sessions: self.sessions(),
            input: self.input(input),
            tap_weights: self.weight(taps),
            output: self.output(output),
            history,
            row_count: rows as u32,
        };
        let grid = [config.conv_channels().div_ceil(256), rows, 1];
        self.dispatch_on_sessions(kernel, grid, 256);
    }

    pub(super) fn delta_prepare(&mut self, operation: &Operation) {
        let Operation::DeltaPrepare {
            convolved,
            a,
            b,
            a_log,
            dt_bias,
            query_key,
            decay,
            strength,
        } = *operation
        else {
            unreachable!("called for this operation")
        };
        let config = self.config;
        let kernel = DeltaPrepare {
            key_heads: config.linear_key_heads as u32,
            value_heads: config.linear_value_heads as u32,
            key_width: config.linear_key_dim as u32,
            value_width: config.linear_value_dim as u32,
            input_bfloat: self.is_bfloat(convolved),
            output_bfloat: self.is_bfloat(query_key),
            convolved: self.input(convolved),
            a: self.input(a),
            b: self.input(b),
            a_log: self.weight(a_log),
            dt_bias: self.weight(dt_bias),
            query_key: self.output(query_key),
            decay: self.output(decay),
            strength: self.output(strength),
        };
        let grid = [(2 * config.linear_key_heads).div_ceil(8), self.rows(), 1];
        self.dispatch(kernel, grid, 256);
    }

    pub(super) fn delta_scan(
        &mut self,
        layer: u16,
        [query_key, convolved, decay, strength]: [ScratchId; 4],
        output: ScratchId,
    ) {
        let config = self.config;
        let (_, states) = self.layout.delta(layer);
        let rows = self.rows();
        // Rows of the state of a threadgroup, in either form.
        let parts = config.linear_value_dim.div_ceil(32);
        let widths = [config.linear_key_dim, config.linear_value_dim];
        if self.is_sequence() && self.switches.chunked_scan && route::scans_by_chunks(rows, widths)
        {
            let kernel = DeltaChunk {
                key_heads: config.linear_key_heads as u32,
                value_heads: config.linear_value_heads as u32,
                key_width: config.linear_key_dim as u32,
                value_width: config.linear_value_dim as u32,
                input_bfloat: self.is_bfloat(convolved),
                output_bfloat: self.is_bfloat(output),
                sessions: self.sessions(),
                query_key: self.input(query_key),
                convolved: self.input(convolved),
                decay: self.input(decay),
                strength: self.input(strength),
                output: self.output(output),
                states,
                row_count: rows as u32,
            };
            return self.dispatch_on_sessions(kernel, [parts, config.linear_value_heads, 1], 128);
        }
        let kernel = DeltaScan {
            key_heads: config.linear_key_heads as u32,
            value_heads: config.linear_value_heads as u32,
            key_width: config.linear_key_dim as u32,
            value_width: config.linear_value_dim as u32,
            input_bfloat: self.is_bfloat(convolved),
            output_bfloat: self.is_bfloat(output),
            blockwise: self.switches.blockwise_scan,
            sequence: self.is_sequence(),
            sessions: self.sessions(),
            query_key: self.input(query_key),
            convolved: self.input(convolved),
            decay: self.input(decay),
            strength: self.input(strength),
            output: self.output(output),
            states,
            row_count: rows as u32,
        };
        let sessions = if self.is_sequence() { 1 } else { rows };
        self.dispatch_on_sessions(kernel, [parts, config.linear_value_heads, sessions], 128);
    }

    pub(super) fn gated_norm(
        &mut self,
        input: ScratchId,
        gate: ScratchId,
        weight: WeightId,
        output: ScratchId,
    ) {
        let heads = self.rows() * self.config.linear_value_heads;
        let kernel = GatedNorm {
            value_width: self.config.linear_value_dim as u32,
            epsilon: self.epsilon(),
            input_bfloat: self.is_bfloat(input),
            gate_bfloat: self.is_bfloat(gate),
            output_bfloat: self.is_bfloat(output),
            input: self.input(input),
            gate: self.input(gate),
            weight: self.weight(weight),
            output: self.output(output),
            head_count: heads as u32,
        };
        self.dispatch(kernel, [heads.div_ceil(8), 1, 1], 256);
    }

    pub(super) fn delta_step(&mut self, operation: &Operation) {
        let Operation::DeltaStep {
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
        } = *operation
        else {
            unreachable!("called for this operation")
        };
        let config = self.config;
        let (history, states) = self.layout.delta(layer);
        let kernel = DeltaStep {
            key_heads: config.linear_key_heads as u32,
            value_heads: config.linear_value_heads as u32,
            key_width: config.linear_key_dim as u32,
            value_width: config.linear_value_dim as u32,
            taps: config.conv_kernel as u32,
            epsilon: self.epsilon(),
            input_bfloat: self.is_bfloat(input),
            gate_bfloat: self.is_bfloat(gate),
            output_bfloat: self.is_bfloat(output),
            history_bfloat: self.is_bfloat_plan(),
            sessions: self.sessions(),
            input: self.input(input),
            gate: self.input(gate),
            a: self.input(a),
            b: self.input(b),
            tap_weights: self.weight(taps),
            a_log: self.weight(a_log),
            dt_bias: self.weight(dt_bias),
            norm: self.weight(norm),
            output: self.output(output),
            history,
            states,
        };
        let grid = [config.linear_value_heads, self.rows(), 1];
        self.dispatch_on_sessions(kernel, grid, 1024);
    }
}
