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

// A lane's codes of four weight rows, 32 columns of 4 bits or 16 of 8, with the rows' scales and biases.
struct BlockCodes {
    uint4 row0;
    uint4 row1;
    uint4 row2;
    uint4 row3;
    uint4 pairs;
};

// What a lane needs of rows 4·block to 4·block+3 for its columns from `column` on: all 32, or of 8 bits those of vectors
// 4 · part to 4 · part + 3. Behind the last column: zeros.
inline BlockCodes load_block(Matrix matrix, uint block, uint columns, uint bits, uint column, uint part) {
    BlockCodes codes;
    if (column >= columns) {
        codes.row0 = uint4(0u), codes.row1 = uint4(0u), codes.row2 = uint4(0u), codes.row3 = uint4(0u);
        codes.pairs = uint4(0u);
        return codes;
    }
    ulong row_bytes = (ulong)columns * bits / 8;
    device const uchar* at = matrix.codes + (ulong)block * 4 * row_bytes + (ulong)column * bits / 8 + part * 16;
    codes.row0 = *(device const uint4*)(at);
    codes.row1 = *(device const uint4*)(at + row_bytes);
    codes.row2 = *(device const uint4*)(at + 2 * row_bytes);
    codes.row3 = *(device const uint4*)(at + 3 * row_bytes);
    uint group = column / GROUP;
    codes.pairs = *(device const uint4*)(matrix.pairs + ((ulong)block * (columns / GROUP) + group) * 16);
    return codes;
}

// Adds what four activation vectors of each row give with the codes of the same 16 columns: the first half of a lane's
// columns or the second. `stage` is at the first of those vectors.
template <int M>
inline void multiply_half(
    thread Sums<M>& sums, BlockCodes codes, uint bits, uint half_index, threadgroup const float4* stage)
{
    float2 pair0 = unpack_bfloats(codes.pairs.x), pair1 = unpack_bfloats(codes.pairs.y);
    float2 pair2 = unpack_bfloats(codes.pairs.z), pair3 = unpack_bfloats(codes.pairs.w);
    float4 scale = float4(pair0.x, pair1.x, pair2.x, pair3.x);
    float4 bias = float4(pair0.y, pair1.y, pair2.y, pair3.y);
    bool second = bits == 4 && half_index == 1;
    uint2 row0 = codes.row0.xy, row1 = codes.row1.xy, row2 = codes.row2.xy, row3 = codes.row3.xy;
    if (second) row0 = codes.row0.zw, row1 = codes.row1.zw, row2 = codes.row2.zw, row3 = codes.row3.zw;
    float4 dots[M];
    float totals[M];
    for (int m = 0; m < M; ++m) {
        dots[m] = float4(0.0f);
        totals[m] = 0.0f;
    }
#pragma unroll
    for (int v = 0; v < 4; ++v) {
        float4 w0, w1, w2, w3;
        if (bits == 4) {
            // Two words of eight codes.
            uint shift = v % 2 * 16;
            w0 = codes4(row0[v / 2] >> shift), w1 = codes4(row1[v / 2] >> shift);
            w2 = codes4(row2[v / 2] >> shift), w3 = codes4(row3[v / 2] >> shift);
        } else {
            w0 = codes8(codes.row0[v]), w1 = codes8(codes.row1[v]);
            w2 = codes8(codes.row2[v]), w3 = codes8(codes.row3[v]);
        }
        for (int m = 0; m < M; ++m) {
            float4 x = stage[(m * Staged<M>::VECTORS + v) * 32];
            dots[m] += float4(dot(w0, x), dot(w1, x), dot(w2, x), dot(w3, x));
            totals[m] += grown_sum(x);
        }
    }
    for (int m = 0; m < M; ++m) sums.of[m] += scale * dots[m] + bias * totals[m];
}

// Adds the products of M staged rows over the staged part of a chunk. `codes` are what `load_block` gave for the lane's
// columns and part `from / 4`; `stage` is at the lane's first staged vector.
template <int M>
inline void multiply_chunk(
    thread Sums<M>& sums, BlockCodes codes, Matrix matrix, uint block, uint columns, uint bits, uint column, uint from,
    threadgroup const float4* stage)
{
    multiply_half<M>(sums, codes, bits, from / 4, stage);
    if (Staged<M>::VECTORS == 4) return;
    if (bits == 8) codes = load_block(matrix, block, columns, bits, column, 1);
    multiply_half<M>(sums, codes, bits, 1, stage + 128);
}
