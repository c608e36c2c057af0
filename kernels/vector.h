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

// Float4 of threadgroup memory that the staged part of a chunk takes.
template <int M> struct Stage {
    static constexpr constant int SIZE = M * Staged<M>::VECTORS * 32;
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
