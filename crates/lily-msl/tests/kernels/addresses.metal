// What the headers of quantised weights and of stored elements make of indices.
#include "tile.h"

// For each eight numbers index, rows, columns, bits, ..: bytes of a matrix, and where the codes and pairs of the
// index-th begin.
kernel void matrices(
    device const uchar* base [[buffer(0)]],
    device const uint* places [[buffer(1)]],
    device ulong* answers [[buffer(2)]],
    uint at [[thread_position_in_grid]])
{
    device const uint* place = places + at * 8;
    Matrix matrix = matrix_at(base, place[0], place[1], place[2], place[3]);
    answers[at * 3] = matrix_bytes(place[1], place[2], place[3]);
    answers[at * 3 + 1] = ulong(matrix.codes - base);
    answers[at * 3 + 2] = ulong(matrix.pairs - base);
}

// The same and block, column, part: what a lane loads.
kernel void blocks(
    device const uchar* base [[buffer(0)]],
    device const uint* places [[buffer(1)]],
    device uint4* answers [[buffer(2)]],
    uint at [[thread_position_in_grid]])
{
    device const uint* place = places + at * 8;
    Matrix matrix = matrix_at(base, place[0], place[1], place[2], place[3]);
    BlockCodes codes = load_block(matrix, place[4], place[2], place[3], place[5], place[6]);
    answers[at * 5] = codes.row0;
    answers[at * 5 + 1] = codes.row1;
    answers[at * 5 + 2] = codes.row2;
    answers[at * 5 + 3] = codes.row3;
    answers[at * 5 + 4] = codes.pairs;
}

// The same and the first output of a tile of 16 rows, of one matrix and of a gated pair: where each run of a thread
// begins.
kernel void runs(
    device const uchar* base [[buffer(0)]],
    device const uint* place [[buffer(1)]],
    device ulong* answers [[buffer(2)]],
    uint at [[thread_index_in_threadgroup]])
{
    typedef MatrixTile<16> Tile;
    Matrix matrix = matrix_at(base, place[0], place[1], place[2], place[3]);
    Matrix up = matrix_at(base, place[0] + 1, place[1], place[2], place[3]);
    for (uint gated = 0; gated < 2; ++gated) {
        WeightRuns<Tile> found;
        place_weights<Tile>(found, matrix, place[3], gated == 1, up, place[3], place[4], place[1], place[2], at);
        for (uint i = 0; i < WeightRuns<Tile>::COUNT; ++i) {
            uint run = gated * RUNS + i * Tile::THREADS + at;
            answers[run * 2] = ulong(found.codes[i] - base);
            answers[run * 2 + 1] = ulong(found.pairs[i] - base);
        }
    }
}

// Elements that begin at `index`: what is read, and what is written one behind.
kernel void elements(
    device uchar* base [[buffer(0)]],
    device const ulong* indices [[buffer(1)]],
    device float4* answers [[buffer(2)]],
    constant uint& is_bfloat [[buffer(3)]],
    uint at [[thread_position_in_grid]])
{
    ulong index = indices[at];
    bool bfloats = is_bfloat != 0;
    answers[at * 2] = load4(base, index, bfloats);
    answers[at * 2 + 1] = float4(load1(base, index + 2, bfloats));
    store4(base, index + 4, float4(1.0f, 2.0f, 3.0f, 4.0f), bfloats);
    store1(base, index + 9, 5.0f, bfloats);
}
