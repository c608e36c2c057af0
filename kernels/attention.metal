// Causal attention over the cache, a query row at a time: decode, and whole prompts in f32. Query heads that share a KV
// head are packed into a threadgroup, so that each key and value is read once for all of them. Scores, softmax and
// sums are f32.
#include "attention.h"

// Positions of a block of partial attention.
constant uint BLOCK [[function_constant(8)]];
// Blocks that the output has room for.
constant uint BLOCKS [[function_constant(9)]];
// Whether the result is the finished attention over all positions (one block), or a block's sums.
constant bool WHOLE [[function_constant(10)]];
constant bool GATE_BFLOAT [[function_constant(11)]];
constant bool GATED [[function_constant(12)]];
// For measuring alone: whether a lane's columns of the cache come in one load, or one by one.
constant bool COALESCED [[function_constant(13)]];

// Columns of a head that a lane holds: WIDTH / 32, side by side.
constant uint LANE_WIDTH = WIDTH / 32;
constant constexpr uint MOST_LANE_WIDTH = 8;
constant constexpr uint SIMDGROUPS = 8;

struct LaneColumns {
    float of[MOST_LANE_WIDTH];
};

// A lane's columns as they are stored: eight bfloats in the first half, or up to eight floats in both.
struct StoredColumns {
    uint4 low;
    uint4 high;
};

// A lane's columns of a head that begins at `base`, `together` or one by one.
inline StoredColumns load_stored(device const uchar* base, uint lane, bool is_bfloat, bool together) {
    StoredColumns x;
    x.low = uint4(0u);
    x.high = uint4(0u);
    if (LANE_WIDTH == 8 && is_bfloat && together) {
        x.low = *(device const uint4*)(base + lane * 16);
    } else if (LANE_WIDTH == 8 && is_bfloat) {
        device const ushort* columns = (device const ushort*)(base + lane * 16);
#pragma unroll
        for (uint i = 0; i < 4; ++i) x.low[i] = uint(columns[2 * i]) | uint(columns[2 * i + 1]) << 16;
    } else if (LANE_WIDTH % 4 == 0 && together) {
        x.low = as_type<uint4>(load4(base, lane * LANE_WIDTH, is_bfloat));
        if (LANE_WIDTH == 8) x.high = as_type<uint4>(load4(base, lane * LANE_WIDTH + 4, is_bfloat));
    } else {
#pragma unroll
        for (uint i = 0; i < 4; ++i) {
            uint column = lane * LANE_WIDTH + i;
            if (i < LANE_WIDTH) x.low[i] = as_type<uint>(load1(base, column, is_bfloat));
            if (i + 4 < LANE_WIDTH) x.high[i] = as_type<uint>(load1(base, column + 4, is_bfloat));
        }
    }
    return x;
}

inline LaneColumns unpack_columns(StoredColumns stored, bool is_bfloat) {
    LaneColumns x;
    if (LANE_WIDTH == 8 && is_bfloat) {
#pragma unroll
        for (uint i = 0; i < 4; ++i) {
            float2 pair = unpack_bfloats(stored.low[i]);
            x.of[2 * i] = pair.x;
            x.of[2 * i + 1] = pair.y;
        }
    } else {
#pragma unroll
        for (uint i = 0; i < 4; ++i) {
            x.of[i] = as_type<float>(stored.low[i]);
            x.of[i + 4] = as_type<float>(stored.high[i]);
        }
    }
    return x;
}

// Positions that a simdgroup takes at once.
constant constexpr int POSITIONS = 4;

// One step of `scatter_sums`: half of the values go to the lanes `distance` away.
template <int HALF, int N> inline void scatter_half(thread float (&values)[N], uint lane, ushort distance) {
    bool upper = (lane & distance) != 0;
#pragma unroll
    for (int i = 0; i < HALF; ++i) {
        float given = upper ? values[i] : values[i + HALF];
        float kept = upper ? values[i + HALF] : values[i];
        values[i] = kept + simd_shuffle_xor(given, distance);
    }
}

// Sums each of N values (4, 8 or 16) over the lanes and leaves value `lane / (32 / N)` in each lane: half of the values
// go to the other half of the lanes at each step, so that N values cost about N exchanges. The order of each sum is
// that of `sum_lanes`.
template <int N> inline float scatter_sums(thread float (&values)[N], uint lane) {
    if (N == 16) scatter_half<(N > 8 ? 8 : 1)>(values, lane, 16);
    if (N >= 8) scatter_half<(N > 4 ? 4 : 1)>(values, lane, 128 / N);
    scatter_half<2>(values, lane, 64 / N);
    scatter_half<1>(values, lane, 32 / N);
    float sum = values[0];
#pragma unroll
    for (ushort distance = 16 / N; distance > 0; distance /= 2) sum += simd_shuffle_xor(sum, distance);
    return sum;
}

// Contract. For a row, H query heads of one KV head and one block of positions [block · BLOCK, ..) up to the row's own:
// D weighted sums, the largest score, the sum of weights; or, WHOLE, the sums over the weight, rounded to the output's
// type. queries [rows, QUERY_HEADS · WIDTH]; output [rows, QUERY_HEADS, BLOCKS, WIDTH + 2] f32, or [rows,
// QUERY_HEADS · WIDTH]. Blocks behind a row's position are not written.
// Eight simdgroups take four positions each in turn: a lane has WIDTH / 32 columns of every head's query, so a key is
// one load of 512 bytes by the simdgroup; the 4 · H scores are summed over lanes together, each by some of the lanes,
// which also keep its head's softmax; the weights are handed round for the values. The simdgroups' softmaxes are
// joined in the order of a tree, the same for every block.
// Grid: blocks, KV heads · (heads of a group / H), rows; or a part of them from `first_row` on.
template <int H>
kernel void attend(
    device const Session* sessions [[buffer(0)]],
    device const uchar* queries [[buffer(1)]],
    device uchar* output [[buffer(2)]],
    constant uint& layer [[buffer(3)]],
    constant uint& first_row [[buffer(4)]],
    uint3 position [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]])
{
    threadgroup float shared_sums[4 * 256 * H];
    threadgroup float shared_scalars[8 * H];
    uint row = first_row + position.z, block = position.x, packs = GROUP_HEADS / H;
    uint key_head = position.y / packs, first_head = key_head * GROUP_HEADS + position.y % packs * H;
    uint place = position_of(sessions, row);
    uint start = block * BLOCK, end = min(start + BLOCK, place + 1);
    if (start > place) return;
    Session session = sessions[session_of(row)];
    float scale = precise::rsqrt(float(WIDTH));

    LaneColumns query[H], sums[H];
    ulong query_bytes = (ulong)WIDTH * (INPUT_BFLOAT ? 2 : 4);
#pragma unroll
    for (int h = 0; h < H; ++h) {
        device const uchar* head = queries + ((ulong)row * QUERY_HEADS + first_head + h) * query_bytes;
        query[h] = unpack_columns(load_stored(head, lane, INPUT_BFLOAT, true), INPUT_BFLOAT);
        for (uint i = 0; i < MOST_LANE_WIDTH; ++i) sums[h].of[i] = 0.0f;
    }
    // This lane's value is that of head lane / (32 / H) and, within it, of one of the positions; its largest score and
    // sum of weights are the head's.
    constexpr uint LANES_A_VALUE = 32 / (POSITIONS * H), LANES_A_HEAD = 32 / H;
    uint own_position = lane % LANES_A_HEAD / LANES_A_VALUE;
    float largest = -INFINITY, weight = 0.0f;
    for (uint at = start + simdgroup * POSITIONS; at < end; at += SIMDGROUPS * POSITIONS) {
        float partial[POSITIONS * H];
        StoredColumns values[POSITIONS];
        // All of them lie on one page, one after the other.
        device const uchar* keys = cached(session, layer, 0, key_head, at);
        device const uchar* page_values = keys + VALUES_BEHIND_KEYS;
#pragma unroll
        for (int p = 0; p < POSITIONS; ++p) {
            // Behind the last position the last one again: what is there may be anything.
            uint offset = (min(at + p, end - 1) - at) * WIDTH * ELEMENT_BYTES;
            StoredColumns stored = load_stored(keys + offset, lane, CACHE_BFLOAT, COALESCED);
            LaneColumns key = unpack_columns(stored, CACHE_BFLOAT);
#pragma unroll
            for (int h = 0; h < H; ++h) {
                float sum = 0.0f;
#pragma unroll
                for (uint i = 0; i < MOST_LANE_WIDTH; ++i) {
                    if (i < LANE_WIDTH) sum = fma(query[h].of[i], key.of[i], sum);
                }
                partial[h * POSITIONS + p] = sum;
            }
        }
        // On their way while scores are summed; before, they would take registers that the keys need.
#pragma unroll
        for (int p = 0; p < POSITIONS; ++p) {
            uint offset = (min(at + p, end - 1) - at) * WIDTH * ELEMENT_BYTES;
            values[p] = load_stored(page_values + offset, lane, CACHE_BFLOAT, COALESCED);
        }
        float score = scatter_sums<POSITIONS * H>(partial, lane) * scale;
        if (at + own_position >= end) score = -INFINITY;
        float top = max(largest, score);
        for (ushort distance = LANES_A_VALUE; distance < LANES_A_HEAD; distance *= 2) {
            top = max(top, simd_shuffle_xor(top, distance));
        }
        float keep = exp(largest - top), p_own = exp(score - top), added = p_own;
        for (ushort distance = LANES_A_VALUE; distance < LANES_A_HEAD; distance *= 2) {
            added += simd_shuffle_xor(added, distance);
        }
        largest = top;
        weight = weight * keep + added;
#pragma unroll
        for (int h = 0; h < H; ++h) {
            float kept = simd_broadcast(keep, ushort(h * LANES_A_HEAD));
#pragma unroll
            for (uint i = 0; i < MOST_LANE_WIDTH; ++i) sums[h].of[i] *= kept;
        }
#pragma unroll
        for (int p = 0; p < POSITIONS; ++p) {
            LaneColumns value = unpack_columns(values[p], CACHE_BFLOAT);
#pragma unroll
            for (int h = 0; h < H; ++h) {
                float share = simd_broadcast(p_own, ushort(h * LANES_A_HEAD + p * LANES_A_VALUE));
#pragma unroll
                for (uint i = 0; i < MOST_LANE_WIDTH; ++i) {
                    if (i < LANE_WIDTH) sums[h].of[i] = fma(share, value.of[i], sums[h].of[i]);
                }
            }
        }
    }
    // A tree over simdgroups: the upper half hands its results to the lower half.
    for (uint half_count = SIMDGROUPS / 2; half_count > 0; half_count /= 2) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (simdgroup >= half_count && simdgroup < 2 * half_count) {
            uint slot = simdgroup - half_count;
#pragma unroll
            for (int h = 0; h < H; ++h) {
#pragma unroll
                for (uint i = 0; i < MOST_LANE_WIDTH; ++i) {
                    if (i < LANE_WIDTH) shared_sums[(slot * H + h) * 256 + i * 32 + lane] = sums[h].of[i];
                }
            }
            if (lane % LANES_A_HEAD == 0) {
                shared_scalars[(slot * H + lane / LANES_A_HEAD) * 2] = largest;
                shared_scalars[(slot * H + lane / LANES_A_HEAD) * 2 + 1] = weight;
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (simdgroup < half_count) {
            float other = shared_scalars[(simdgroup * H + lane / LANES_A_HEAD) * 2];
            float other_weight = shared_scalars[(simdgroup * H + lane / LANES_A_HEAD) * 2 + 1];
            float top = max(largest, other);
            // No position on one side: its weight is zero. The first simdgroup always has one.
            float keep = largest == -INFINITY ? 0.0f : exp(largest - top);
            float take = other == -INFINITY ? 0.0f : exp(other - top);
            weight = weight * keep + other_weight * take;
            largest = top;
#pragma unroll
            for (int h = 0; h < H; ++h) {
                float kept = simd_broadcast(keep, ushort(h * LANES_A_HEAD));
                float taken = simd_broadcast(take, ushort(h * LANES_A_HEAD));
#pragma unroll
                for (uint i = 0; i < MOST_LANE_WIDTH; ++i) {
                    if (i < LANE_WIDTH) {
                        float theirs = shared_sums[(simdgroup * H + h) * 256 + i * 32 + lane];
                        sums[h].of[i] = sums[h].of[i] * kept + theirs * taken;
                    }
                }
            }
        }
    }
    if (simdgroup != 0) return;
#pragma unroll
    for (int h = 0; h < H; ++h) {
        ulong head = (ulong)row * QUERY_HEADS + first_head + h;
        ulong first = WHOLE ? head * WIDTH : (head * BLOCKS + block) * (WIDTH + 2);
        float total = simd_broadcast(weight, ushort(h * LANES_A_HEAD));
        float factor = WHOLE ? 1.0f / total : 1.0f;
        bool is_bfloat = WHOLE && OUTPUT_BFLOAT;
#pragma unroll
        for (uint i = 0; i < MOST_LANE_WIDTH; ++i) {
            if (i < LANE_WIDTH) store1(output, first + lane * LANE_WIDTH + i, sums[h].of[i] * factor, is_bfloat);
        }
        if (!WHOLE && lane == h * LANES_A_HEAD) {
            store1(output, first + WIDTH, largest, false);
            store1(output, first + WIDTH + 1, weight, false);
        }
    }
}
template [[host_name("attend_1")]] kernel decltype(attend<1>) attend<1>;
template [[host_name("attend_2")]] kernel decltype(attend<2>) attend<2>;
template [[host_name("attend_4")]] kernel decltype(attend<4>) attend<4>;

// Blocks of a row.
constant constexpr uint MOST_BLOCKS = 1024;

// Contract. output [rows, QUERY_HEADS · WIDTH] = the blocks of `attend` put together in ascending order; GATED: times
// sigmoid of the second halves of query_gate's heads. At most MOST_BLOCKS blocks. A threadgroup of WIDTH threads a head
// and row: the threads share out the blocks' largest scores and weights, then each adds its own column's sums.
kernel void merge_blocks(
    device const Session* sessions [[buffer(0)]],
    device const float* partials [[buffer(1)]],
    device const uchar* query_gate [[buffer(2), function_constant(GATED)]],
    device uchar* output [[buffer(3)]],
    uint2 position [[threadgroup_position_in_grid]],
    uint column [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]])
{
    threadgroup float scales[MOST_BLOCKS];
    threadgroup float tops[8];
    threadgroup float weights[8];
    uint row = position.y;
    ulong head = (ulong)row * QUERY_HEADS + position.x;
    device const float* blocks = partials + head * BLOCKS * (WIDTH + 2);
    uint used = position_of(sessions, row) / BLOCK + 1;
    float largest = -INFINITY;
    for (uint block = column; block < used; block += WIDTH) {
        largest = max(largest, blocks[block * (WIDTH + 2) + WIDTH]);
    }
    for (ushort distance = 16; distance > 0; distance /= 2) largest = max(largest, simd_shuffle_xor(largest, distance));
    if (lane == 0) tops[simdgroup] = largest;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint s = 0; s < WIDTH / 32; ++s) largest = max(largest, tops[s]);
    float weight = 0.0f;
    for (uint block = column; block < used; block += WIDTH) {
        device const float* at = blocks + block * (WIDTH + 2) + WIDTH;
        float scale = exp(at[0] - largest);
        scales[block] = scale;
        weight = fma(scale, at[1], weight);
    }
    weight = sum_lanes(weight);
    if (lane == 0) weights[simdgroup] = weight;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float total = 0.0f, sum = 0.0f;
    for (uint s = 0; s < WIDTH / 32; ++s) total += weights[s];
    for (uint block = 0; block < used; ++block) sum = fma(scales[block], blocks[block * (WIDTH + 2) + column], sum);
    float value = sum / total;
    if (GATED) value *= sigmoid(load1(query_gate, head * 2 * WIDTH + WIDTH + column, GATE_BFLOAT));
    store1(output, head * WIDTH + column, value, OUTPUT_BFLOAT);
}

// Contract. output = input · sigmoid(gate), the gate being the second half of each head of query_gate. A threadgroup of
// WIDTH threads a head and row.
kernel void output_gate(
    device const uchar* input [[buffer(0)]],
    device const uchar* query_gate [[buffer(1)]],
    device uchar* output [[buffer(2)]],
    uint2 position [[threadgroup_position_in_grid]],
    uint column [[thread_index_in_threadgroup]])
{
    ulong head = (ulong)position.y * QUERY_HEADS + position.x;
    float gate = load1(query_gate, head * 2 * WIDTH + WIDTH + column, GATE_BFLOAT);
    store1(output, head * WIDTH + column, load1(input, head * WIDTH + column, INPUT_BFLOAT) * sigmoid(gate), OUTPUT_BFLOAT);
}
