//! Attention: kernels/prepare.metal and kernels/attention.metal.

use super::{Recorder, instance};
use crate::gpu::MatrixUnits;
use crate::kernels::{
    Attend, CacheWrite, HeadNorm, MergeBlocks, OutputGate, QueryKeyPrepare, RotateHeads, TileAttend,
};
use crate::route;
use lily_checkpoint::WeightId;
use lily_plan::{Operation, ScratchId};

/// Queries of a threadgroup of kernels/tile_attention.metal.
const TILE_QUERIES: usize = 32;
/// Simdgroups of a threadgroup of kernels/prepare.metal, a head each.
const HEADS_TOGETHER: usize = 4;

impl Recorder<'_> {
    pub(super) fn query_key_prepare(&mut self, operation: &Operation) {
        let Operation::QueryKeyPrepare {
            layer,
            query_gate,
            keys,
            values,
            query_norm,
            key_norm,
            queries,
        } = *operation
        else {
            unreachable!("called for this operation")
        };
        let config = self.config;
        // One type for both inputs of the norm, as plans have it.
        debug_assert_eq!(self.is_bfloat(query_gate), self.is_bfloat(keys));
        let kernel = QueryKeyPrepare {
            query_heads: config.attention_heads as u32,
            key_value_heads: config.key_value_heads as u32,
            width: config.head_dim as u32,
            cache_bfloat: self.is_bfloat_plan(),
            input_bfloat: self.is_bfloat(query_gate),
            output_bfloat: self.is_bfloat(queries),
            epsilon: self.epsilon(),
            rotary: config.rotary_dim as u32,
            values_bfloat: self.is_bfloat(values),
            sequence: self.is_sequence(),
            sessions: self.sessions(),
            query_gate: self.input(query_gate),
            keys: self.input(keys),
            values: self.input(values),
            query_norm: self.weight(query_norm),
            key_norm: self.weight(key_norm),
            frequencies: self.frequencies(),
            queries: self.output(queries),
            layer: self.layout.attention(layer),
        };
        let heads = config.attention_heads + config.key_value_heads;
        let grid = [heads.div_ceil(HEADS_TOGETHER), self.rows(), 1];
        self.dispatch_on_sessions(kernel, grid, HEADS_TOGETHER * 32);
    }

    pub(super) fn head_norm(&mut self, input: ScratchId, weight: WeightId, output: ScratchId) {
        let width = self.config.head_dim;
        let heads = self.columns(output) / width;
        let count = heads * self.rows_of(output);
        let kernel = HeadNorm {
            width: width as u32,
            input_bfloat: self.is_bfloat(input),
            output_bfloat: self.is_bfloat(output),
            epsilon: self.epsilon(),
            stride: (self.columns(input) / heads) as u32,
            input: self.input(input),
            weight: self.weight(weight),
            output: self.output(output),
            head_count: count as u32,
        };
        self.dispatch(
            kernel,
            [count.div_ceil(HEADS_TOGETHER), 1, 1],
            HEADS_TOGETHER * 32,
        );
    }

    pub(super) fn rotate(&mut self, input: ScratchId, output: ScratchId) {
        let width = self.config.head_dim;
        let heads = self.columns(output) / width;
        let count = heads * self.rows_of(output);
        let kernel = RotateHeads {
            width: width as u32,
            input_bfloat: self.is_bfloat(input),
            output_bfloat: self.is_bfloat(output),
            rotary: self.config.rotary_dim as u32,
            heads: heads as u32,
            sequence: self.is_sequence(),
            sessions: self.sessions(),
            input: self.input(input),
            frequencies: self.frequencies(),
            output: self.output(output),
            head_count: count as u32,
        };
        self.dispatch(
            kernel,
            [count.div_ceil(HEADS_TOGETHER), 1, 1],
            HEADS_TOGETHER * 32,
        );
    }

    pub(super) fn cache_write(&mut self, layer: u16, keys: ScratchId, values: ScratchId) {
        let config = self.config;
        let kernel = CacheWrite {
            key_value_heads: config.key_value_heads as u32,
            width: config.head_dim as u32,
            cache_bfloat: self.is_bfloat_plan(),
            input_bfloat: self.is_bfloat(keys),
            values_bfloat: self.is_bfloat(values),
            sequence: self.is_sequence(),
            sessions: self.sessions(),
            keys: self.input(keys),
            values: self.input(values),
            layer: self.layout.attention(layer),
        };
        let grid = [config.key_value_width().div_ceil(256), self.rows(), 1];
        self.dispatch_on_sessions(kernel, grid, 256);
    }

    pub(super) fn attention(&mut self, layer: u16, queries: ScratchId, output: ScratchId) {
        if !(self.is_sequence() && self.is_bfloat(queries) && self.is_bfloat(output)) {
            return self.attend(layer, queries, output, None);
        }
        let config = self.config;
        let weights = match self.units() {
            MatrixUnits::SixteenBitMatrices => "split",
            // Tensor operations have no form of this kernel; such GPUs have simdgroup matrices too.
            MatrixUnits::SimdgroupMatrices
            | MatrixUnits::TensorOperations
            | MatrixUnits::PackedTensorOperations => "float",
        };
        let rows = self.rows();
        let kernel = TileAttend {
            kernel: instance(TileAttend::NAMES, &format!("tile_attend_{weights}")),
            query_heads: config.attention_heads as u32,
            key_value_heads: config.key_value_heads as u32,
            width: config.head_dim as u32,
            cache_bfloat: true,
            sessions: self.sessions(),
            queries: self.input(queries),
            output: self.output(output),
            layer: self.layout.attention(layer),
            row_count: rows as u32,
            first_tile: 0,
        };
        let group = config.attention_heads / config.key_value_heads;
        let grid = [
            (rows * group).div_ceil(TILE_QUERIES),
            config.key_value_heads,
            1,
        ];
        self.dispatch_on_sessions(kernel, grid, 128);
        self.divisible(0, TileAttend::FIRST_TILE_INDEX);
    }

    pub(super) fn attention_partial(
        &mut self,
        layer: u16,
        queries: ScratchId,
        block_length: usize,
        output: ScratchId,
    ) {
        self.attend(layer, queries, output, Some(block_length));
    }

    fn attend(&mut self, layer: u16, queries: ScratchId, output: ScratchId, block: Option<usize>) {
        let config = self.config;
        let group = config.attention_heads / config.key_value_heads;
        let heads = route::packed_heads(group, self.switches.packed_heads);
        let blocks = block.map_or(1, |length| self.plan.attention_blocks(length));
        let kernel = Attend {
            kernel: instance(Attend::NAMES, &format!("attend_{heads}")),
            query_heads: config.attention_heads as u32,
            key_value_heads: config.key_value_heads as u32,
            width: config.head_dim as u32,
            cache_bfloat: self.is_bfloat_plan(),
            input_bfloat: self.is_bfloat(queries),
            output_bfloat: self.is_bfloat(output),
            // Longer than any context, and its end still a number.
            block: block.unwrap_or(1 << 30) as u32,
            blocks: blocks as u32,
            whole: block.is_none(),
            coalesced: self.switches.coalesced_cache,
            sequence: self.is_sequence(),
            sessions: self.sessions(),
            queries: self.input(queries),
            output: self.output(output),
            layer: self.layout.attention(layer),
            first_row: 0,
        };
        let packs = config.key_value_heads * (group / heads);
        self.dispatch_on_sessions(kernel, [blocks, packs, self.rows()], 256);
        self.divisible(2, Attend::FIRST_ROW_INDEX);
    }

    pub(super) fn merge_blocks(
        &mut self,
        partials: ScratchId,
        block_length: usize,
        query_gate: Option<ScratchId>,
        output: ScratchId,
    ) {
        let config = self.config;
        let kernel = MergeBlocks {
            query_heads: config.attention_heads as u32,
            width: config.head_dim as u32,
            output_bfloat: self.is_bfloat(output),
            block: block_length as u32,
            blocks: self.plan.attention_blocks(block_length) as u32,
            gate_bfloat: query_gate.is_some_and(|id| self.is_bfloat(id)),
            gated: query_gate.is_some(),
            sequence: self.is_sequence(),
            sessions: self.sessions(),
            partials: self.input(partials),
            query_gate: query_gate.map(|id| self.input(id)),
            output: self.output(output),
        };
        let grid = [config.attention_heads, self.rows(), 1];
        self.dispatch(kernel, grid, config.head_dim);
    }

    pub(super) fn output_gate(
        &mut self,
        input: ScratchId,
        query_gate: ScratchId,
        output: ScratchId,
    ) {
        let config = self.config;
        let kernel = OutputGate {
            query_heads: config.attention_heads as u32,
            width: config.head_dim as u32,
            input_bfloat: self.is_bfloat(input),
            output_bfloat: self.is_bfloat(output),
            gate_bfloat: self.is_bfloat(query_gate),
            input: self.input(input),
            query_gate: self.input(query_gate),
            output: self.output(output),
        };
        let grid = [config.attention_heads, self.rows_of(output), 1];
        self.dispatch(kernel, grid, config.head_dim);
    }
}
