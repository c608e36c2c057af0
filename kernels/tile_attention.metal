// Causal attention over the cache for many rows of one session on simdgroup matrices: prefill at bf16. Queries of one
// KV head are packed, rows and the heads that share it alike, so that a key or value that was read serves 32 of them.
//
// Softmax is online, by tiles of 64 positions on the grid of absolute positions: a row's result does not depend on how
// a prompt is cut into chunks, nor on the rows computed with it. Scores are in powers of two, exp2(score - reference),
// and a row's reference is a whole number that follows its largest score only where that runs away by 8. So the sums
// are rescaled rarely, by exact powers of two, which round nothing.
#include "attention.h"
#include <metal_simdgroup_matrix>

// Queries of a threadgroup, in bands of eight; its positions of a step.
constant constexpr uint QUERIES = 32;
constant constexpr uint BANDS = QUERIES / 8;
constant constexpr uint KEYS = 64;
constant constexpr uint SIMDGROUPS = 4;
// Scores of a band.
constant constexpr uint BAND_SCORES = 8 * KEYS;
// The most blocks of eight columns that a simdgroup has of a head's width, and how many it has.
constant constexpr uint MOST_BLOCKS = 8;
constant uint BLOCKS = WIDTH / (8 * SIMDGROUPS);
// Below every score, so that no infinity is needed.
constant constexpr float NOWHERE = -1e30f;
constant constexpr float SLACK = 8.0f;

// How softmax weights enter their product with values, which are bfloats.
//
// As sums of two bfloats: 16 bits of a weight, two products. Matrix units that take 16-bit operands alone need this.
struct SplitWeights {
    static constexpr constant uint PARTS = 2;
    using Block = simdgroup_bfloat8x8;
    // Before the first of a simdgroup's weights comes where scores are: its lanes have read theirs.
    static void begin() { simdgroup_barrier(mem_flags::mem_threadgroup); }
    static void put(threadgroup float* band, uint place, float4 weights) {
        threadgroup bfloat* parts = (threadgroup bfloat*)band;
        bfloat4 high = bfloat4(weights);
        *(threadgroup bfloat4*)(parts + place) = high;
        *(threadgroup bfloat4*)(parts + BAND_SCORES + place) = bfloat4(weights - float4(high));
    }
    static void load(thread Block& block, threadgroup const float* band, uint part, uint eighth) {
        simdgroup_load(block, (threadgroup const bfloat*)band + part * BAND_SCORES + eighth * 64, 8);
    }
};
// As they are: all bits, one product. For GPUs whose matrix products are as fast in float.
struct FloatWeights {
    static constexpr constant uint PARTS = 1;
    using Block = simdgroup_float8x8;
    // A weight comes where its own score was.
    static void begin() {}
    static void put(threadgroup float* band, uint place, float4 weights) {
        *(threadgroup float4*)(band + place) = weights;
    }
    static void load(thread Block& block, threadgroup const float* band, uint, uint eighth) {
        simdgroup_load(block, band + eighth * 64, 8);
    }
};

// A simdgroup's columns of the weighted sums of all queries: 64 registers at a width of 256.
struct Outputs {
    simdgroup_float8x8 of[BANDS][MOST_BLOCKS];
};

// Adds eight positions' values: `values` is at the first of this simdgroup's columns, in device or threadgroup memory.
template <class Weights, class Pointer>
inline void add_values(
    thread Outputs& sums, threadgroup const float* scores, uint eighth, Pointer values, ulong stride)
{
    typename Weights::Block weights[Weights::PARTS][BANDS];
#pragma unroll
    for (uint part = 0; part < Weights::PARTS; ++part) {
#pragma unroll
        for (uint band = 0; band < BANDS; ++band) {
            Weights::load(weights[part][band], scores + band * BAND_SCORES, part, eighth);
        }
    }
#pragma unroll
    for (uint block = 0; block < MOST_BLOCKS; ++block) {
        if (block >= BLOCKS) break;
        simdgroup_bfloat8x8 value;
        simdgroup_load(value, values + block * 8, stride);
#pragma unroll
        for (uint part = 0; part < Weights::PARTS; ++part) {
#pragma unroll
            for (uint band = 0; band < BANDS; ++band) {
                simdgroup_multiply_accumulate(sums.of[band][block], weights[part][band], value, sums.of[band][block]);
            }
        }
    }
}

// 2^exponent for a whole number up to 0; 0 where that is no normal float.
inline float power_of_two(float exponent) { return as_type<float>(uint(int(max(exponent, -127.0f)) + 127) << 23); }

// Contract. queries and output [rows, QUERY_HEADS · WIDTH] bfloat: consecutive rows of session 0 from its position on,
// whose keys and values are in the cache (bfloat); WIDTH a multiple of 32, at most 256. output = softmax(q · kᵀ /
// sqrt(WIDTH)) · v over the positions up to each row's own, scores, weights and sums in float, rounded once. Weights
// are float, or the sum of two bfloats (relative error 2^-17 at most) where Weights says so; products with bfloats are
// exact.
// Threadgroups of 128 threads: 32 queries of a KV head, ordered by row, then head. Its simdgroups share the work
// without reading anything twice: in q · kᵀ each has 16 of the positions, in softmax 8 of the queries, in weights · v a
// quarter of the columns. Keys and values come straight from the cache. At a width of 256 a step of 64 positions is
// 1,024 products of 8x8 for q · kᵀ and as many for weights · v, or twice as many with two bfloats. Grid: rows · heads
// of a group / 32, KV heads; or a part of that from `first_tile` on.
template <class Weights>
[[max_total_threads_per_threadgroup(128)]] kernel void tile_attend(
    device const Session* sessions [[buffer(0)]],
    device const uchar* queries [[buffer(1)]],
    device uchar* output [[buffer(2)]],
    constant uint& layer [[buffer(3)]],
    constant uint& row_count [[buffer(4)]],
    constant uint& first_tile [[buffer(5)]],
    uint2 position [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]])
{
    // The queries in blocks of 8x8, a band after the other; at the end what simdgroups need for themselves.
    threadgroup uint4 query_memory[QUERIES * 256 / 8];
    threadgroup float4 score_memory[QUERIES * KEYS / 4];
    // By band: a matrix with the rows' factors on its diagonal, and whether there is one that is not 1.
    threadgroup float diagonals[BANDS * 64];
    threadgroup uint changed[BANDS];
    threadgroup float inverses[QUERIES];
    threadgroup bfloat* packed = (threadgroup bfloat*)query_memory;
    threadgroup float* scores = (threadgroup float*)score_memory;

    Session session = sessions[0];
    uint query_count = row_count * GROUP_HEADS, key_head = position.y;
    // The rows with the most positions come first.
    uint tiles = (query_count + QUERIES - 1) / QUERIES, first_query = (tiles - 1 - first_tile - position.x) * QUERIES;
    uint limit = session.position + min(first_query + QUERIES - 1, query_count - 1) / GROUP_HEADS;

    for (uint at = thread_index; at < QUERIES * WIDTH / 8; at += SIMDGROUPS * 32) {
        uint band = at / WIDTH, eighth = at / 8 % (WIDTH / 8), query = first_query + band * 8 + at % 8;
        uint4 words = uint4(0u);
        if (query < query_count) {
            ulong head = (ulong)(query / GROUP_HEADS) * QUERY_HEADS + key_head * GROUP_HEADS + query % GROUP_HEADS;
            words = *(device const uint4*)(queries + (head * WIDTH + eighth * 8) * 2);
        }
        *(threadgroup uint4*)(packed + band * 8 * WIDTH + eighth * 64 + at % 8 * 8) = words;
    }
    for (uint at = thread_index; at < BANDS * 64; at += SIMDGROUPS * 32) diagonals[at] = 0.0f;
    threadgroup_barrier(mem_flags::mem_threadgroup);

    // Four lanes share a query's softmax; its band is this simdgroup's own.
    uint own_query = thread_index / 4, own_row = own_query % 8;
    uint place = session.position + min(first_query + own_query, query_count - 1) / GROUP_HEADS;
    float factor = precise::rsqrt(float(WIDTH)) * M_LOG2E_F;
    float reference = NOWHERE, weight = 0.0f;

    Outputs sums;
#pragma unroll
    for (uint band = 0; band < BANDS; ++band) {
#pragma unroll
        for (uint block = 0; block < MOST_BLOCKS; ++block) {
            sums.of[band][block] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
        }
    }
    // A tile lies in one page: a page is a multiple of it.
    for (uint first = 0; first <= limit; first += KEYS) {
        simdgroup_float8x8 products[BANDS][2];
#pragma unroll
        for (uint band = 0; band < BANDS; ++band) {
            products[band][0] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
            products[band][1] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
        }
        // Keys behind the last position that is wanted may be anything: what comes of them is not used.
        if (first + simdgroup * 16 <= limit) {
            device const uchar* key_bytes = cached(session, layer, 0, key_head, first + simdgroup * 16);
            device const bfloat* keys = (device const bfloat*)key_bytes;
            for (uint eighth = 0; eighth < WIDTH / 8; ++eighth) {
                simdgroup_bfloat8x8 key[2], query[BANDS];
                simdgroup_load(key[0], keys + eighth * 8, WIDTH, ulong2(0), true);
                simdgroup_load(key[1], keys + eighth * 8 + 8 * WIDTH, WIDTH, ulong2(0), true);
#pragma unroll
                for (uint band = 0; band < BANDS; ++band) {
                    simdgroup_load(query[band], packed + band * 8 * WIDTH + eighth * 64, 8);
                }
#pragma unroll
                for (uint band = 0; band < BANDS; ++band) {
                    simdgroup_multiply_accumulate(products[band][0], query[band], key[0], products[band][0]);
                    simdgroup_multiply_accumulate(products[band][1], query[band], key[1], products[band][1]);
                }
            }
        }
        // The weights before have been multiplied.
        threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
        for (uint band = 0; band < BANDS; ++band) {
            threadgroup float* to = scores + band * BAND_SCORES + simdgroup * 128;
            simdgroup_store(products[band][0], to, 8);
            simdgroup_store(products[band][1], to + 64, 8);
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);

        threadgroup float* band_scores = scores + simdgroup * BAND_SCORES;
        float4 own[4];
        float largest = NOWHERE;
#pragma unroll
        for (uint i = 0; i < 4; ++i) {
            // Quads lane % 4, and every fourth behind it.
            uint quad = lane % 4 + i * 4;
            float4 score = *(threadgroup const float4*)(band_scores + quad / 2 * 64 + own_row * 8 + quad % 2 * 4);
#pragma unroll
            for (uint j = 0; j < 4; ++j) {
                own[i][j] = first + quad * 4 + j <= place ? score[j] * factor : NOWHERE;
                largest = max(largest, own[i][j]);
            }
        }
        largest = max(largest, simd_shuffle_xor(largest, ushort(1)));
        largest = max(largest, simd_shuffle_xor(largest, ushort(2)));
        float next = largest > reference + SLACK ? ceil(largest) : reference;
        float kept = power_of_two(reference - next);
        bool changes = simd_any(next != reference) && first > 0;
        reference = next;
        float total = 0.0f;
        Weights::begin();
#pragma unroll
        for (uint i = 0; i < 4; ++i) {
            uint quad = lane % 4 + i * 4;
            float4 p = exp2(own[i] - float4(reference));
            total += (p.x + p.y) + (p.z + p.w);
            Weights::put(band_scores, quad / 2 * 64 + own_row * 8 + quad % 2 * 4, p);
        }
        total += simd_shuffle_xor(total, ushort(1));
        total += simd_shuffle_xor(total, ushort(2));
        weight = fma(weight, kept, total);
        if (lane % 4 == 0) diagonals[simdgroup * 64 + own_row * 9] = kept;
        if (lane == 0) changed[simdgroup] = changes ? 1 : 0;
        threadgroup_barrier(mem_flags::mem_threadgroup);

#pragma unroll
        for (uint band = 0; band < BANDS; ++band) {
            if (changed[band] == 0) continue;
            simdgroup_float8x8 diagonal;
            simdgroup_load(diagonal, diagonals + band * 64, 8);
#pragma unroll
            for (uint block = 0; block < MOST_BLOCKS; ++block) {
                if (block >= BLOCKS) break;
                simdgroup_multiply(sums.of[band][block], diagonal, sums.of[band][block]);
            }
        }
        uint column = simdgroup * BLOCKS * 8;
        device const bfloat* values = (device const bfloat*)cached(session, layer, 1, key_head, first) + column;
        uint whole = min((limit + 1 - first) / 8, KEYS / 8);
        for (uint eighth = 0; eighth < whole; ++eighth) {
            add_values<Weights>(sums, scores, eighth, values + eighth * 8 * WIDTH, WIDTH);
        }
        if (whole < KEYS / 8 && first + whole * 8 <= limit) {
            // The last positions are not eight: what lies behind them may be anything, and zeros take its place.
            // Nobody needs the queries any more.
            threadgroup bfloat* last = packed + simdgroup * 512;
            for (uint at = lane; at < BLOCKS * 8; at += 32) {
                uint row = at % 8, from = whole * 8 + row;
                uint4 words = uint4(0u);
                if (first + from <= limit) words = *(device const uint4*)(values + from * WIDTH + at / 8 * 8);
                *(threadgroup uint4*)(last + row * 64 + at / 8 * 8) = words;
            }
            simdgroup_barrier(mem_flags::mem_threadgroup);
            add_values<Weights>(sums, scores, whole, (threadgroup const bfloat*)last, 64);
        }
    }

    if (lane % 4 == 0) inverses[own_query] = 1.0f / weight;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    // Two bands at a time through this simdgroup's own memory, so that a query's columns are written together.
    threadgroup float* stage = (threadgroup float*)query_memory + simdgroup * 1024;
#pragma unroll
    for (uint pair = 0; pair < BANDS; pair += 2) {
#pragma unroll
        for (uint block = 0; block < MOST_BLOCKS; ++block) {
            if (block >= BLOCKS) break;
            simdgroup_store(sums.of[pair][block], stage + block * 64, 8);
            simdgroup_store(sums.of[pair + 1][block], stage + (MOST_BLOCKS + block) * 64, 8);
        }
        simdgroup_barrier(mem_flags::mem_threadgroup);
        for (uint at = lane; at < 16 * BLOCKS; at += 32) {
            uint band = at / (8 * BLOCKS), block = at / 8 % BLOCKS, row = at % 8;
            uint own = (pair + band) * 8 + row, query = first_query + own;
            if (query >= query_count) continue;
            threadgroup const float4* from =
                (threadgroup const float4*)(stage + (band * MOST_BLOCKS + block) * 64 + row * 8);
            float inverse = inverses[own];
            ulong head = (ulong)(query / GROUP_HEADS) * QUERY_HEADS + key_head * GROUP_HEADS + query % GROUP_HEADS;
            ulong to = head * WIDTH + (simdgroup * BLOCKS + block) * 8;
            store4(output, to, from[0] * inverse, true);
            store4(output, to + 4, from[1] * inverse, true);
        }
        simdgroup_barrier(mem_flags::mem_threadgroup);
    }
}
template [[host_name("tile_attend_split")]] kernel decltype(tile_attend<SplitWeights>) tile_attend<SplitWeights>;
template [[host_name("tile_attend_float")]] kernel decltype(tile_attend<FloatWeights>) tile_attend<FloatWeights>;
