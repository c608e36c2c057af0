// Dense products of many rows, for tiles of any type. One kernel computes up to four outputs from one input; one of
// them may be a gated pair. Constants and buffers are those of `project` in vector.metal, which has a norm besides. The
// file that includes this chooses the tiles and names the instances.
#pragma once
#include "tile.h"

constant uint COLUMNS [[function_constant(0)]];
constant uint OUTPUTS_0 [[function_constant(10)]];
constant uint OUTPUTS_1 [[function_constant(11)]];
constant uint OUTPUTS_2 [[function_constant(12)]];
constant uint OUTPUTS_3 [[function_constant(13)]];
constant uint BITS_0 [[function_constant(14)]];
constant uint BITS_1 [[function_constant(15)]];
constant uint BITS_2 [[function_constant(16)]];
constant uint BITS_3 [[function_constant(17)]];
constant bool BFLOAT_0 [[function_constant(18)]];
constant bool BFLOAT_1 [[function_constant(19)]];
constant bool BFLOAT_2 [[function_constant(20)]];
constant bool BFLOAT_3 [[function_constant(21)]];
// Which output is silu(gate) · up, `up` being a matrix of the same shape; 4 if none is.
constant uint GATED [[function_constant(22)]];
constant uint UP_BITS [[function_constant(23)]];
constant bool HAS_RESIDUAL [[function_constant(24)]];
constant bool HAS_1 = OUTPUTS_1 > 0;
constant bool HAS_2 = OUTPUTS_2 > 0;
constant bool HAS_3 = OUTPUTS_3 > 0;
constant bool HAS_UP = GATED < 4;

// Tiles of an output: 64 outputs each, or 32 of gate and up.
inline uint output_tiles(uint outputs, bool gated) {
    uint width = gated ? TILE_OUTPUTS / 2 : TILE_OUTPUTS;
    return (outputs + width - 1) / width;
}

// Contract. input [rows, COLUMNS] bfloat, COLUMNS a multiple of 64; weight_i and up [OUTPUTS_i, COLUMNS] of 4 or 8
// bits, each weight rounded to bfloat, or all of them bfloats (16 bits); output_i [rows, OUTPUTS_i] = x · Wᵀ, or silu(x · Wᵀ) · (x · Upᵀ), accumulated in
// float and rounded once to its type; residual [rows, OUTPUTS_0] f32, added to output 0 before rounding.
// Threadgroups of Tile::THREADS, one a tile of Tile::ROWS rows. Grid: row tiles, output tiles of all outputs: the row
// tiles that share weights run together, and read them from memory once.
template <class Tile>
[[max_total_threads_per_threadgroup(Tile::THREADS)]] kernel void tile_project(
    device const uchar* input [[buffer(0)]],
    device const uchar* weight_0 [[buffer(2)]],
    device const uchar* weight_1 [[buffer(3), function_constant(HAS_1)]],
    device const uchar* weight_2 [[buffer(4), function_constant(HAS_2)]],
    device const uchar* weight_3 [[buffer(5), function_constant(HAS_3)]],
    device const uchar* up [[buffer(6), function_constant(HAS_UP)]],
    device const float* residual [[buffer(7), function_constant(HAS_RESIDUAL)]],
    device uchar* output_0 [[buffer(8)]],
    device uchar* output_1 [[buffer(9), function_constant(HAS_1)]],
    device uchar* output_2 [[buffer(10), function_constant(HAS_2)]],
    device uchar* output_3 [[buffer(11), function_constant(HAS_3)]],
    constant uint& row_count [[buffer(12)]],
    uint2 position [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]])
{
    threadgroup uint4 memory[TileMemory<Tile>::SIZE];
    uint first_row = position.x * Tile::ROWS, count = min(uint(Tile::ROWS), row_count - first_row);

    uint tile = position.y, segment = 0, outputs = OUTPUTS_0, bits = BITS_0;
    uint end_0 = output_tiles(OUTPUTS_0, GATED == 0);
    uint end_1 = end_0 + output_tiles(OUTPUTS_1, GATED == 1);
    uint end_2 = end_1 + output_tiles(OUTPUTS_2, GATED == 2);
    bool is_bfloat = BFLOAT_0;
    device const uchar* weight = weight_0;
    device uchar* output = output_0;
    if (HAS_3 && tile >= end_2) {
        segment = 3, outputs = OUTPUTS_3, bits = BITS_3, is_bfloat = BFLOAT_3, tile -= end_2;
        weight = weight_3;
        output = output_3;
    } else if (HAS_2 && tile >= end_1) {
        segment = 2, outputs = OUTPUTS_2, bits = BITS_2, is_bfloat = BFLOAT_2, tile -= end_1;
        weight = weight_2;
        output = output_2;
    } else if (HAS_1 && tile >= end_0) {
        segment = 1, outputs = OUTPUTS_1, bits = BITS_1, is_bfloat = BFLOAT_1, tile -= end_0;
        weight = weight_1;
        output = output_1;
    }
    bool gated = HAS_UP && segment == GATED;
    uint first = tile * (gated ? TILE_OUTPUTS / 2 : TILE_OUTPUTS);

    TileWeights weights;
    weights.matrix = weights_at(weight, 0, outputs, COLUMNS, bits);
    weights.up = weights_at(HAS_UP ? up : weight, 0, outputs, COLUMNS, UP_BITS);
    weights.bits = bits, weights.up_bits = UP_BITS, weights.gated = gated;
    weights.first = first, weights.outputs = outputs, weights.columns = COLUMNS;
    auto runs = weights_of(Tile(), weights, thread_index);
    InputPieces<Tile> pieces;
#pragma unroll
    for (uint i = 0; i < InputPieces<Tile>::COUNT; ++i) {
        uint2 place = Tile::input_place(i * Tile::THREADS + thread_index);
        bool inside = place.x < count;
        ulong row = inside ? first_row + place.x : 0;
        place_input<Tile>(pieces, i, input + row * COLUMNS * 2, place.y, inside);
    }
    multiply_rows(Tile(), memory, pieces, runs, BITS_0 == 16, COLUMNS, thread_index, simdgroup);

    uint quads = gated ? TILE_OUTPUTS / 8 : TILE_OUTPUTS / 4;
    for (uint at = thread_index; at < Tile::ROWS * quads; at += Tile::THREADS) {
        uint2 place = Tile::result_place(at, quads);
        uint column = first + place.y * 4;
        if (place.x >= count || column >= outputs) continue;
        float4 value = result4<Tile>(memory, place.x, place.y, gated);
        ulong to = (ulong)(first_row + place.x) * outputs + column;
        bool adds = HAS_RESIDUAL && segment == 0;
        if (outputs % 4 == 0) {
            if (adds) value += *(device const float4*)(residual + to);
            store4(output, to, value, is_bfloat);
        } else {
            for (uint i = 0; i < 4; ++i) {
                if (column + i >= outputs) break;
                float one = adds ? value[i] + residual[to + i] : value[i];
                store1(output, to + i, one, is_bfloat);
            }
        }
    }
}
