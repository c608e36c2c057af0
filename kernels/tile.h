// Tiles of a matrix product with quantised weights: prefill at bf16.
//
// A threadgroup multiplies ROWS rows of activations with 64 weight rows, one quantisation group of 64 columns a step. A
// step's codes become bfloats in threadgroup memory and nowhere else, beside the activations of the same columns; the
// next step's words are read into registers before this one is multiplied, so that memory and matrix units work side by
// side. There is one buffer, not two: 16 KiB at most, so that several threadgroups fit a core and hide each other's
// barriers.
//
// A dequantised weight is scale · code + bias in float, rounded once to bfloat; products are exact and summed in float,
// columns ascending: eight at a time in the order of the matrix unit, the same for every ROWS. Rows and outputs that
// there are not are zeros. So a row's result depends neither on the size of the tile nor on the rows computed with it.
// (In what order a tensor operation sums its 64 columns is its own affair: see tensor.h.)
//
// How operands lie in threadgroup memory and are multiplied is a class:
// - MatrixTile, here: simdgroup matrices of 8x8. Every block of 8x8 lies together, 128 bytes: all banks once.
// - TensorTile, in tensor.h: tensor operations of Metal 4. Rows lie one after the other, as tensors need them.
#pragma once
#include "quantised.h"
#include <metal_simdgroup_matrix>

// Weight rows of a tile.
constant constexpr uint TILE_OUTPUTS = 64;
// Runs of 32 codes of a step: two a weight row.
constant constexpr uint RUNS = 2 * TILE_OUTPUTS;

template <int M> struct MatrixTile {
    static constexpr constant uint ROWS = M;
    static constexpr constant uint SIMDGROUPS = M < 32 ? 2 : 4;
    static constexpr constant uint THREADS = SIMDGROUPS * 32;
    // A simdgroup has 32 outputs of half of the rows (of all 16): BANDS x 4 blocks, 16 or 32 registers of sums.
    static constexpr constant uint BANDS = M < 64 ? 2 : 4;

    struct Sums {
        simdgroup_float8x8 of[BANDS][4];
    };

    // Where eight columns of a row of an operand lie.
    static uint operand(uint row, uint eighth) { return (row / 8 * 8 + eighth) * 64 + row % 8 * 8; }
    // Row and eighth of an input piece; row and half of a weight run. Eight threads side by side write to a block each
    // 16 bytes of their own, and a simdgroup reads 32 bytes or more of a row.
    static uint2 input_place(uint piece) { return uint2(piece / 64 * 8 + piece % 8, piece / 8 % 8); }
    static uint2 weight_place(uint run) { return uint2(run / 16 * 8 + run % 8, run / 8 % 2); }
    // Which of a run's four pieces is written first.
    static uint turn(uint) { return 0; }
    // Where sums lie, and row and quad of a piece of four sums.
    static uint result(uint row, uint column) { return (row / 8 * 8 + column / 8) * 64 + row % 8 * 8 + column % 8; }
    static uint2 result_place(uint piece, uint quads) {
        return uint2(piece / (8 * quads) * 8 + piece % 8, piece / 8 % quads);
    }

    static Sums make() {
        Sums sums;
        for (uint band = 0; band < BANDS; ++band) {
            for (uint column = 0; column < 4; ++column) {
                sums.of[band][column] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
            }
        }
        return sums;
    }
    static void clear(thread Sums&) {}

    static void multiply(thread Sums& sums, threadgroup const bfloat* x, threadgroup const bfloat* w, uint simdgroup) {
        uint first_row = simdgroup / 2 * BANDS * 8, first_column = simdgroup % 2 * 32;
        for (uint eighth = 0; eighth < 8; ++eighth) {
            simdgroup_bfloat8x8 left[BANDS], right[4];
#pragma unroll
            for (uint band = 0; band < BANDS; ++band) {
                simdgroup_load(left[band], x + operand(first_row + band * 8, eighth), 8);
            }
#pragma unroll
            for (uint column = 0; column < 4; ++column) {
                simdgroup_load(right[column], w + operand(first_column + column * 8, eighth), 8, ulong2(0), true);
            }
#pragma unroll
            for (uint band = 0; band < BANDS; ++band) {
#pragma unroll
                for (uint column = 0; column < 4; ++column) {
                    simdgroup_multiply_accumulate(
                        sums.of[band][column], left[band], right[column], sums.of[band][column]);
                }
            }
        }
    }

    static void store(thread Sums& sums, threadgroup float* stage, uint simdgroup) {
        uint first_row = simdgroup / 2 * BANDS * 8, first_column = simdgroup % 2 * 32;
#pragma unroll
        for (uint band = 0; band < BANDS; ++band) {
#pragma unroll
            for (uint column = 0; column < 4; ++column) {
                uint place = result(first_row + band * 8, first_column + column * 8);
                simdgroup_store(sums.of[band][column], stage + place, 8);
            }
        }
    }
};

// Threadgroup memory of a tile, in 16 bytes: operands, and in their place the sums at the end.
template <class Tile> struct TileMemory {
    static constexpr constant uint OPERANDS = (Tile::ROWS + TILE_OUTPUTS) * GROUP * 2;
    static constexpr constant uint SUMS = Tile::ROWS * TILE_OUTPUTS * 4;
    static constexpr constant uint SIZE = (OPERANDS > SUMS ? OPERANDS : SUMS) / 16;
};

// What a thread reads of the activations: pieces of eight columns of a row a step.
template <class Tile> struct InputPieces {
    static constexpr constant uint COUNT = Tile::ROWS * 8 / Tile::THREADS;
    device const uchar* at[COUNT];
    bool inside[COUNT];
    uint4 words[COUNT];
};

// What a thread reads of the weights: runs of 32 codes, half of a row's group, a step. Of 16 bits they are the weights
// themselves, dequantised before: the ablation of dequantising here. Then all weights of the kernel are.
template <class Tile> struct WeightRuns {
    static constexpr constant uint COUNT = RUNS / Tile::THREADS;
    device const uchar* codes[COUNT];
    device const uchar* pairs[COUNT];
    uint bits[COUNT];
    bool inside[COUNT];
    uint4 low[COUNT];
    uint4 high[COUNT];
    // Of 16 bits alone.
    uint4 third[COUNT];
    uint4 fourth[COUNT];
    uint pair[COUNT];
};

// Where a thread's piece begins: at an eighth of the row's group of columns, in each step.
template <class Tile>
inline void place_input(
    thread InputPieces<Tile>& pieces, uint number, device const uchar* row, uint eighth, bool inside)
{
    pieces.at[number] = row + eighth * 16;
    pieces.inside[number] = inside;
}

// Matrix `index` of several, of 16 bits too: those have no pairs and no padding.
inline Matrix weights_at(device const uchar* base, ulong index, uint rows, uint columns, uint bits) {
    Matrix matrix = matrix_at(base, bits == 16 ? 0 : index, rows, columns, bits);
    if (bits == 16) matrix.codes = base + index * rows * columns * 2;
    return matrix;
}

// Rows of the tile are outputs `first` to `first + 63` of a matrix; or, gated, outputs `first` to `first + 31` of it
// and then the same outputs of `up`, so that gate and up of an output meet in one threadgroup whatever the tile type.
template <class Tile>
inline void place_weights(
    thread WeightRuns<Tile>& runs, Matrix matrix, uint bits, bool gated, Matrix up, uint up_bits, uint first,
    uint outputs, uint columns, uint thread_index)
{
#pragma unroll
    for (uint i = 0; i < WeightRuns<Tile>::COUNT; ++i) {
        uint2 place = Tile::weight_place(i * Tile::THREADS + thread_index);
        bool second = gated && place.x >= TILE_OUTPUTS / 2;
        uint row = first + (second ? place.x - TILE_OUTPUTS / 2 : place.x);
        runs.bits[i] = second ? up_bits : bits;
        runs.inside[i] = row < outputs;
        if (!runs.inside[i]) row = 0;
        device const uchar* codes = second ? up.codes : matrix.codes;
        device const uchar* pairs = second ? up.pairs : matrix.pairs;
        runs.codes[i] = codes + ((ulong)row * columns / 8 + place.y * 4) * runs.bits[i];
        runs.pairs[i] = pairs + ((ulong)(row / 4) * (columns / GROUP) * 4 + row % 4) * 4;
    }
}

// `plain`: weights of 16 bits.
template <class Tile>
inline void read_step(
    thread InputPieces<Tile>& pieces, thread WeightRuns<Tile>& runs, bool plain, uint step)
{
#pragma unroll
    for (uint i = 0; i < WeightRuns<Tile>::COUNT; ++i) {
        runs.low[i] = uint4(0u);
        runs.high[i] = uint4(0u);
        runs.pair[i] = 0;
        if (plain) runs.third[i] = uint4(0u), runs.fourth[i] = uint4(0u);
        if (!runs.inside[i]) continue;
        device const uchar* codes = runs.codes[i] + step * GROUP / 8 * runs.bits[i];
        runs.low[i] = *(device const uint4*)(codes);
        if (plain) {
            runs.high[i] = *(device const uint4*)(codes + 16);
            runs.third[i] = *(device const uint4*)(codes + 32);
            runs.fourth[i] = *(device const uint4*)(codes + 48);
            continue;
        }
        if (runs.bits[i] == 8) runs.high[i] = *(device const uint4*)(codes + 16);
        runs.pair[i] = *(device const uint*)(runs.pairs[i] + step * 16);
    }
#pragma unroll
    for (uint i = 0; i < InputPieces<Tile>::COUNT; ++i) {
        pieces.words[i] = uint4(0u);
        if (pieces.inside[i]) pieces.words[i] = *(device const uint4*)(pieces.at[i] + step * GROUP * 2);
    }
}

// The words in the order in which they are written.
inline uint4 turned(uint4 words, uint turn) {
    if (turn & 1) words = uint4(words.y, words.z, words.w, words.x);
    if (turn & 2) words = uint4(words.z, words.w, words.x, words.y);
    return words;
}

// Eight weights, as codes4 and codes8 give their codes; `scale` is shrunk as the codes are grown. Both are exact, and
// so is their product, which has 16 bits at most: the sum alone is rounded to float.
inline uint4 weights8(float4 first, float4 second, float4 scale, float4 bias) {
    uint2 low = as_type<uint2>(bfloat4(fma(first, scale, bias)));
    uint2 high = as_type<uint2>(bfloat4(fma(second, scale, bias)));
    return uint4(low.x, low.y, high.x, high.y);
}

template <class Tile>
inline void write_step(
    threadgroup bfloat* x, threadgroup bfloat* w, thread InputPieces<Tile>& pieces, thread WeightRuns<Tile>& runs,
    bool plain, uint thread_index)
{
#pragma unroll
    for (uint i = 0; i < InputPieces<Tile>::COUNT; ++i) {
        uint2 place = Tile::input_place(i * Tile::THREADS + thread_index);
        *(threadgroup uint4*)(x + Tile::operand(place.x, place.y)) = pieces.words[i];
    }
#pragma unroll
    for (uint i = 0; i < WeightRuns<Tile>::COUNT; ++i) {
        uint2 place = Tile::weight_place(i * Tile::THREADS + thread_index);
        float2 pair = unpack_bfloats(runs.pair[i]);
        float4 scale = shrink(float4(pair.x)), bias = float4(pair.y);
        uint turn = Tile::turn(place.x);
        uint4 low = runs.low[i], high = runs.high[i];
        if (plain) {
#pragma unroll
            for (uint j = 0; j < 4; ++j) {
                uint part = (j + turn) % 4;
                uint4 first = part % 2 ? high : low, second = part % 2 ? runs.fourth[i] : runs.third[i];
                threadgroup bfloat* to = w + Tile::operand(place.x, place.y * 4 + part);
                *(threadgroup uint4*)(to) = part < 2 ? first : second;
            }
        } else if (runs.bits[i] == 4) {
            low = turned(low, turn);
#pragma unroll
            for (uint j = 0; j < 4; ++j) {
                threadgroup bfloat* to = w + Tile::operand(place.x, place.y * 4 + (j + turn) % 4);
                *(threadgroup uint4*)(to) = weights8(codes4(low[j]), codes4(low[j] >> 16), scale, bias);
            }
        } else {
            uint4 evens = turned(uint4(low.x, low.z, high.x, high.z), turn);
            uint4 odds = turned(uint4(low.y, low.w, high.y, high.w), turn);
#pragma unroll
            for (uint j = 0; j < 4; ++j) {
                threadgroup bfloat* to = w + Tile::operand(place.x, place.y * 4 + (j + turn) % 4);
                *(threadgroup uint4*)(to) = weights8(codes8(evens[j]), codes8(odds[j]), scale, bias);
            }
        }
    }
}

// The whole product: at its end the sums lie in `memory`, as Tile::result says.
template <class Tile>
inline void multiply_tile(
    threadgroup uint4* memory, thread InputPieces<Tile>& pieces, thread WeightRuns<Tile>& runs, bool plain,
    uint columns, uint thread_index, uint simdgroup)
{
    threadgroup bfloat* x = (threadgroup bfloat*)memory;
    threadgroup bfloat* w = x + Tile::ROWS * GROUP;
    auto sums = Tile::make();
    Tile::clear(sums);
    read_step<Tile>(pieces, runs, plain, 0);
    uint steps = columns / GROUP;
    for (uint step = 0; step < steps; ++step) {
        // The step before has been multiplied.
        threadgroup_barrier(mem_flags::mem_threadgroup);
        write_step<Tile>(x, w, pieces, runs, plain, thread_index);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (step + 1 < steps) read_step<Tile>(pieces, runs, plain, step + 1);
        Tile::multiply(sums, x, w, simdgroup);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    Tile::store(sums, (threadgroup float*)memory, simdgroup);
    threadgroup_barrier(mem_flags::mem_threadgroup);
}

// What a threadgroup multiplies its rows with: outputs `first` to `first + 63` of `matrix`; or, gated, `first` to
// `first + 31` of it and of `up`.
struct TileWeights {
    Matrix matrix;
    Matrix up;
    uint bits;
    uint up_bits;
    bool gated;
    uint first;
    uint outputs;
    uint columns;
};

// Where a thread finds its part of them, and the whole product. Tiles that take their weights in another way have a form
// of their own of both (tensor_packed.h). `plain`: weights of 16 bits.
template <class Tile> inline WeightRuns<Tile> weights_of(Tile, TileWeights weights, uint thread_index) {
    WeightRuns<Tile> runs;
    place_weights<Tile>(
        runs, weights.matrix, weights.bits, weights.gated, weights.up, weights.up_bits, weights.first,
        weights.outputs, weights.columns, thread_index);
    return runs;
}

template <class Tile>
inline void multiply_rows(
    Tile, threadgroup uint4* memory, thread InputPieces<Tile>& pieces, thread WeightRuns<Tile>& runs, bool plain,
    uint columns, uint thread_index, uint simdgroup)
{
    multiply_tile<Tile>(memory, pieces, runs, plain, columns, thread_index, simdgroup);
}

// Four sums of a row, the first of them output `quad * 4` of the tile; gated: silu of them times those of `up`.
template <class Tile>
inline float4 result4(threadgroup const uint4* memory, uint row, uint quad, bool gated) {
    threadgroup const float* sums = (threadgroup const float*)memory;
    float4 value = *(threadgroup const float4*)(sums + Tile::result(row, quad * 4));
    if (gated) {
        float4 up = *(threadgroup const float4*)(sums + Tile::result(row, TILE_OUTPUTS / 2 + quad * 4));
        for (uint i = 0; i < 4; ++i) value[i] = silu(value[i]) * up[i];
    }
    return value;
}
