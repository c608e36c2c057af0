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
// Everything is float. Operands rounded to bfloat would leave the state with eight bits; as sums of two bfloats, three
// products for one, with about 16, which is what the comparison with the reference allows in all.
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

// A simdgroup's own: eight columns of the chunk's tokens, a row after the other, so that blocks are 8x8 together.
struct Columns {
    float4 first[CHUNK * 2];
    float4 second[CHUNK * 2];
};

// What a threadgroup shares.
struct Shared {
    float decays[CHUNK];
    float strengths[CHUNK];
    // −βG(i, j)(k_i · k_j) below the diagonal; on it, blocks' inverses.
    Triangle changes;
    // G(i, j)(q_i · k_j).
    Triangle outputs;
    Diagonals diagonals;
    Columns columns[SIMDGROUPS];
};

// A lane's token in eight columns; zeros if there is no such token.
struct TokenPart {
    float4 of[2];
};

inline TokenPart read_token(device const float* columns, int row, uint row_count) {
    TokenPart part;
    bool inside = row >= 0 && row < int(row_count);
    device const float4* from = (device const float4*)(columns + (inside ? row : 0) * (2 * KEYS));
    part.of[0] = inside ? from[0] : float4(0.0f);
    part.of[1] = inside ? from[1] : float4(0.0f);
    return part;
}

inline void put_token(threadgroup float4* columns, thread const TokenPart& part, uint lane) {
    columns[lane * 2] = part.of[0];
    columns[lane * 2 + 1] = part.of[1];
}

inline void load_block(thread simdgroup_float8x8& block, threadgroup const float4* columns, uint row, bool transposed) {
    simdgroup_load(block, (threadgroup const float*)columns + row * 64, 8, ulong2(0), transposed);
}

// Of the products of keys with keys and of queries with keys, what a simdgroup makes: s has row s of blocks of the one
// and row 3 - s of the other, five blocks in all.
struct Products {
    simdgroup_float8x8 keys[BLOCKS];
    simdgroup_float8x8 queries[BLOCKS];
};

// Eight rows of a head's state, transposed: blocks of eight columns of a key by the rows.
struct StateBlocks {
    simdgroup_float8x8 of[MOST_KEY_BLOCKS];
};

// By block of tokens, for a simdgroup's rows of the state.
struct TokenBlocks {
    simdgroup_float8x8 of[BLOCKS];
};

// All that keys and queries are multiplied with: one another, and the state (K Sᵀ and Q Sᵀ).
inline void multiply_tokens(
    thread Products& products, thread TokenBlocks& of_keys, thread TokenBlocks& of_queries,
    thread const StateBlocks& state, threadgroup Columns& columns, device const float* queries, int start,
    uint row_count, uint simdgroup, uint lane)
{
    uint key_row = simdgroup, query_row = BLOCKS - 1 - simdgroup;
#pragma unroll
    for (uint i = 0; i < BLOCKS; ++i) {
        products.keys[i] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
        products.queries[i] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
        of_keys.of[i] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
        of_queries.of[i] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    }
    int row = start + int(lane);
    TokenPart query = read_token(queries, row, row_count), key = read_token(queries + KEYS, row, row_count);
#pragma unroll
    for (uint eighth = 0; eighth < MOST_KEY_BLOCKS; ++eighth) {
        if (eighth >= KEY_BLOCKS) break;
        put_token(columns.first, query, lane);
        put_token(columns.second, key, lane);
        simdgroup_barrier(mem_flags::mem_threadgroup);
        if (eighth + 1 < KEY_BLOCKS) {
            query = read_token(queries + (eighth + 1) * 8, row, row_count);
            key = read_token(queries + KEYS + (eighth + 1) * 8, row, row_count);
        }
        simdgroup_float8x8 left_key, left_query, block;
        load_block(left_key, columns.second, key_row, false);
        load_block(left_query, columns.first, query_row, false);
#pragma unroll
        for (uint i = 0; i < BLOCKS; ++i) {
            if (i <= key_row || i <= query_row) {
                load_block(block, columns.second, i, true);
                if (i <= key_row) simdgroup_multiply_accumulate(products.keys[i], left_key, block, products.keys[i]);
                if (i <= query_row) {
                    simdgroup_multiply_accumulate(products.queries[i], left_query, block, products.queries[i]);
                }
            }
            load_block(block, columns.second, i, false);
            simdgroup_multiply_accumulate(of_keys.of[i], block, state.of[eighth], of_keys.of[i]);
            load_block(block, columns.first, i, false);
            simdgroup_multiply_accumulate(of_queries.of[i], block, state.of[eighth], of_queries.of[i]);
        }
        simdgroup_barrier(mem_flags::mem_threadgroup);
    }
}

inline void store_products(threadgroup Shared& shared, thread const Products& products, uint simdgroup) {
    uint key_row = simdgroup, query_row = BLOCKS - 1 - simdgroup;
#pragma unroll
    for (uint i = 0; i < BLOCKS; ++i) {
        if (i <= key_row) simdgroup_store(products.keys[i], shared.changes.of + block_of(key_row, i), 8);
        if (i <= query_row) simdgroup_store(products.queries[i], shared.outputs.of + block_of(query_row, i), 8);
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
    uint own = lane % 8;
#pragma unroll
    for (uint row = 0; row < 8; ++row) {
        column[row] = row == own ? 1.0f : 0.0f;
#pragma unroll
        for (uint before = 0; before < 8; ++before) {
            if (before < row) column[row] = fma(block[row * 8 + before], column[before], column[row]);
        }
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
    if (lane < 8) {
#pragma unroll
        for (uint row = 0; row < 8; ++row) block[row * 8 + lane] = column[row];
    }
}

// The changes in place of K Sᵀ, from that and the values.
inline void solve_changes(
    thread TokenBlocks& changes, threadgroup const Shared& shared, threadgroup const float4* values)
{
#pragma unroll
    for (uint i = 0; i < BLOCKS; ++i) {
        simdgroup_float8x8 left, value, sum;
        simdgroup_load(left, shared.diagonals.taken + i * 64, 8);
        simdgroup_multiply(sum, left, changes.of[i]);
        simdgroup_load(left, shared.diagonals.strength + i * 64, 8);
        load_block(value, values, i, false);
        simdgroup_multiply_accumulate(sum, left, value, sum);
#pragma unroll
        for (uint j = 0; j < BLOCKS; ++j) {
            if (j >= i) continue;
            simdgroup_load(left, shared.changes.of + block_of(i, j), 8);
            simdgroup_multiply_accumulate(sum, left, changes.of[j], sum);
        }
        simdgroup_load(left, shared.changes.of + block_of(i, i), 8);
        simdgroup_multiply(changes.of[i], left, sum);
    }
}

// The outputs in place of Q Sᵀ.
inline void add_changes(
    thread TokenBlocks& outputs, threadgroup const Shared& shared, thread const TokenBlocks& changes)
{
#pragma unroll
    for (uint i = 0; i < BLOCKS; ++i) {
        simdgroup_float8x8 left;
        simdgroup_load(left, shared.diagonals.decay + i * 64, 8);
        simdgroup_multiply(outputs.of[i], left, outputs.of[i]);
#pragma unroll
        for (uint j = 0; j < BLOCKS; ++j) {
            if (j > i) continue;
            simdgroup_load(left, shared.outputs.of + block_of(i, j), 8);
            simdgroup_multiply_accumulate(outputs.of[i], left, changes.of[j], outputs.of[i]);
        }
    }
}

// S <- G(31) S + Σ G(31, j) c_j ⊗ k_j. Spends the changes.
inline void add_tokens(
    thread StateBlocks& state, thread TokenBlocks& changes, threadgroup const Shared& shared,
    threadgroup float4* columns, device const float* keys, int start, uint row_count, uint lane)
{
    simdgroup_float8x8 factor;
#pragma unroll
    for (uint i = 0; i < BLOCKS; ++i) {
        simdgroup_load(factor, shared.diagonals.rest + i * 64, 8);
        simdgroup_multiply(changes.of[i], factor, changes.of[i]);
    }
    simdgroup_load(factor, shared.diagonals.whole, 8);
    int row = start + int(lane);
    TokenPart key = read_token(keys, row, row_count);
#pragma unroll
    for (uint eighth = 0; eighth < MOST_KEY_BLOCKS; ++eighth) {
        if (eighth >= KEY_BLOCKS) break;
        put_token(columns, key, lane);
        simdgroup_barrier(mem_flags::mem_threadgroup);
        if (eighth + 1 < KEY_BLOCKS) key = read_token(keys + (eighth + 1) * 8, row, row_count);
        simdgroup_multiply(state.of[eighth], factor, state.of[eighth]);
#pragma unroll
        for (uint i = 0; i < BLOCKS; ++i) {
            simdgroup_float8x8 block;
            load_block(block, columns, i, true);
            simdgroup_multiply_accumulate(state.of[eighth], block, changes.of[i], state.of[eighth]);
        }
        simdgroup_barrier(mem_flags::mem_threadgroup);
    }
}

// Contract. As delta_scan, for consecutive rows of session 0: the same results but for the last bits, since sums are in
// another order. KEY_WIDTH and VALUE_WIDTH are multiples of 8. The state is read once and written once.
// Chunks lie at multiples of 32 positions of the session, and a row's sums do not depend on the rows behind it: results
// are the same bit for bit however a prompt is cut into runs at such positions. Exception: where a run begins within a
// chunk, that chunk's sums are in two parts, and from there on the last bits are others.
//
// A simdgroup has eight rows of a head's state, in 32 registers a lane at a width of 128; 4 of them share the
// triangles, which do not depend on the state. Grid: value width / 32, value heads. By counting, for a chunk and
// simdgroup at a width of 128: 64 products of 8x8 for K Sᵀ, 64 for Q Sᵀ, 64 + 16 for the state, 36 for the system, the
// outputs and their decays, and 80 for its share of the triangles: 324, or 5,184 multiplications of a lane. The
// scan's are 16 · 4 · 2 · 32 = 4,096 in the same time. So this form can win only where matrix units are faster
// than lanes; it has three barriers of a threadgroup for 32 tokens, and each simdgroup reads queries once and keys
// twice from memory, 16 bytes a lane.
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
    uint head = position.y, first = (position.x * SIMDGROUPS + simdgroup) * 8;
    // Whether this simdgroup has rows of the state; each has its share of the triangles.
    bool active = first < VALUE_WIDTH;
    Session session = sessions[0];
    device const float* queries = query_key + head / (VALUE_HEADS / KEY_HEADS) * KEY_WIDTH;
    ulong at = ((ulong)head * VALUE_WIDTH + first) * KEY_WIDTH;

    StateBlocks state;
    device const float* live = (device const float*)(session.live + states) + at;
#pragma unroll
    for (uint eighth = 0; eighth < MOST_KEY_BLOCKS; ++eighth) {
        if (eighth >= KEY_BLOCKS) break;
        state.of[eighth] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
        if (active) simdgroup_load(state.of[eighth], live + eighth * 8, KEY_WIDTH, ulong2(0), true);
    }
    for (uint i = thread_index; i < BLOCKS * 64; i += SIMDGROUPS * 32) {
        shared.diagonals.strength[i] = 0.0f;
        shared.diagonals.taken[i] = 0.0f;
        shared.diagonals.decay[i] = 0.0f;
        shared.diagonals.rest[i] = 0.0f;
        if (i < 64) shared.diagonals.whole[i] = 0.0f;
    }

    threadgroup float4* values = shared.columns[simdgroup].first;
    threadgroup float4* results = shared.columns[simdgroup].second;
    for (int start = -int(session.position % CHUNK); start < int(row_count); start += int(CHUNK)) {
        Products products;
        TokenBlocks changes, outputs;
        multiply_tokens(
            products, changes, outputs, state, shared.columns[simdgroup], queries, start, row_count, simdgroup, lane);
        // The chunk before has been multiplied.
        threadgroup_barrier(mem_flags::mem_threadgroup);
        store_products(shared, products, simdgroup);
        int row = start + int(lane);
        bool inside = row >= 0 && row < int(row_count);
        if (simdgroup == 0) {
            // A token that there is not changes nothing.
            shared.decays[lane] = inside ? decay[row * VALUE_HEADS + head] : 1.0f;
            shared.strengths[lane] = inside ? strength[row * VALUE_HEADS + head] : 0.0f;
        }
        TokenPart value;
        value.of[0] = float4(0.0f);
        value.of[1] = float4(0.0f);
        if (inside && active) {
            ulong from = (ulong)row * CHANNELS + 2 * KEYS + head * VALUE_WIDTH + first;
            value.of[0] = load4(convolved, from, INPUT_BFLOAT);
            value.of[1] = load4(convolved, from + 4, INPUT_BFLOAT);
        }
        put_token(values, value, lane);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        scale_products(shared, simdgroup, lane);
        simdgroup_barrier(mem_flags::mem_threadgroup);
        invert_block(shared, simdgroup, lane);
        threadgroup_barrier(mem_flags::mem_threadgroup);

        solve_changes(changes, shared, values);
        add_changes(outputs, shared, changes);
#pragma unroll
        for (uint i = 0; i < BLOCKS; ++i) simdgroup_store(outputs.of[i], (threadgroup float*)results + i * 64, 8);
        simdgroup_barrier(mem_flags::mem_threadgroup);
        if (inside && active) {
            ulong to = ((ulong)row * VALUE_HEADS + head) * VALUE_WIDTH + first;
            store4(output, to, results[lane * 2], OUTPUT_BFLOAT);
            store4(output, to + 4, results[lane * 2 + 1], OUTPUT_BFLOAT);
        }
        add_tokens(state, changes, shared, values, queries + KEYS, start, row_count, lane);
    }

    if (!active) return;
    device float* next = (device float*)(session.next + states) + at;
#pragma unroll
    for (uint eighth = 0; eighth < MOST_KEY_BLOCKS; ++eighth) {
        if (eighth >= KEY_BLOCKS) break;
        simdgroup_store(state.of[eighth], next + eighth * 8, KEY_WIDTH, ulong2(0), true);
    }
}
