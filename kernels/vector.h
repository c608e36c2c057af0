// What the kernels of matrix-vector products share: activations in threadgroup memory, norms, sums.
//
// A simdgroup takes four weight rows, its lanes side by side in 16-byte loads, and M activation rows; so rows that
// share weights read them once. Activations are put into threadgroup memory a chunk of 1,024 columns at a
// time, laid out so that the lanes' loads meet no bank conflict; a norm costs one product there, and its
// root-mean-square is applied to the finished sums. Products are accumulated in float, within a lane over its 32
// columns, then over chunks, then over lanes in the order of `sum_lanes`: a row's result does not depend on
// the rows computed with it.
//
// Threadgroups: SIMDGROUPS · 32 threads, SIMDGROUPS blocks of four weight rows.
#pragma once
#include "quantised.h"

constant uint COLUMNS [[function_constant(0)]];
constant bool INPUT_BFLOAT [[function_constant(1)]];
constant bool HAS_NORM [[function_constant(2)]];
constant float EPSILON [[function_constant(3)]];
constant uint SIMDGROUPS [[function_constant(4)]];

// A number for each of M rows.
template <int M> struct Factors {
    float of[M];
};

// Chunks that stand in threadgroup memory at once: as many as 16 KB hold.
template <int M> struct Stage {
    static constexpr constant int CHUNKS = M == 1 ? 4 : M == 2 ? 2 : 1;
    static constexpr constant int CHUNK_SIZE = M * Staged<M>::VECTORS * 32;
    static constexpr constant int SIZE = CHUNKS * CHUNK_SIZE;
};

// Puts vectors `from` to `from + Staged<M>::VECTORS` of each lane's columns of a chunk of M rows into threadgroup
// memory and adds their squares. `rows[m]` is the row of `input` that activation row m is; those from `count`
// on are zero.
template <int M>
inline void stage_chunk(
    threadgroup float4* stage, thread Factors<M>& squares, device const uchar* input,
    device const float* norm, threadgroup const uint* rows, uint count, uint first, uint from, uint thread_index)
{
    constexpr uint VECTORS = Staged<M>::VECTORS;
    for (int m = 0; m < M; ++m) {
        for (uint at = thread_index; at < VECTORS * 32; at += SIMDGROUPS * 32) {
            uint column = first + at / VECTORS * LANE_COLUMNS + (from + at % VECTORS) * 4;
            float4 x = float4(0.0f);
            if (uint(m) < count && column < COLUMNS) {
                x = load4(input, (ulong)rows[m] * COLUMNS + column, INPUT_BFLOAT);
                if (HAS_NORM) {
                    squares.of[m] += dot(x, x);
                    x *= *(device const float4*)(norm + column);
                }
            }
            stage[(m * VECTORS + at % VECTORS) * 32 + at / VECTORS] = shrink(x);
        }
    }
}

// Rows 4·block to 4·block+3 of a matrix with codes of `bits` bits.
struct Rows {
    Matrix matrix;
    uint block;
    uint bits;
};

// The products of M rows with four rows of one matrix, and where `gated` of a second; sums are not yet reduced over
// lanes. For few rows, a block's first codes are asked for before the activations are staged, and each further one
// before the one in hand is multiplied, so that memory is never waited for twice; many rows hide its latency with
// their own work, and need the registers.
template <int M>
inline void multiply_rows(
    thread Sums<M>& sums, thread Sums<M>& others, thread Factors<M>& squares, Rows rows, Rows other, bool active,
    bool gated, threadgroup float4* stage, device const uchar* input, device const float* norm,
    threadgroup const uint* inputs, uint count, uint thread_index, uint lane)
{
    constexpr uint VECTORS = Staged<M>::VECTORS;
    constexpr bool AHEAD = M <= 2;
    uint column = lane * LANE_COLUMNS;
    BlockCodes codes, other_codes;
    if (AHEAD && active) codes = load_block(rows.matrix, rows.block, COLUMNS, rows.bits, column, 0);
    if (AHEAD && active && gated) {
        other_codes = load_block(other.matrix, other.block, COLUMNS, other.bits, column, 0);
    }
    for (uint first = 0; first < COLUMNS; first += Stage<M>::CHUNKS * CHUNK) {
        for (uint from = 0; from < 8; from += VECTORS) {
            threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
            for (uint chunk = 0; chunk < Stage<M>::CHUNKS; ++chunk) {
                if (first + chunk * CHUNK >= COLUMNS) break;
                stage_chunk<M>(stage + chunk * Stage<M>::CHUNK_SIZE, squares, input, norm, inputs, count,
                               first + chunk * CHUNK, from, thread_index);
            }
            threadgroup_barrier(mem_flags::mem_threadgroup);
            if (!active) continue;
#pragma unroll
            for (uint chunk = 0; chunk < Stage<M>::CHUNKS; ++chunk) {
                uint now = first + chunk * CHUNK + column;
                if (first + chunk * CHUNK >= COLUMNS) break;
                BlockCodes present, other_present;
                if (AHEAD) {
                    present = codes;
                    other_present = other_codes;
                    codes = load_block(rows.matrix, rows.block, COLUMNS, rows.bits, now + CHUNK, 0);
                    if (gated) {
                        other_codes = load_block(other.matrix, other.block, COLUMNS, other.bits, now + CHUNK, 0);
                    }
                } else {
                    // Of 4-bit codes, both halves come with one load; the second time it is answered by a cache.
                    uint part = VECTORS == 4 && rows.bits == 8 ? from / 4 : 0;
                    present = load_block(rows.matrix, rows.block, COLUMNS, rows.bits, now, part);
                }
                threadgroup const float4* staged = stage + chunk * Stage<M>::CHUNK_SIZE + lane;
                multiply_chunk<M>(sums, present, rows.matrix, rows.block, COLUMNS, rows.bits, now, from, staged);
                if (gated) {
                    if (!AHEAD) {
                        uint part = VECTORS == 4 && other.bits == 8 ? from / 4 : 0;
                        other_present = load_block(other.matrix, other.block, COLUMNS, other.bits, now, part);
                    }
                    multiply_chunk<M>(others, other_present, other.matrix, other.block, COLUMNS, other.bits, now, from,
                                      staged);
                }
            }
        }
    }
}

// The factor that a norm multiplies each sum of row m with: 1 without a norm.
template <int M>
inline void finish_norm(
    thread Factors<M>& squares, threadgroup float* partial, uint simdgroup, uint lane)
{
    for (int m = 0; m < M; ++m) {
        float sum = sum_lanes(squares.of[m]);
        if (lane == 0) partial[simdgroup * M + m] = sum;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int m = 0; m < M; ++m) {
        float sum = 0.0f;
        for (uint s = 0; s < SIMDGROUPS; ++s) sum += partial[s * M + m];
        squares.of[m] = precise::rsqrt(sum / float(COLUMNS) + EPSILON);
    }
}

template <int M>
inline void reduce(thread Sums<M>& sums, thread Factors<M>& factors) {
    for (int m = 0; m < M; ++m) {
        sums.of[m] = sum_lanes(sums.of[m]);
        if (HAS_NORM) sums.of[m] *= factors.of[m];
    }
}
