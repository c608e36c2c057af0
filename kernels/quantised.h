// Affine 4- and 8-bit weights in groups of 64, and a simdgroup's product of four of their rows.
//
// How a matrix lies in memory: its codes row by row, 4 bits (or 8) each, the first in the lowest bits; then,
// for each block of four rows and each group of 64 columns, the four rows' (scale, bias) pairs, two bfloats in
// a word. Rows are padded to a multiple of four. So a lane takes the codes of 32 columns of a row in one
// load of 16 bytes (two for 8 bits), the lanes side by side, and four rows' scales and biases in another.
#pragma once
#include "elements.h"

constant constexpr uint GROUP = 64;
// Columns that a lane takes at once, and a simdgroup.
constant constexpr uint LANE_COLUMNS = 32;
constant constexpr uint CHUNK = 1024;

// Sums of M activation rows with four weight rows.
template <int M> struct Sums {
    float4 of[M];
};

template <int M> inline void clear(thread Sums<M>& sums) {
    for (int m = 0; m < M; ++m) sums.of[m] = float4(0.0f);
}

// A code becomes a float without a conversion: it is put into the low bits of 2^23. Codes are left where they
// stand in their half word, so the c-th of four is 16^c times too large; what it is multiplied with is made that
// much smaller when it is put into threadgroup memory. Both are powers of two: nothing is rounded.
inline float4 codes4(uint half_word) {
    uint4 placed = uint4(half_word & 0xfu, half_word & 0xf0u, half_word & 0xf00u, half_word & 0xf000u);
    return as_type<float4>(placed | uint4(0x4b000000u)) - float4(8388608.0f);
}

inline float4 codes8(uint word) {
    uint4 placed = uint4(word & 0xffu, (word >> 4) & 0xff0u, (word >> 8) & 0xff00u, (word >> 12) & 0xff000u);
    return as_type<float4>(placed | uint4(0x4b000000u)) - float4(8388608.0f);
}

constant constexpr float SHRINK_1 = 1.0f / 16.0f, SHRINK_2 = 1.0f / 256.0f, SHRINK_3 = 1.0f / 4096.0f;
inline float4 shrink(float4 x) { return x * float4(1.0f, SHRINK_1, SHRINK_2, SHRINK_3); }
inline float grown_sum(float4 x) { return (x.x + x.y * 16.0f) + (x.z * 256.0f + x.w * 4096.0f); }

// Where a matrix (or one expert of it) lies.
struct Matrix {
    device const uchar* codes;
    device const uchar* pairs;
};

inline ulong matrix_bytes(uint rows, uint columns, uint bits) {
    ulong padded = (rows + 3) / 4 * 4;
    return padded * columns * bits / 8 + padded * (columns / GROUP) * 4;
}

// Matrix `index` of several of [rows, columns] that lie one after the other.
inline Matrix matrix_at(device const uchar* base, ulong index, uint rows, uint columns, uint bits) {
    ulong padded = (rows + 3) / 4 * 4;
    Matrix matrix;
    matrix.codes = base + index * matrix_bytes(rows, columns, bits);
    matrix.pairs = matrix.codes + padded * columns * bits / 8;
    return matrix;
}

// Vectors of a lane's columns that stand in threadgroup memory at once: all eight, or half of them where there are
// many rows.
template <int M> struct Staged {
    static constexpr constant int VECTORS = M > 4 ? 4 : 8;
};

// Adds what four activation vectors of each row give with the codes of the same 16 columns. `stage` is at the
// first of the lane's vectors.
template <int M>
inline void multiply_half(
    thread Sums<M>& sums, uint4 row0, uint4 row1, uint4 row2, uint4 row3, uint bits, float4 scale, float4 bias,
    threadgroup const float4* stage)
{
    float4 dots[M];
    float totals[M];
    for (int m = 0; m < M; ++m) {
        dots[m] = float4(0.0f);
        totals[m] = 0.0f;
    }
    for (int v = 0; v < 4; ++v) {
        float4 w0, w1, w2, w3;
        if (bits == 4) {
            // Two words of eight codes.
            uint shift = v % 2 * 16;
            w0 = codes4(row0[v / 2] >> shift), w1 = codes4(row1[v / 2] >> shift);
            w2 = codes4(row2[v / 2] >> shift), w3 = codes4(row3[v / 2] >> shift);
        } else {
            w0 = codes8(row0[v]), w1 = codes8(row1[v]), w2 = codes8(row2[v]), w3 = codes8(row3[v]);
        }
        for (int m = 0; m < M; ++m) {
            float4 x = stage[(m * Staged<M>::VECTORS + v) * 32];
            dots[m] += float4(dot(w0, x), dot(w1, x), dot(w2, x), dot(w3, x));
            totals[m] += grown_sum(x);
        }
    }
    for (int m = 0; m < M; ++m) sums.of[m] += scale * dots[m] + bias * totals[m];
}

// Adds the products of M staged rows with the rows 4·block to 4·block+3 over the lane's columns from `column` on,
// of which vectors `from` to `from + Staged<M>::VECTORS` stand in `stage`, the lane's first first.
template <int M>
inline void multiply_chunk(
    thread Sums<M>& sums, Matrix matrix, uint block, uint columns, uint bits, uint column, uint from,
    threadgroup const float4* stage)
{
    if (column >= columns) return;
    uint group = column / GROUP;
    uint4 words = *(device const uint4*)(matrix.pairs + ((ulong)block * (columns / GROUP) + group) * 16);
    float2 pair0 = unpack_bfloats(words.x), pair1 = unpack_bfloats(words.y);
    float2 pair2 = unpack_bfloats(words.z), pair3 = unpack_bfloats(words.w);
    float4 scale = float4(pair0.x, pair1.x, pair2.x, pair3.x);
    float4 bias = float4(pair0.y, pair1.y, pair2.y, pair3.y);
    ulong row_bytes = (ulong)columns * bits / 8;
    device const uchar* codes = matrix.codes + (ulong)block * 4 * row_bytes + (ulong)(column + from * 4) * bits / 8;
    if (bits == 4 && Staged<M>::VECTORS == 8) {
        uint4 row0 = *(device const uint4*)(codes);
        uint4 row1 = *(device const uint4*)(codes + row_bytes);
        uint4 row2 = *(device const uint4*)(codes + 2 * row_bytes);
        uint4 row3 = *(device const uint4*)(codes + 3 * row_bytes);
        multiply_half<M>(sums, row0, row1, row2, row3, 4, scale, bias, stage);
        multiply_half<M>(sums, uint4(row0.zw, row0.zw), uint4(row1.zw, row1.zw), uint4(row2.zw, row2.zw),
            uint4(row3.zw, row3.zw), 4, scale, bias, stage + 128);
    } else if (bits == 4) {
        uint2 row0 = *(device const uint2*)(codes);
        uint2 row1 = *(device const uint2*)(codes + row_bytes);
        uint2 row2 = *(device const uint2*)(codes + 2 * row_bytes);
        uint2 row3 = *(device const uint2*)(codes + 3 * row_bytes);
        multiply_half<M>(sums, uint4(row0, row0), uint4(row1, row1), uint4(row2, row2), uint4(row3, row3), 4, scale, bias, stage);
    } else {
        for (int half_index = 0; half_index < Staged<M>::VECTORS / 4; ++half_index) {
            device const uchar* part = codes + half_index * 16;
            uint4 row0 = *(device const uint4*)(part);
            uint4 row1 = *(device const uint4*)(part + row_bytes);
            uint4 row2 = *(device const uint4*)(part + 2 * row_bytes);
            uint4 row3 = *(device const uint4*)(part + 3 * row_bytes);
            multiply_half<M>(sums, row0, row1, row2, row3, 8, scale, bias, stage + half_index * 128);
        }
    }
}
