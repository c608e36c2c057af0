// Queries and keys made ready: norm by head, rotary embedding, the cache. One kernel does all of it for decode and
// prompts alike; the parts exist for plans without it.
#include "attention.h"

// Turns one head, which its simdgroup has put into threadgroup memory, by the position's angles: the pair (i, i + ROTARY/2)
// by position · frequencies[i], a product in float.
inline float rotated(threadgroup const float* head, uint column, float position, device const float* frequencies) {
    constexpr uint half_count = 2;
    uint half_width = ROTARY / half_count;
    float x = head[column];
    if (column >= ROTARY) return x;
    float2 turn = cosine_sine(position * frequencies[column % half_width]);
    if (column < half_width) return x * turn.x - head[column + half_width] * turn.y;
    return x * turn.x + head[column - half_width] * turn.y;
}

// Norm of one head by a simdgroup: its columns, lane by lane, times 1 / rms and weight.
inline float head_factor(device const uchar* input, ulong first, uint lane) {
    float squares = 0.0f;
    for (uint column = lane; column < WIDTH; column += 32) {
        float x = load1(input, first + column, INPUT_BFLOAT);
        squares += x * x;
    }
    return precise::rsqrt(sum_lanes(squares) / float(WIDTH) + EPSILON);
}

constant bool VALUES_BFLOAT [[function_constant(8)]];

// Contract. For each row: queries [QUERY_HEADS · WIDTH] = rotated norm of the first halves of query_gate's heads, rounded to
// their type; rotated norm of keys, and values, appended to the cache at the row's position, rounded to its type.
// frequencies [ROTARY / 2]. A simdgroup a head: query heads, then KV heads; 4 a threadgroup; grid: heads / 4, rows.
kernel void query_key_prepare(
    device const Session* sessions [[buffer(0)]],
    device const uchar* query_gate [[buffer(1)]],
    device const uchar* keys [[buffer(2)]],
    device const uchar* values [[buffer(3)]],
    device const float* query_norm [[buffer(4)]],
    device const float* key_norm [[buffer(5)]],
    device const float* frequencies [[buffer(6)]],
    device uchar* queries [[buffer(7)]],
    constant uint& layer [[buffer(8)]],
    uint2 position [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]])
{
    threadgroup float normed[4 * 256];
    threadgroup float* mine = normed + simdgroup * 256;
    uint head = position.x * 4 + simdgroup, row = position.y;
    if (head >= QUERY_HEADS + KEY_VALUE_HEADS) return;
    bool is_query = head < QUERY_HEADS;
    uint key_head = is_query ? 0 : head - QUERY_HEADS;
    device const uchar* input = is_query ? query_gate : keys;
    device const float* weight = is_query ? query_norm : key_norm;
    ulong first = is_query ? ((ulong)row * QUERY_HEADS + head) * 2 * WIDTH
                           : ((ulong)row * KEY_VALUE_HEADS + key_head) * WIDTH;
    float factor = head_factor(input, first, lane);
    for (uint column = lane; column < WIDTH; column += 32) {
        mine[column] = load1(input, first + column, INPUT_BFLOAT) * factor * weight[column];
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
    uint place = position_of(sessions, row);
    Session session = sessions[session_of(row)];
    for (uint column = lane; column < WIDTH; column += 32) {
        float x = rotated(mine, column, float(place), frequencies);
        if (is_query) {
            store1(queries, ((ulong)row * QUERY_HEADS + head) * WIDTH + column, x, OUTPUT_BFLOAT);
        } else {
            store1(cached(session, layer, 0, key_head, place), column, x, CACHE_BFLOAT);
            float value = load1(values, first + column, VALUES_BFLOAT);
            store1(cached(session, layer, 1, key_head, place), column, value, CACHE_BFLOAT);
        }
    }
}

constant uint HEADS [[function_constant(9)]];
constant uint STRIDE [[function_constant(10)]];

// Contract. output [rows, HEADS · WIDTH] = norm of each head; heads of the input lie STRIDE apart. A simdgroup a head
// and row, 4 a threadgroup; grid: HEADS · rows / 4.
kernel void head_norm(
    device const uchar* input [[buffer(0)]],
    device const float* weight [[buffer(1)]],
    device uchar* output [[buffer(2)]],
    constant uint& head_count [[buffer(3)]],
    uint position [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]])
{
    uint head = position * 4 + simdgroup;
    if (head >= head_count) return;
    ulong first = (ulong)head * STRIDE;
    float factor = head_factor(input, first, lane);
    for (uint column = lane; column < WIDTH; column += 32) {
        float x = load1(input, first + column, INPUT_BFLOAT) * factor * weight[column];
        store1(output, (ulong)head * WIDTH + column, x, OUTPUT_BFLOAT);
    }
}

// Contract. output [rows, HEADS · WIDTH] = each head of the input turned by its row's position. A simdgroup a head and
// row, 4 a threadgroup; grid: HEADS · rows / 4.
kernel void rotate_heads(
    device const Session* sessions [[buffer(0)]],
    device const uchar* input [[buffer(1)]],
    device const float* frequencies [[buffer(2)]],
    device uchar* output [[buffer(3)]],
    constant uint& head_count [[buffer(4)]],
    uint position [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]])
{
    threadgroup float heads[4 * 256];
    threadgroup float* mine = heads + simdgroup * 256;
    uint head = position * 4 + simdgroup;
    if (head >= head_count) return;
    ulong first = (ulong)head * WIDTH;
    for (uint column = lane; column < WIDTH; column += 32) mine[column] = load1(input, first + column, INPUT_BFLOAT);
    simdgroup_barrier(mem_flags::mem_threadgroup);
    float place = float(position_of(sessions, head / HEADS));
    for (uint column = lane; column < WIDTH; column += 32) {
        store1(output, first + column, rotated(mine, column, place, frequencies), OUTPUT_BFLOAT);
    }
}

// Contract. keys and values [rows, KV heads · WIDTH] appended to the cache at the rows' positions, rounded to its type.
// One thread an element; grid: KV heads · WIDTH / 256, rows.
kernel void cache_write(
    device const Session* sessions [[buffer(0)]],
    device const uchar* keys [[buffer(1)]],
    device const uchar* values [[buffer(2)]],
    constant uint& layer [[buffer(3)]],
    uint2 position [[thread_position_in_grid]])
{
    uint column = position.x, row = position.y, width = KEY_VALUE_HEADS * WIDTH;
    if (column >= width) return;
    uint head = column / WIDTH, place = position_of(sessions, row);
    Session session = sessions[session_of(row)];
    ulong at = (ulong)row * width + column;
    store1(cached(session, layer, 0, head, place), column % WIDTH, load1(keys, at, INPUT_BFLOAT), CACHE_BFLOAT);
    store1(cached(session, layer, 1, head, place), column % WIDTH, load1(values, at, VALUES_BFLOAT), CACHE_BFLOAT);
}
