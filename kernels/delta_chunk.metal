// The scan of Gated DeltaNet by chunks of 32 tokens, on simdgroup matrices.
//
// Of a chunk's tokens i, j with keys k, queries q, values v, strengths β and decays g; let G(i, j) be the product of the
// decays after j up to i, and G(i) that of all up to i. With the state S before the chunk, the delta rule's changes c
// and outputs y are, unrolled,
//
//     c_i = β_i (v_i − G(i) S k_i) − Σ_{j < i} β_i G(i, j) (k_i · k_j) c_j
//     y_i = G(i) S q_i + Σ_{j <= i} G(i, j) (q_i · k_j) c_j
//     S  <- G(31) S + Σ_j G(31, j) c_j ⊗ k_j
//
// The first is a system with a lower triangle of ones on its diagonal: it is solved by blocks of eight tokens, each by
// the inverse of its own triangle, so that all but those inverses is products of 8x8.
//
// Everything is float: operands that were rounded to bfloat would leave the state with 8 bits, and the sum of two
// bfloats each, three products for one, with about 16, where rounding of float sums is far below.
#include "delta.h"
#include <metal_simdgroup_matrix>

// Tokens of a chunk, in blocks of eight.
constant constexpr uint CHUNK = 32;
constant constexpr uint BLOCKS = CHUNK / 8;
constant constexpr uint SIMDGROUPS = 4;
// Blocks of eight columns of a key.
constant constexpr uint MOST_KEY_BLOCKS = MOST_WIDTH / 8;
constant uint KEY_BLOCKS = KEY_WIDTH / 8;

// A matrix of tokens by tokens, of which the blocks on and below the diagonal are kept, each 8x8 together.
struct Triangle {
    float of[BLOCKS * (BLOCKS + 1) / 2 * 64];
};
inline uint block_of(uint row, uint column) { return (row * (row + 1) / 2 + column) * 64; }

// Diagonal matrices, by block of tokens; off their diagonals they are zeros always.
struct Diagonals {
    float strength[BLOCKS * 64];
    // −βG(i): what the state has for a key is taken from the value.
    float taken[BLOCKS * 64];
    // G(i) and G(31, i).
    float decay[BLOCKS * 64];
    float rest[BLOCKS * 64];
    // G(31) throughout.
    float whole[64];
};
inline uint diagonal_of(uint token) { return token / 8 * 64 + token % 8 * 9; }

// What a threadgroup shares.
struct Shared {
    float decays[CHUNK];
    float strengths[CHUNK];
    // −βG(i, j)(k_i · k_j) below the diagonal; on it, blocks' inverses.
    Triangle changes;
    // G(i, j)(q_i · k_j).
    Triangle outputs;
    Diagonals diagonals;
    // A simdgroup's own.
    float4 own[SIMDGROUPS][CHUNK * 8 / 4];
};

// Eight columns of rows `row` to `row + 7` of a run's: straight from memory, but where some of them are not the run's,
// through this simdgroup's own memory, and zeros for those.
template <class Matrix, class T>
inline void load_rows(
    thread Matrix& block, device const T* from, ulong stride, int row, uint row_count, bool transposed,
    threadgroup T* own, uint lane)
{
    if (row >= 0 && row + 8 <= int(row_count)) {
        simdgroup_load(block, from + row * stride, stride, ulong2(0), transposed);
        return;
    }
    for (uint at = lane; at < 64; at += 32) {
        int place = row + int(at / 8);
        own[at] = place >= 0 && place < int(row_count) ? from[place * stride + at % 8] : T(0.0f);
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
    simdgroup_load(block, own, 8, ulong2(0), transposed);
    simdgroup_barrier(mem_flags::mem_threadgroup);
}

// The chunk's products of keys with keys and queries with keys: simdgroup s has row s of blocks of the one and row
// 3 - s of the other, five blocks in all.
struct Products {
    simdgroup_float8x8 keys[BLOCKS];
    simdgroup_float8x8 queries[BLOCKS];
};

inline void multiply_keys(
    thread Products& products, device const float* queries, device const float* keys, int start, uint row_count,
    threadgroup float* own, uint simdgroup, uint lane)
{
    uint key_row = simdgroup, query_row = BLOCKS - 1 - simdgroup;
#pragma unroll
    for (uint j = 0; j < BLOCKS; ++j) {
        products.keys[j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
        products.queries[j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    }
    for (uint column = 0; column < KEY_WIDTH; column += 8) {
        simdgroup_float8x8 key, query;
        load_rows(key, keys + column, 2 * KEYS, start + int(key_row) * 8, row_count, false, own, lane);
        load_rows(query, queries + column, 2 * KEYS, start + int(query_row) * 8, row_count, false, own, lane);
#pragma unroll
        for (uint j = 0; j < BLOCKS; ++j) {
            if (j > key_row && j > query_row) continue;
            simdgroup_float8x8 other;
            load_rows(other, keys + column, 2 * KEYS, start + int(j) * 8, row_count, true, own, lane);
            if (j <= key_row) simdgroup_multiply_accumulate(products.keys[j], key, other, products.keys[j]);
            if (j <= query_row) simdgroup_multiply_accumulate(products.queries[j], query, other, products.queries[j]);
        }
    }
}

inline void store_products(threadgroup Shared& shared, thread const Products& products, uint simdgroup) {
    uint key_row = simdgroup, query_row = BLOCKS - 1 - simdgroup;
#pragma unroll
    for (uint j = 0; j < BLOCKS; ++j) {
        if (j <= key_row) simdgroup_store(products.keys[j], shared.changes.of + block_of(key_row, j), 8);
        if (j <= query_row) simdgroup_store(products.queries[j], shared.outputs.of + block_of(query_row, j), 8);
    }
}

// Decays into the products, and the diagonals. Simdgroup s has row s of the blocks, a lane a column: it multiplies the
// decays one by one, so that nothing is divided by what may be zero.
inline void scale_products(threadgroup Shared& shared, uint simdgroup, uint lane) {
    uint first = simdgroup * 8;
    if (lane / 8 <= simdgroup) {
        float ratio = 1.0f;
        for (uint token = lane + 1; token < first; ++token) ratio *= shared.decays[token];
        for (uint row = 0; row < 8; ++row) {
            uint token = first + row, place = block_of(simdgroup, lane / 8) + row * 8 + lane % 8;
            if (token > lane) ratio *= shared.decays[token];
            float change = shared.changes.of[place], output = shared.outputs.of[place];
            shared.changes.of[place] = token > lane ? -(shared.strengths[token] * ratio) * change : 0.0f;
            shared.outputs.of[place] = token >= lane ? ratio * output : 0.0f;
        }
        if (simdgroup == BLOCKS - 1) shared.diagonals.rest[diagonal_of(lane)] = ratio;
    }
    if (simdgroup == 0) {
        float decay = shared.decays[0], strength = shared.strengths[lane];
        for (uint token = 1; token <= lane; ++token) decay *= shared.decays[token];
        shared.diagonals.strength[diagonal_of(lane)] = strength;
        shared.diagonals.taken[diagonal_of(lane)] = -(strength * decay);
        shared.diagonals.decay[diagonal_of(lane)] = decay;
        float whole = simd_broadcast(decay, ushort(CHUNK - 1));
        if (lane < 8) shared.diagonals.whole[lane * 9] = whole;
    }
}

// The block of simdgroup s on the diagonal becomes the inverse of its triangle: a lane a column.
inline void invert_block(threadgroup Shared& shared, uint simdgroup, uint lane) {
    threadgroup float* block = shared.changes.of + block_of(simdgroup, simdgroup);
    float column[8];
    if (lane < 8) {
#pragma unroll
        for (uint row = 0; row < 8; ++row) {
            column[row] = row == lane ? 1.0f : 0.0f;
#pragma unroll
            for (uint before = 0; before < row; ++before) {
                column[row] = fma(block[row * 8 + before], column[before], column[row]);
            }
        }
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
    if (lane < 8) {
#pragma unroll
        for (uint row = 0; row < 8; ++row) block[row * 8 + lane] = column[row];
    }
}

// Eight rows of a head's state, transposed: blocks of eight columns of a key by the rows.
struct StateBlocks {
    simdgroup_float8x8 of[MOST_KEY_BLOCKS];
};

// By block of tokens, for a simdgroup's rows of the state.
struct Columns {
    simdgroup_float8x8 of[BLOCKS];
};

// K Sᵀ and Q Sᵀ.
inline void multiply_state(
    thread Columns& of_keys, thread Columns& of_queries, thread const StateBlocks& state, device const float* queries,
    device const float* keys, int start, uint row_count, threadgroup float* own, uint lane)
{
#pragma unroll
    for (uint i = 0; i < BLOCKS; ++i) {
        of_keys.of[i] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
        of_queries.of[i] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    }
#pragma unroll
    for (uint eighth = 0; eighth < MOST_KEY_BLOCKS; ++eighth) {
        if (eighth >= KEY_BLOCKS) break;
#pragma unroll
        for (uint i = 0; i < BLOCKS; ++i) {
            simdgroup_float8x8 key, query;
            int row = start + int(i) * 8;
            load_rows(key, keys + eighth * 8, 2 * KEYS, row, row_count, false, own, lane);
            load_rows(query, queries + eighth * 8, 2 * KEYS, row, row_count, false, own, lane);
            simdgroup_multiply_accumulate(of_keys.of[i], key, state.of[eighth], of_keys.of[i]);
            simdgroup_multiply_accumulate(of_queries.of[i], query, state.of[eighth], of_queries.of[i]);
        }
    }
}

// The changes, from K Sᵀ and the values: in place of the former.
inline void solve_changes(
    thread Columns& changes, threadgroup const Shared& shared, device const uchar* convolved, ulong column, int start,
    uint row_count, threadgroup float* own, uint lane)
{
#pragma unroll
    for (uint i = 0; i < BLOCKS; ++i) {
        simdgroup_float8x8 left, sum;
        simdgroup_load(left, shared.diagonals.taken + i * 64, 8);
        simdgroup_multiply(sum, left, changes.of[i]);
        simdgroup_load(left, shared.diagonals.strength + i * 64, 8);
        int row = start + int(i) * 8;
        if (INPUT_BFLOAT) {
            simdgroup_bfloat8x8 values;
            device const bfloat* from = (device const bfloat*)convolved + column;
            load_rows(values, from, CHANNELS, row, row_count, false, (threadgroup bfloat*)own, lane);
            simdgroup_multiply_accumulate(sum, left, values, sum);
        } else {
            simdgroup_float8x8 values;
            load_rows(values, (device const float*)convolved + column, CHANNELS, row, row_count, false, own, lane);
            simdgroup_multiply_accumulate(sum, left, values, sum);
        }
#pragma unroll
        for (uint j = 0; j < i; ++j) {
            simdgroup_load(left, shared.changes.of + block_of(i, j), 8);
            simdgroup_multiply_accumulate(sum, left, changes.of[j], sum);
        }
        simdgroup_load(left, shared.changes.of + block_of(i, i), 8);
        simdgroup_multiply(changes.of[i], left, sum);
    }
}

// Contract. As delta_scan, for consecutive rows of session 0: the same results but for the last bits, since sums are in
// another order. KEY_WIDTH and VALUE_WIDTH are multiples of 8. The state is read once and written once.
// Chunks lie at multiples of 32 positions of the session. Sums of rows before a row do not depend on where the run
// ends, and those of a chunk not on the run if it begins at or before the chunk: so results are the same bit for
// bit however a prompt is cut into runs at multiples of 32. Exception: a run that begins within a chunk has the sums of
// that chunk in two parts, and last bits from there on are others.
//
// A simdgroup has eight rows of a head's state, in 32 registers a lane at a width of 128; 4 of them share the
// triangles, which do not depend on the state. Grid: value width / 32, value heads. By counting, for a chunk and
// simdgroup at a width of 128: 64 products of 8x8 for K Sᵀ, 64 for Q Sᵀ, 64 + 16 for the state, 36 for the system, the
// outputs and their decays, and 80 for its share of the triangles: 324, or 5,184 multiplications of a lane. The
// scan's are 16 · 4 · 2 · 32 = 4,096 in the same time. So this form can win only where matrix units are faster
// than lanes; it has three barriers of a threadgroup for 32 tokens, and 3 · 64 + 5.5 · 16 loads of 8x8 of queries and keys.
[[max_total_threads_per_threadgroup(128)]] kernel void delta_chunk(
    device const Session* sessions [[buffer(0)]],
    device const float* query_key [[buffer(1)]],
    device const uchar* convolved [[buffer(2)]],
    device const float* decay [[buffer(3)]],
    device const float* strength [[buffer(4)]],
    device uchar* output [[buffer(5)]],
    constant uint& states [[buffer(6)]],
    constant uint& row_count [[buffer(7)]],
    uint2 position [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]])
{
    threadgroup Shared shared;
    threadgroup float* own = (threadgroup float*)shared.own[simdgroup];
    uint head = position.y, first = (position.x * SIMDGROUPS + simdgroup) * 8;
    bool active = first < VALUE_WIDTH;
    Session session = sessions[0];
    device const float* queries = query_key + head / (VALUE_HEADS / KEY_HEADS) * KEY_WIDTH;
    device const float* keys = queries + KEYS;
    ulong column = 2 * KEYS + head * VALUE_WIDTH + first, at = ((ulong)head * VALUE_WIDTH + first) * KEY_WIDTH;

    StateBlocks state;
    if (active) {
        device const float* live = (device const float*)(session.live + states) + at;
#pragma unroll
        for (uint eighth = 0; eighth < MOST_KEY_BLOCKS; ++eighth) {
            if (eighth >= KEY_BLOCKS) break;
            simdgroup_load(state.of[eighth], live + eighth * 8, KEY_WIDTH, ulong2(0), true);
        }
    }
    for (uint i = thread_index; i < BLOCKS * 64; i += SIMDGROUPS * 32) {
        shared.diagonals.strength[i] = 0.0f;
        shared.diagonals.taken[i] = 0.0f;
        shared.diagonals.decay[i] = 0.0f;
        shared.diagonals.rest[i] = 0.0f;
        if (i < 64) shared.diagonals.whole[i] = 0.0f;
    }

    for (int start = -int(session.position % CHUNK); start < int(row_count); start += int(CHUNK)) {
        Products products;
        multiply_keys(products, queries, keys, start, row_count, own, simdgroup, lane);
        // The chunk before has been multiplied.
        threadgroup_barrier(mem_flags::mem_threadgroup);
        store_products(shared, products, simdgroup);
        if (thread_index < CHUNK) {
            // A token that there is not changes nothing.
            int row = start + int(thread_index);
            bool inside = row >= 0 && row < int(row_count);
            shared.decays[thread_index] = inside ? decay[row * VALUE_HEADS + head] : 1.0f;
            shared.strengths[thread_index] = inside ? strength[row * VALUE_HEADS + head] : 0.0f;
        }
        Columns changes, outputs;
        if (active) multiply_state(changes, outputs, state, queries, keys, start, row_count, own, lane);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        scale_products(shared, simdgroup, lane);
        simdgroup_barrier(mem_flags::mem_threadgroup);
        invert_block(shared, simdgroup, lane);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (!active) continue;

        solve_changes(changes, shared, convolved, column, start, row_count, own, lane);
#pragma unroll
        for (uint i = 0; i < BLOCKS; ++i) {
            simdgroup_float8x8 left;
            simdgroup_load(left, shared.diagonals.decay + i * 64, 8);
            simdgroup_multiply(outputs.of[i], left, outputs.of[i]);
#pragma unroll
            for (uint j = 0; j <= i; ++j) {
                simdgroup_load(left, shared.outputs.of + block_of(i, j), 8);
                simdgroup_multiply_accumulate(outputs.of[i], left, changes.of[j], outputs.of[i]);
            }
            simdgroup_store(outputs.of[i], own + i * 64, 8);
        }
#pragma unroll
        for (uint i = 0; i < BLOCKS; ++i) {
            simdgroup_float8x8 left;
            simdgroup_load(left, shared.diagonals.rest + i * 64, 8);
            simdgroup_multiply(changes.of[i], left, changes.of[i]);
        }
        simdgroup_float8x8 whole;
        simdgroup_load(whole, shared.diagonals.whole, 8);
#pragma unroll
        for (uint eighth = 0; eighth < MOST_KEY_BLOCKS; ++eighth) {
            if (eighth >= KEY_BLOCKS) break;
            simdgroup_multiply(state.of[eighth], whole, state.of[eighth]);
        }
        simdgroup_barrier(mem_flags::mem_threadgroup);
        for (uint quad = lane; quad < CHUNK * 2; quad += 32) {
            int row = start + int(quad / 2);
            if (row < 0 || row >= int(row_count)) continue;
            ulong to = ((ulong)row * VALUE_HEADS + head) * VALUE_WIDTH + first + quad % 2 * 4;
            store4(output, to, shared.own[simdgroup][quad], OUTPUT_BFLOAT);
        }
        simdgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
        for (uint eighth = 0; eighth < MOST_KEY_BLOCKS; ++eighth) {
            if (eighth >= KEY_BLOCKS) break;
#pragma unroll
            for (uint i = 0; i < BLOCKS; ++i) {
                simdgroup_float8x8 key;
                load_rows(key, keys + eighth * 8, 2 * KEYS, start + int(i) * 8, row_count, true, own, lane);
                simdgroup_multiply_accumulate(state.of[eighth], key, changes.of[i], state.of[eighth]);
            }
        }
    }

    if (!active) return;
    device float* next = (device float*)(session.next + states) + at;
#pragma unroll
    for (uint eighth = 0; eighth < MOST_KEY_BLOCKS; ++eighth) {
        if (eighth >= KEY_BLOCKS) break;
        simdgroup_store(state.of[eighth], next + eighth * 8, KEY_WIDTH, ulong2(0), true);
    }
}
