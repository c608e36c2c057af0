// Matrix-vector products with dense weights: decode at every precision, and whole prompts in f32. vector.h says how
// the work is shaped. One kernel computes up to four outputs from one input; one of them may be a gated pair.
#include "vector.h"

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

// The weights of all outputs, one behind the other in blocks of four rows.
struct Weights {
    device const uchar* of_0;
    device const uchar* of_1;
    device const uchar* of_2;
    device const uchar* of_3;
    device const uchar* up;
};

// A block with the output it belongs to.
struct Place {
    Block block;
    uint segment;
    uint outputs;
};

inline Place place_block(Weights weights, uint at) {
    uint end_0 = (OUTPUTS_0 + 3) / 4;
    uint end_1 = end_0 + (OUTPUTS_1 + 3) / 4;
    uint end_2 = end_1 + (OUTPUTS_2 + 3) / 4;
    uint end_3 = end_2 + (OUTPUTS_3 + 3) / 4;
    Place place;
    place.segment = 0;
    place.outputs = OUTPUTS_0;
    place.block.bits = BITS_0;
    place.block.active = at < end_3;
    device const uchar* weight = weights.of_0;
    uint start = 0;
    if (HAS_3 && at >= end_2) {
        place.segment = 3, place.outputs = OUTPUTS_3, place.block.bits = BITS_3, start = end_2;
        weight = weights.of_3;
    } else if (HAS_2 && at >= end_1) {
        place.segment = 2, place.outputs = OUTPUTS_2, place.block.bits = BITS_2, start = end_1;
        weight = weights.of_2;
    } else if (HAS_1 && at >= end_0) {
        place.segment = 1, place.outputs = OUTPUTS_1, place.block.bits = BITS_1, start = end_0;
        weight = weights.of_1;
    }
    place.block.block = at - start;
    place.block.matrix = matrix_at(weight, 0, place.outputs, COLUMNS, place.block.bits);
    place.block.gated = HAS_UP && place.segment == GATED && place.block.active;
    place.block.other = matrix_at(HAS_UP ? weights.up : weight, 0, place.outputs, COLUMNS, UP_BITS);
    place.block.other_bits = UP_BITS;
    return place;
}

// Where results go, and what is added to the first.
struct Outputs {
    device uchar* of_0;
    device uchar* of_1;
    device uchar* of_2;
    device uchar* of_3;
    device const float* residual;
};

// Writes row r of a block for activation row `row`.
inline void store(Outputs outputs, Place place, uint row, uint r, float value, float other) {
    uint column = place.block.block * 4 + r;
    if (column >= place.outputs) return;
    if (HAS_UP && place.block.gated) value = silu(value) * other;
    ulong to = (ulong)row * place.outputs + column;
    if (HAS_RESIDUAL && place.segment == 0) value += outputs.residual[to];
    if (place.segment == 0) store1(outputs.of_0, to, value, BFLOAT_0);
    if (HAS_1 && place.segment == 1) store1(outputs.of_1, to, value, BFLOAT_1);
    if (HAS_2 && place.segment == 2) store1(outputs.of_2, to, value, BFLOAT_2);
    if (HAS_3 && place.segment == 3) store1(outputs.of_3, to, value, BFLOAT_3);
}

// Contract. input [rows, COLUMNS]; norm [COLUMNS]; weight_i [OUTPUTS_i, COLUMNS]; output_i [rows, OUTPUTS_i],
// rounded once to its type; residual [rows, OUTPUTS_0] f32, added to output 0 before rounding.
// Grid: all blocks of four rows / (SIMDGROUPS / SPLIT · ROUNDS), rows / M.
template <int M>
kernel void project(
    device const uchar* input [[buffer(0)]],
    device const float* norm [[buffer(1), function_constant(HAS_NORM)]],
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
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]])
{
    threadgroup float4 stage[Stage<M>::SIZE];
    threadgroup float4 sums[Stage<M>::RESULTS];
    threadgroup float4 ups[Stage<M>::RESULTS];
    threadgroup float partial[MOST_SIMDGROUPS * M];
    threadgroup uint rows[M];
    uint count = min(uint(M), row_count - position.y * M);
    if (thread_index < count) rows[thread_index] = position.y * M + thread_index;
    Outputs outputs = {output_0, output_1, output_2, output_3, residual};
    Weights weights = {weight_0, weight_1, weight_2, weight_3, up};
    uint base = position.x * BLOCKS_A_ROUND * ROUNDS;
    Place place = place_block(weights, base + simdgroup / SPLIT);
    Factors<M> squares;
    for (int m = 0; m < M; ++m) squares.of[m] = 0.0f;
    Results<M> results = {sums, ups};

    if (M == 1) {
        LaneCodes codes = load_codes(place.block, (simdgroup % SPLIT * 32 + lane) * LANE_COLUMNS, 0);
        for (uint first = 0; first < COLUMNS; first += Stage<1>::CHUNKS * CHUNK) {
            threadgroup_barrier(mem_flags::mem_threadgroup);
            for (uint chunk = 0; chunk < uint(Stage<1>::CHUNKS); ++chunk) {
                if (first + chunk * CHUNK >= COLUMNS) break;
                stage_chunk<M>(stage + chunk * Stage<M>::CHUNK_SIZE, squares, input, norm, rows, count,
                               first + chunk * CHUNK, 0, thread_index);
            }
            threadgroup_barrier(mem_flags::mem_threadgroup);
            if (SPLIT > 1 && place.block.active) {
                multiply_split({sums, ups}, place.block, codes, stage, first, simdgroup, lane);
            }
        }
        if (HAS_NORM) finish_norm<M>(squares, partial, simdgroup, lane);
        if (SPLIT == 1) {
            for (uint round = 0; round < ROUNDS; ++round) {
                Place following = place_block(weights, base + (round + 1) * SIMDGROUPS + simdgroup);
                if (round + 1 == ROUNDS) following.block.active = following.block.gated = false;
                Sums<1> own, others;
                clear(own);
                clear(others);
                multiply_alone(own, others, codes, place.block, following.block, stage, lane);
                float4 values = sum_lanes(own.of[0]), other_values = float4(0.0f);
                if (HAS_UP && place.block.gated) other_values = sum_lanes(others.of[0]);
                if (HAS_NORM) values *= squares.of[0], other_values *= squares.of[0];
                if (place.block.active && lane < 4) {
                    store(outputs, place, rows[0], lane, values[lane], other_values[lane]);
                }
                place = following;
            }
            return;
        }
    } else {
        multiply_together<M>(results, squares, place.block, HAS_UP, stage, input, norm, rows, count, thread_index,
                             simdgroup, lane);
        if (HAS_NORM) finish_norm<M>(squares, partial, simdgroup, lane);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    // A thread for each output: row r of a block with activation row m.
    for (uint at = thread_index; at < BLOCKS_A_ROUND * M * 4; at += SIMDGROUPS * 32) {
        uint local = at / (M * 4), m = at / 4 % M, r = at % 4;
        Place mine = place_block(weights, base + local);
        if (!mine.block.active || m >= count) continue;
        float value = finished<M>(results.first, squares, local, m, r), other = 0.0f;
        if (HAS_UP && mine.block.gated) other = finished<M>(results.other, squares, local, m, r);
        store(outputs, mine, rows[m], r, value, other);
    }
}
template [[host_name("project_1")]] kernel decltype(project<1>) project<1>;
template [[host_name("project_2")]] kernel decltype(project<2>) project<2>;
template [[host_name("project_4")]] kernel decltype(project<4>) project<4>;
template [[host_name("project_8")]] kernel decltype(project<8>) project<8>;
