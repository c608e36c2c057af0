// Products of rows with the experts that they are routed to, rows of an expert together, for tiles of any type.
// Constants and buffers are those of `project_experts` in experts.metal, which has a norm and an ungrouped form
// besides. The file that includes this chooses the tiles and names the instances.
#pragma once
#include "grouping.h"
#include "tile.h"

constant uint COLUMNS [[function_constant(0)]];
constant uint OUTPUTS [[function_constant(10)]];
constant uint EXPERTS [[function_constant(11)]];
// Pairs that share a row of the input: the choices of a row, or 1 where each pair has a row of its own.
constant uint PAIRS_A_ROW [[function_constant(13)]];
constant uint BITS [[function_constant(14)]];
constant bool HAS_UP [[function_constant(15)]];
constant uint UP_BITS [[function_constant(16)]];
constant bool OUTPUT_BFLOAT [[function_constant(17)]];

// Contract. input [rows, COLUMNS] bfloat, or [pairs, COLUMNS] with PAIRS_A_ROW = 1, COLUMNS a multiple of 64; grouping:
// EXPERTS + 1 offsets and then the pairs, those of an expert together; weight and up [EXPERTS, OUTPUTS, COLUMNS] of 4
// or 8 bits, each weight rounded to bfloat, or both bfloats (16 bits); output [pairs, OUTPUTS] = x · Wᵀ, or silu(x · Wᵀ) · (x · Upᵀ), accumulated
// in float and rounded once to its type. A pair's result does not depend on the others of its expert.
// Threadgroups of Tile::THREADS, one a tile of Tile::ROWS pairs of an expert. Grid: output tiles (of 64, or 32 with
// up); the most row tiles that there can be, pairs / ROWS + min(EXPERTS, pairs), those behind the last leaving at once.
// Outputs come first: most experts have one row tile, and its threadgroups share the gathered rows and stream the
// expert once.
template <class Tile>
[[max_total_threads_per_threadgroup(Tile::THREADS)]] kernel void tile_experts(
    device const uchar* input [[buffer(0)]],
    device const uint* grouping [[buffer(3)]],
    device const uchar* weight [[buffer(4)]],
    device const uchar* up [[buffer(5), function_constant(HAS_UP)]],
    device uchar* output [[buffer(6)]],
    uint2 position [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]])
{
    threadgroup uint4 memory[TileMemory<Tile>::SIZE];
    ExpertTile tile = find_tile(grouping, EXPERTS, Tile::ROWS, position.y, lane);
    if (tile.count == 0) return;
    device const uint* pairs = grouping + EXPERTS + 1 + tile.first;
    uint first = position.x * (HAS_UP ? TILE_OUTPUTS / 2 : TILE_OUTPUTS);

    TileWeights weights;
    weights.matrix = weights_at(weight, tile.expert, OUTPUTS, COLUMNS, BITS);
    weights.up = weights_at(HAS_UP ? up : weight, tile.expert, OUTPUTS, COLUMNS, UP_BITS);
    weights.bits = BITS, weights.up_bits = UP_BITS, weights.gated = HAS_UP;
    weights.first = first, weights.outputs = OUTPUTS, weights.columns = COLUMNS;
    auto runs = weights_of(Tile(), weights, thread_index);
    InputPieces<Tile> pieces;
#pragma unroll
    for (uint i = 0; i < InputPieces<Tile>::COUNT; ++i) {
        uint2 place = Tile::input_place(i * Tile::THREADS + thread_index);
        bool inside = place.x < tile.count;
        ulong row = inside ? pairs[place.x] / PAIRS_A_ROW : 0;
        place_input<Tile>(pieces, i, input + row * COLUMNS * 2, place.y, inside);
    }
    multiply_rows(Tile(), memory, pieces, runs, BITS == 16, COLUMNS, thread_index, simdgroup);

    uint quads = HAS_UP ? TILE_OUTPUTS / 8 : TILE_OUTPUTS / 4;
    for (uint at = thread_index; at < Tile::ROWS * quads; at += Tile::THREADS) {
        uint2 place = Tile::result_place(at, quads);
        uint column = first + place.y * 4;
        if (place.x >= tile.count || column >= OUTPUTS) continue;
        float4 value = result4<Tile>(memory, place.x, place.y, HAS_UP);
        ulong to = (ulong)pairs[place.x] * OUTPUTS + column;
        if (OUTPUTS % 4 == 0) {
            store4(output, to, value, OUTPUT_BFLOAT);
        } else {
            for (uint i = 0; i < 4; ++i) {
                if (column + i < OUTPUTS) store1(output, to + i, value[i], OUTPUT_BFLOAT);
            }
        }
    }
}
