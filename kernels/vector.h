// What the kernels of matrix-vector products share: activations in threadgroup memory, norms, sums.
//
// A simdgroup takes four weight rows, its lanes side by side in 16-byte loads, with M activation rows; so rows that
// share weights read them once. Activations are put into threadgroup memory in chunks of 1,024 columns, laid out so that
// the lanes' loads meet no bank conflict. A norm costs one product there, and its root-mean-square is applied to the
// finished sums.
//
// One row, many weight rows: the simdgroups of a threadgroup go through ROUNDS blocks of four each, asking for the next
// chunk's codes before they multiply the one in hand, and meet only once, when the activations are staged.
// One row, few weight rows: SPLIT simdgroups share the chunks of the same block, so that nobody waits for memory twice.
// Several rows: chunk by chunk, or half chunks, whatever threadgroup memory holds; each simdgroup has its own block.
//
// Products are accumulated in float, within a lane over its columns, then over lanes in the order of `sum_lanes`; where
// chunks are shared out, over the lanes of each and then over chunks. So a row's result does not depend on the rows
// computed with it. (Beyond 4,096 columns it does, in the last bits, on whether there are others. So does a norm's factor,
// whose squares are summed by thread: with eight rows threads take half chunks, and their number may be another.)
//
// Threadgroups: SIMDGROUPS · 32 threads, SIMDGROUPS / SPLIT · ROUNDS blocks of four weight rows.
#pragma once
#include "quantised.h"

constant uint COLUMNS [[function_constant(0)]];
constant bool INPUT_BFLOAT [[function_constant(1)]];
constant bool HAS_NORM [[function_constant(2)]];
constant float EPSILON [[function_constant(3)]];
// At most 8.
constant uint SIMDGROUPS [[function_constant(4)]];
// Simdgroups that share the columns of a block: 1, or the number of chunks and at most 4.
constant uint SPLIT [[function_constant(5)]];
constant uint ROUNDS [[function_constant(6)]];
// Whether sums are reduced over lanes chunk by chunk: where one row alone would have its chunks shared out.
constant bool BY_CHUNK [[function_constant(7)]];
constant uint BLOCKS_A_ROUND = SIMDGROUPS / SPLIT;
constant constexpr uint MOST_SIMDGROUPS = 8;

// A number for each of M rows.
template <int M> struct Factors {
    float of[M];
};

// Chunks that stand in threadgroup memory at once: as many as 16 KB hold.
template <int M> struct Stage {
    static constexpr constant int CHUNKS = M == 1 ? 4 : 1;
    static constexpr constant int CHUNK_SIZE = M * Staged<M>::VECTORS * 32;
    static constexpr constant int SIZE = CHUNKS * CHUNK_SIZE;
    // Sums of every simdgroup with one matrix.
    static constexpr constant int RESULTS = MOST_SIMDGROUPS * M;
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

// Rows 4·block to 4·block+3 of a matrix with codes of `bits` bits, and where `gated` of a second matrix. Not `active`:
// behind the last.
struct Block {
    Matrix matrix;
    Matrix other;
    uint block;
    uint bits;
    uint other_bits;
    bool active;
    bool gated;
};

// A lane's codes of a block.
struct LaneCodes {
    BlockCodes first;
    BlockCodes other;
};

inline LaneCodes load_codes(Block block, uint column, uint part) {
    LaneCodes codes;
    uint from = block.active ? column : COLUMNS;
    codes.first = load_block(block.matrix, block.block, COLUMNS, block.bits, from, part);
    codes.other = codes.first;
    if (block.gated) codes.other = load_block(block.other, block.block, COLUMNS, block.other_bits, from, part);
    return codes;
}

// Where simdgroups leave their sums: those with the first matrix, and those with the second.
template <int M> struct Results {
    threadgroup float4* first;
    threadgroup float4* other;
};

// Sums over lanes, into threadgroup memory; `adds` where an earlier chunk's are there.
template <int M>
inline void leave_sums(threadgroup float4* results, Sums<M> sums, bool adds, uint simdgroup, uint lane) {
    for (int m = 0; m < M; ++m) {
        float4 sum = sum_lanes(sums.of[m]);
        threadgroup float4* to = results + simdgroup * M + m;
        if (lane == 0) *to = adds ? *to + sum : sum;
    }
}

// One row, shared out: the columns staged (4,096 at a time) are multiplied by the simdgroups of a block, each its chunks.
// The block's first codes were asked for before.
inline void multiply_split(
    Results<1> results, Block block, LaneCodes codes, threadgroup const float4* stage, uint base, uint simdgroup,
    uint lane)
{
    uint part = simdgroup % SPLIT;
    if (base == 0 && part * CHUNK >= COLUMNS) {
        // Three chunks are shared out to four: the last has none.
        Sums<1> nothing;
        clear(nothing);
        leave_sums<1>(results.first, nothing, false, simdgroup, lane);
        if (block.gated) leave_sums<1>(results.other, nothing, false, simdgroup, lane);
    }
    for (uint chunk = part; chunk < uint(Stage<1>::CHUNKS); chunk += SPLIT) {
        uint first = base + chunk * CHUNK;
        if (first >= COLUMNS) break;
        uint column = first + lane * LANE_COLUMNS;
        bool adds = chunk != part || base != 0;
        if (adds) codes = load_codes(block, column, 0);
        threadgroup const float4* staged = stage + chunk * Stage<1>::CHUNK_SIZE + lane;
        Sums<1> sums;
        clear(sums);
        multiply_chunk<1>(sums, codes.first, block.matrix, block.block, COLUMNS, block.bits, column, 0, staged);
        leave_sums<1>(results.first, sums, adds, simdgroup, lane);
        if (block.gated) {
            clear(sums);
            multiply_chunk<1>(sums, codes.other, block.other, block.block, COLUMNS, block.other_bits, column, 0, staged);
            leave_sums<1>(results.other, sums, adds, simdgroup, lane);
        }
    }
}

// One row, alone: all chunks of a block, which are all staged. `codes` are the block's first, and afterwards those of
// `following`. The sums are not reduced over lanes.
inline void multiply_alone(
    thread Sums<1>& sums, thread Sums<1>& others, thread LaneCodes& codes, Block block, Block following,
    threadgroup const float4* stage, uint lane)
{
    uint column = lane * LANE_COLUMNS;
#pragma unroll
    for (uint chunk = 0; chunk < uint(Stage<1>::CHUNKS); ++chunk) {
        if (chunk * CHUNK >= COLUMNS) break;
        uint now = chunk * CHUNK + column;
        bool last = (chunk + 1) * CHUNK >= COLUMNS;
        LaneCodes present = codes;
        if (last) {
            codes = load_codes(following, column, 0);
        } else {
            codes = load_codes(block, now + CHUNK, 0);
        }
        threadgroup const float4* staged = stage + chunk * Stage<1>::CHUNK_SIZE + lane;
        // The second half of 8-bit codes is loaded there: none where there is no block.
        if (!block.active) now = COLUMNS;
        multiply_chunk<1>(sums, present.first, block.matrix, block.block, COLUMNS, block.bits, now, 0, staged);
        if (block.gated) {
            multiply_chunk<1>(others, present.other, block.other, block.block, COLUMNS, block.other_bits, now, 0, staged);
        }
    }
}

// Several rows: a chunk at a time, or half of one, is staged for all simdgroups, each of which has its own block. Where
// there are two matrices (`has_other`, the same for all), sums of eight rows with both would take more registers than
// there are: those go twice through the chunks.
template <int M>
inline void multiply_together(
    Results<M> results, thread Factors<M>& squares, Block block, bool has_other, threadgroup float4* stage,
    device const uchar* input, device const float* norm, threadgroup const uint* inputs, uint count, uint thread_index,
    uint simdgroup, uint lane)
{
    constexpr uint VECTORS = Staged<M>::VECTORS;
    constexpr bool TWICE = M > 4;
    for (uint pass = 0; pass < (TWICE && has_other ? 2 : 1); ++pass) {
        bool takes_first = pass == 0, takes_other = block.gated && (pass == 1 || !TWICE);
        Sums<M> sums, others;
        clear(sums);
        clear(others);
        for (uint first = 0; first < COLUMNS; first += CHUNK) {
            uint column = first + lane * LANE_COLUMNS;
            for (uint from = 0; from < 8; from += VECTORS) {
                threadgroup_barrier(mem_flags::mem_threadgroup);
                Factors<M> added = squares;
                stage_chunk<M>(stage, added, input, norm, inputs, count, first, from, thread_index);
                if (pass == 0) squares = added;
                threadgroup_barrier(mem_flags::mem_threadgroup);
                if (!block.active) continue;
                threadgroup const float4* staged = stage + lane;
                // Of 4-bit codes, both halves come with one load; the second time it is answered by a cache.
                if (takes_first) {
                    uint part = VECTORS == 4 && block.bits == 8 ? from / 4 : 0;
                    BlockCodes codes = load_block(block.matrix, block.block, COLUMNS, block.bits, column, part);
                    multiply_chunk<M>(sums, codes, block.matrix, block.block, COLUMNS, block.bits, column, from, staged);
                }
                if (takes_other) {
                    uint part = VECTORS == 4 && block.other_bits == 8 ? from / 4 : 0;
                    BlockCodes codes = load_block(block.other, block.block, COLUMNS, block.other_bits, column, part);
                    multiply_chunk<M>(TWICE ? sums : others, codes, block.other, block.block, COLUMNS, block.other_bits,
                                      column, from, staged);
                }
            }
            bool last = first + CHUNK >= COLUMNS;
            if (!block.active || !(BY_CHUNK || last)) continue;
            bool adds = BY_CHUNK && first != 0;
            if (takes_first) leave_sums<M>(results.first, sums, adds, simdgroup, lane);
            if (takes_other) leave_sums<M>(results.other, TWICE ? sums : others, adds, simdgroup, lane);
            clear(sums);
            clear(others);
        }
    }
}

// The factor that a norm multiplies each sum of row m with.
template <int M>
inline void finish_norm(thread Factors<M>& squares, threadgroup float* partial, uint simdgroup, uint lane) {
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

// The finished sum of row `r` of a block (the local-th of its round) with activation row m.
template <int M>
inline float finished(threadgroup const float4* results, Factors<M> factors, uint local, uint m, uint r) {
    float sum = 0.0f;
    for (uint part = 0; part < SPLIT; ++part) {
        sum += ((threadgroup const float*)(results + (local * SPLIT + part) * M + m))[r];
    }
    float factor = factors.of[0];
    for (int i = 1; i < M; ++i) factor = m == uint(i) ? factors.of[i] : factor;
    return HAS_NORM ? sum * factor : sum;
}
