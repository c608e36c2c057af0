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

// Columns of a head that a lane holds: WIDTH / 32, side by side.
constant uint LANE_WIDTH = WIDTH / 32;
constant constexpr uint MOST_LANE_WIDTH = 8;
constant constexpr uint SIMDGROUPS = 8;

struct LaneColumns {
    float of[MOST_LANE_WIDTH];
};

// A lane's columns of a head that begins at `base`.
inline LaneColumns load_columns(device const uchar* base, uint lane, bool is_bfloat) {
    LaneColumns x;
    if (LANE_WIDTH == 8 && is_bfloat) {
        uint4 words = *(device const uint4*)(base + lane * 16);
        for (uint i = 0; i < 4; ++i) {
            float2 pair = unpack_bfloats(words[i]);
            x.of[2 * i] = pair.x;
            x.of[2 * i + 1] = pair.y;
        }
    } else if (LANE_WIDTH % 4 == 0) {
        for (uint i = 0; i < MOST_LANE_WIDTH; i += 4) {
            if (i >= LANE_WIDTH) break;
            float4 part = load4(base, lane * LANE_WIDTH + i, is_bfloat);
            for (uint j = 0; j < 4; ++j) x.of[i + j] = part[j];
        }
    } else {
        for (uint i = 0; i < MOST_LANE_WIDTH; ++i) {
            if (i < LANE_WIDTH) x.of[i] = load1(base, lane * LANE_WIDTH + i, is_bfloat);
        }
    }
    return x;
}

// A head's running softmax: its largest score, the sum of weights and this lane's columns of the weighted values.
struct Running {
    float largest;
    float weight;
    LaneColumns sums;
};

// Brings two running softmaxes over different positions together.
inline void join(thread Running& mine, float largest, float weight, LaneColumns sums) {
    float top = max(mine.largest, largest);
    // No position yet on either side: both weights are zero.
    float own = mine.largest == -INFINITY ? 0.0f : exp(mine.largest - top);
    float other = largest == -INFINITY ? 0.0f : exp(largest - top);
    mine.weight = mine.weight * own + weight * other;
    for (uint i = 0; i < MOST_LANE_WIDTH; ++i) {
        if (i < LANE_WIDTH) mine.sums.of[i] = mine.sums.of[i] * own + sums.of[i] * other;
    }
    mine.largest = top;
}

// Contract. For a row, H query heads of one KV head and one block of positions [block · BLOCK, ..) up to the row's own:
// D weighted sums, the largest score, the sum of weights; or, WHOLE, the sums over the weight, rounded to the output's
// type. queries [rows, QUERY_HEADS · WIDTH]; output [rows, QUERY_HEADS, BLOCKS, WIDTH + 2] f32, or [rows,
// QUERY_HEADS · WIDTH]. Blocks behind a row's position are not written.
// Eight simdgroups take the positions in turn; their softmaxes are joined in the order of a tree, the same for every
// block. Grid: blocks, KV heads · (heads of a group / H), rows.
template <int H>
kernel void attend(
    device const Session* sessions [[buffer(0)]],
    device const uchar* queries [[buffer(1)]],
    device uchar* output [[buffer(2)]],
    constant uint& layer [[buffer(3)]],
    uint3 position [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]])
{
    threadgroup float shared_sums[4 * 256 * H];
    threadgroup float shared_scalars[8 * H];
    uint row = position.z, block = position.x, packs = GROUP_HEADS / H;
    uint key_head = position.y / packs, first_head = key_head * GROUP_HEADS + position.y % packs * H;
    uint place = position_of(sessions, row);
    uint start = block * BLOCK, end = min(start + BLOCK, place + 1);
    if (start > place) return;
    Session session = sessions[session_of(row)];
    float scale = precise::rsqrt(float(WIDTH));

    LaneColumns query[H];
    Running running[H];
    ulong query_bytes = (ulong)WIDTH * (INPUT_BFLOAT ? 2 : 4);
    for (int h = 0; h < H; ++h) {
        query[h] = load_columns(queries + ((ulong)row * QUERY_HEADS + first_head + h) * query_bytes, lane, INPUT_BFLOAT);
        running[h].largest = -INFINITY;
        running[h].weight = 0.0f;
        for (uint i = 0; i < MOST_LANE_WIDTH; ++i) running[h].sums.of[i] = 0.0f;
    }
    for (uint at = start + simdgroup; at < end; at += SIMDGROUPS) {
        LaneColumns key = load_columns(cached(session, layer, 0, key_head, at), lane, CACHE_BFLOAT);
        LaneColumns value = load_columns(cached(session, layer, 1, key_head, at), lane, CACHE_BFLOAT);
        float4 scores = float4(0.0f);
        for (int h = 0; h < H; ++h) {
            for (uint i = 0; i < MOST_LANE_WIDTH; ++i) {
                if (i < LANE_WIDTH) scores[h] = fma(query[h].of[i], key.of[i], scores[h]);
            }
        }
        scores = sum_lanes(scores) * scale;
        for (int h = 0; h < H; ++h) {
            float top = max(running[h].largest, scores[h]);
            float keep = exp(running[h].largest - top), p = exp(scores[h] - top);
            running[h].largest = top;
            running[h].weight = running[h].weight * keep + p;
            for (uint i = 0; i < MOST_LANE_WIDTH; ++i) {
                if (i < LANE_WIDTH) running[h].sums.of[i] = fma(p, value.of[i], running[h].sums.of[i] * keep);
            }
        }
    }
    // A tree over simdgroups: the upper half hands its results to the lower half.
    for (uint half_count = SIMDGROUPS / 2; half_count > 0; half_count /= 2) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (simdgroup >= half_count && simdgroup < 2 * half_count) {
            uint slot = simdgroup - half_count;
            for (int h = 0; h < H; ++h) {
                for (uint i = 0; i < MOST_LANE_WIDTH; ++i) {
                    if (i < LANE_WIDTH) shared_sums[(slot * H + h) * 256 + i * 32 + lane] = running[h].sums.of[i];
                }
                if (lane == 0) {
                    shared_scalars[(slot * H + h) * 2] = running[h].largest;
                    shared_scalars[(slot * H + h) * 2 + 1] = running[h].weight;
                }
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (simdgroup < half_count) {
            for (int h = 0; h < H; ++h) {
                LaneColumns sums;
                for (uint i = 0; i < MOST_LANE_WIDTH; ++i) {
                    if (i < LANE_WIDTH) sums.of[i] = shared_sums[(simdgroup * H + h) * 256 + i * 32 + lane];
                }
                float largest = shared_scalars[(simdgroup * H + h) * 2];
                join(running[h], largest, shared_scalars[(simdgroup * H + h) * 2 + 1], sums);
            }
        }
    }
    if (simdgroup != 0) return;
    for (int h = 0; h < H; ++h) {
        ulong head = (ulong)row * QUERY_HEADS + first_head + h;
        ulong first = WHOLE ? head * WIDTH : (head * BLOCKS + block) * (WIDTH + 2);
        float factor = WHOLE ? 1.0f / running[h].weight : 1.0f;
        bool is_bfloat = WHOLE && OUTPUT_BFLOAT;
        for (uint i = 0; i < MOST_LANE_WIDTH; ++i) {
            if (i < LANE_WIDTH) {
                store1(output, first + lane * LANE_WIDTH + i, running[h].sums.of[i] * factor, is_bfloat);
            }
        }
        if (!WHOLE && lane == 0) {
            store1(output, first + WIDTH, running[h].largest, false);
            store1(output, first + WIDTH + 1, running[h].weight, false);
        }
    }
}
template [[host_name("attend_1")]] kernel decltype(attend<1>) attend<1>;
template [[host_name("attend_2")]] kernel decltype(attend<2>) attend<2>;
template [[host_name("attend_4")]] kernel decltype(attend<4>) attend<4>;

// Contract. output [rows, QUERY_HEADS · WIDTH] = the blocks of `attend` put together in ascending order; GATED: times
// sigmoid of the second halves of query_gate's heads. A threadgroup of WIDTH threads a head and row.
kernel void merge_blocks(
    device const Session* sessions [[buffer(0)]],
    device const float* partials [[buffer(1)]],
    device const uchar* query_gate [[buffer(2), function_constant(GATED)]],
    device uchar* output [[buffer(3)]],
    uint2 position [[threadgroup_position_in_grid]],
    uint column [[thread_index_in_threadgroup]])
{
    uint row = position.y;
    ulong head = (ulong)row * QUERY_HEADS + position.x;
    device const float* blocks = partials + head * BLOCKS * (WIDTH + 2);
    uint used = position_of(sessions, row) / BLOCK + 1;
    float largest = -INFINITY;
    for (uint block = 0; block < used; ++block) largest = max(largest, blocks[block * (WIDTH + 2) + WIDTH]);
    float sum = 0.0f, weight = 0.0f;
    for (uint block = 0; block < used; ++block) {
        device const float* at = blocks + block * (WIDTH + 2);
        float scale = exp(at[WIDTH] - largest);
        weight += scale * at[WIDTH + 1];
        sum = fma(scale, at[column], sum);
    }
    float value = sum / weight;
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
