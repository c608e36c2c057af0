// What the kernels of Gated DeltaNet share: shapes, and rows of the recurrent state in registers. The state is
// [value heads, value width, key width] f32.
#pragma once
#include "session.h"

constant uint KEY_HEADS [[function_constant(0)]];
constant uint VALUE_HEADS [[function_constant(1)]];
// Width of a key head; a multiple of 4, at most 128.
constant uint KEY_WIDTH [[function_constant(2)]];
// Width of a value head; at most 128.
constant uint VALUE_WIDTH [[function_constant(3)]];
constant bool INPUT_BFLOAT [[function_constant(6)]];
constant bool OUTPUT_BFLOAT [[function_constant(8)]];

constant uint KEYS = KEY_HEADS * KEY_WIDTH;
constant uint CHANNELS = 2 * KEYS + VALUE_HEADS * VALUE_WIDTH;
constant constexpr uint MOST_WIDTH = 128;

// Lanes that share a row of the state, and how many quads of it a lane has: lane % 8, lane % 8 + 8 and so on, so that
// each load of a row is a full line. Eight lanes and not 32: a sum over them is three exchanges, not five.
constant constexpr uint ROW_LANES = 8;
constant constexpr uint QUADS = MOST_WIDTH / (4 * ROW_LANES);

// A lane's part of a query, of a key or of a row of the state. Columns that there are not are zeros.
struct Part {
    float4 of[QUADS];
};

inline void load_part(thread Part& part, device const float* vector, uint lane) {
#pragma unroll
    for (uint i = 0; i < QUADS; ++i) {
        uint column = (lane % ROW_LANES + i * ROW_LANES) * 4;
        part.of[i] = float4(0.0f);
        if (column < KEY_WIDTH) part.of[i] = *(device const float4*)(vector + column);
    }
}

inline void load_part(thread Part& part, threadgroup const float4* vector, uint lane) {
#pragma unroll
    for (uint i = 0; i < QUADS; ++i) part.of[i] = vector[lane % ROW_LANES + i * ROW_LANES];
}

inline void scale_part(thread Part& part, float factor) {
#pragma unroll
    for (uint i = 0; i < QUADS; ++i) part.of[i] *= factor;
}

inline void add_part(thread Part& part, float factor, thread const Part& vector) {
#pragma unroll
    for (uint i = 0; i < QUADS; ++i) part.of[i] = fma(float4(factor), vector.of[i], part.of[i]);
}

// A lane's summand of a product of a row with a vector.
inline float product_part(thread const Part& row, thread const Part& vector) {
    float4 sums = row.of[0] * vector.of[0];
#pragma unroll
    for (uint i = 1; i < QUADS; ++i) sums = fma(row.of[i], vector.of[i], sums);
    return (sums.x + sums.y) + (sums.z + sums.w);
}

// Sums over the lanes of a row in one fixed order: pairs four apart first.
template <class T> inline T sum_row(T value) {
    for (ushort distance = ROW_LANES / 2; distance > 0; distance /= 2) value += simd_shuffle_xor(value, distance);
    return value;
}

// Rows `first` to `first + ROWS - 1` of a head's state.
template <uint ROWS> struct StateRows {
    Part of[ROWS];
};

template <uint ROWS>
inline void load_state(thread StateRows<ROWS>& state, device const uchar* states, uint head, uint first, uint lane) {
    device const float* from = (device const float*)states + ((ulong)head * VALUE_WIDTH + first) * KEY_WIDTH;
#pragma unroll
    for (uint row = 0; row < ROWS; ++row) {
#pragma unroll
        for (uint i = 0; i < QUADS; ++i) state.of[row].of[i] = float4(0.0f);
        if (first + row < VALUE_WIDTH) load_part(state.of[row], from + row * KEY_WIDTH, lane);
    }
}

template <uint ROWS>
inline void store_state(
    thread const StateRows<ROWS>& state, device uchar* states, uint head, uint first, uint lane)
{
    device float* to = (device float*)states + ((ulong)head * VALUE_WIDTH + first) * KEY_WIDTH;
#pragma unroll
    for (uint row = 0; row < ROWS; ++row) {
#pragma unroll
        for (uint i = 0; i < QUADS; ++i) {
            uint column = (lane % ROW_LANES + i * ROW_LANES) * 4;
            if (column < KEY_WIDTH && first + row < VALUE_WIDTH) {
                *(device float4*)(to + row * KEY_WIDTH + column) = state.of[row].of[i];
            }
        }
    }
}
