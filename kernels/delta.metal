// Gated DeltaNet: convolution, preparation, scan and norm over the rows of a prompt; and all of them in one step for
// decode.
#include "delta.h"

constant uint TAPS [[function_constant(4)]];
constant float EPSILON [[function_constant(5)]];
constant bool GATE_BFLOAT [[function_constant(7)]];
constant bool HISTORY_BFLOAT [[function_constant(9)]];

// exp(−exp(a_log) · softplus(a + dt_bias)), softplus without overflow.
inline float decay_of(float a, float a_log, float dt_bias) {
    float x = a + dt_bias;
    float small = exp(-fabs(x));
    // log(1 + small), exact where 1 + small loses small's last bits.
    float up = 1.0f + small;
    float log_up = up == 1.0f ? small : log(up) * (small / (up - 1.0f));
    return exp(-exp(a_log) * (max(x, 0.0f) + log_up));
}

// Contract. output [rows, CHANNELS] = silu of the causal convolution of (history, input) over time; the last TAPS − 1
// rows of (history, input) become the next history. taps [CHANNELS, TAPS], the last on the current row. One
// thread a channel and row; grid: channels, rows. The thread of row 0 also writes its channel's history.
kernel void convolve(
    device const Session* sessions [[buffer(0)]],
    device const uchar* input [[buffer(1)]],
    device const float* tap_weights [[buffer(2)]],
    device uchar* output [[buffer(3)]],
    constant uint& history [[buffer(4)]],
    constant uint& row_count [[buffer(5)]],
    uint2 position [[thread_position_in_grid]])
{
    uint channel = position.x, row = position.y;
    if (channel >= CHANNELS) return;
    Session session = sessions[session_of(row)];
    device const uchar* live = session.live + history;
    // Rows of this session before this one in the run, and in all.
    uint earlier = SEQUENCE ? row : 0, own_rows = SEQUENCE ? row_count : 1;
    ulong first_row = row - earlier;
    float sum = 0.0f;
    for (uint tap = 0; tap < TAPS; ++tap) {
        // Row of (history, input) that the tap falls on.
        uint at = earlier + tap;
        float x = at < TAPS - 1 ? load1(live, (ulong)at * CHANNELS + channel, HISTORY_BFLOAT)
                                : load1(input, (first_row + at - (TAPS - 1)) * CHANNELS + channel, INPUT_BFLOAT);
        sum = fma(tap_weights[channel * TAPS + tap], x, sum);
    }
    store1(output, (ulong)row * CHANNELS + channel, silu(sum), OUTPUT_BFLOAT);
    if (earlier == 0) {
        device uchar* next = session.next + history;
        for (uint kept = 0; kept < TAPS - 1; ++kept) {
            uint at = own_rows + kept;
            float x = at < TAPS - 1 ? load1(live, (ulong)at * CHANNELS + channel, HISTORY_BFLOAT)
                                    : load1(input, (first_row + at - (TAPS - 1)) * CHANNELS + channel, INPUT_BFLOAT);
            store1(next, (ulong)kept * CHANNELS + channel, x, HISTORY_BFLOAT);
        }
    }
}

// Contract. query_key [rows, 2 · KEYS] = each head of convolved's queries and keys over sqrt(Σ squares + 1e-6), queries
// also over sqrt(KEY_WIDTH); decay and strength [rows, VALUE_HEADS] f32. A simdgroup a head and row; grid: 2 ·
// key heads / 8, rows. The threads of the first threadgroup of a row also make its decays and strengths.
kernel void delta_prepare(
    device const uchar* convolved [[buffer(0)]],
    device const float* a [[buffer(1)]],
    device const float* b [[buffer(2)]],
    device const float* a_log [[buffer(3)]],
    device const float* dt_bias [[buffer(4)]],
    device uchar* query_key [[buffer(5)]],
    device float* decay [[buffer(6)]],
    device float* strength [[buffer(7)]],
    uint2 position [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]])
{
    uint row = position.y;
    if (position.x == 0) {
        for (uint head = thread_index; head < VALUE_HEADS; head += 256) {
            uint at = row * VALUE_HEADS + head;
            decay[at] = decay_of(a[at], a_log[head], dt_bias[head]);
            strength[at] = sigmoid(b[at]);
        }
    }
    uint head = position.x * 8 + simdgroup;
    if (head >= 2 * KEY_HEADS) return;
    bool inside = lane * 4 < KEY_WIDTH;
    float4 x = float4(0.0f);
    if (inside) x = load4(convolved, (ulong)row * CHANNELS + head * KEY_WIDTH + lane * 4, INPUT_BFLOAT);
    float factor = precise::rsqrt(sum_lanes(dot(x, x)) + 1e-6f);
    if (head < KEY_HEADS) factor *= precise::rsqrt(float(KEY_WIDTH));
    if (inside) store4(query_key, (ulong)row * 2 * KEYS + head * KEY_WIDTH + lane * 4, x * factor, OUTPUT_BFLOAT);
}

// The scan's tokens of a batch, and rows of the state: two a lane, eight a simdgroup, 32 a threadgroup.
constant constexpr uint BATCH = 8;
constant constexpr uint LANE_ROWS = 2;
constant constexpr uint SCAN_ROWS = 32;
// For measuring alone: whether the state goes to memory and comes back every so many rows.
constant bool BLOCKWISE [[function_constant(10)]];
constant constexpr uint BLOCKWISE_ROWS = 64;

// Where a batch lies in threadgroup memory.
struct Batch {
    // By token: the query's quads, and those of the next token's key.
    float4 vectors[BATCH][2][MOST_WIDTH / 4];
    float values[BATCH][SCAN_ROWS];
    float decays[BATCH];
    float strengths[BATCH];
};

// What a thread has read of the batch to come: a quad of every second token's query or next key, a row of two
// tokens' values, and a decay or strength.
struct Ahead {
    float4 quads[BATCH / 2];
    float values[2];
    float scalar;
};

// Reads the batch that begins at `row`, for rows `first` on of a head. Tokens that there are not change nothing.
inline void read_ahead(
    thread Ahead& ahead, device const float* query_key, device const uchar* convolved, device const float* decay,
    device const float* strength, uint row, uint end, uint head, uint first, uint thread_index)
{
    uint is_key = thread_index / 32 % 2, column = thread_index % 32 * 4;
    device const float* quads = query_key + is_key * KEYS + head / (VALUE_HEADS / KEY_HEADS) * KEY_WIDTH + column;
#pragma unroll
    for (uint i = 0; i < BATCH / 2; ++i) {
        uint token = row + thread_index / 64 + i * 2 + is_key;
        ahead.quads[i] = float4(0.0f);
        if (token < end && column < KEY_WIDTH) {
            ahead.quads[i] = *(device const float4*)(quads + (ulong)token * 2 * KEYS);
        }
    }
    uint value = first + thread_index % SCAN_ROWS;
#pragma unroll
    for (uint i = 0; i < 2; ++i) {
        uint token = row + thread_index / SCAN_ROWS + i * (BATCH / 2);
        ahead.values[i] = 0.0f;
        if (token < end && value < VALUE_WIDTH) {
            ulong at = (ulong)token * CHANNELS + 2 * KEYS + head * VALUE_WIDTH + value;
            ahead.values[i] = load1(convolved, at, INPUT_BFLOAT);
        }
    }
    bool is_decay = thread_index < BATCH;
    uint token = row + thread_index % BATCH;
    ahead.scalar = is_decay ? 1.0f : 0.0f;
    if (token < end && thread_index < 2 * BATCH) {
        ahead.scalar = (is_decay ? decay : strength)[token * VALUE_HEADS + head];
    }
}

inline void stage(threadgroup Batch& batch, thread const Ahead& ahead, uint thread_index) {
#pragma unroll
    for (uint i = 0; i < BATCH / 2; ++i) {
        batch.vectors[thread_index / 64 + i * 2][thread_index / 32 % 2][thread_index % 32] = ahead.quads[i];
    }
#pragma unroll
    for (uint i = 0; i < 2; ++i) {
        batch.values[thread_index / SCAN_ROWS + i * (BATCH / 2)][thread_index % SCAN_ROWS] = ahead.values[i];
    }
    if (thread_index < BATCH) {
        batch.decays[thread_index] = ahead.scalar;
    } else if (thread_index < 2 * BATCH) {
        batch.strengths[thread_index - BATCH] = ahead.scalar;
    }
}

// A token's operands, as a lane has them.
struct Token {
    Part query;
    Part next_key;
    float2 value;
    float strength;
};

// Takes token `at` of the batch, and begins with it: S <- gS.
inline float take(
    thread Token& token, thread StateRows<LANE_ROWS>& state, threadgroup const Batch& batch, uint at, uint pair,
    uint lane)
{
    load_part(token.query, batch.vectors[at][0], lane);
    load_part(token.next_key, batch.vectors[at][1], lane);
    token.value = float2(batch.values[at][pair * 2], batch.values[at][pair * 2 + 1]);
    token.strength = batch.strengths[at];
    float decay = batch.decays[at];
#pragma unroll
    for (uint row = 0; row < LANE_ROWS; ++row) scale_part(state.of[row], decay);
    return decay;
}

// Contract. The gated delta rule over the rows in order; output y [rows, VALUE_HEADS · VALUE_WIDTH]. Queries and keys
// are f32 [rows, 2 · KEYS]; values are convolved's last columns. The state stays in registers from the first row to
// the last: it is read once and written once, whatever the number of rows (unless BLOCKWISE). Sums are in one fixed
// order: neither a row's result nor the state depends on how a prompt is cut into runs. 4 simdgroups a threadgroup;
// grid: value width / 32, value heads, sessions.
//
// The chain from token to token is: change = β(v − g · Sk), S <- gS + change ⊗ k, and a sum over lanes. One sum serves
// y = Sq of a token and Sk of the next, which are of one and the same S, in two rows: three exchanges of float4 a
// token. No token waits for device memory: a batch of eight is read by the whole threadgroup, 16 bytes a thread for
// every two tokens, while the batch before is computed. A token takes eight loads of 16 bytes from threadgroup
// memory a simdgroup of eight rows; fewer lanes a row would load more, more would exchange more.
[[max_total_threads_per_threadgroup(128)]] kernel void delta_scan(
    device const Session* sessions [[buffer(0)]],
    device const float* query_key [[buffer(1)]],
    device const uchar* convolved [[buffer(2)]],
    device const float* decay [[buffer(3)]],
    device const float* strength [[buffer(4)]],
    device uchar* output [[buffer(5)]],
    constant uint& states [[buffer(6)]],
    constant uint& row_count [[buffer(7)]],
    uint3 position [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]])
{
    threadgroup Batch batch;
    threadgroup float outputs[BATCH][SCAN_ROWS];
    uint head = position.y, first = position.x * SCAN_ROWS;
    // This lane's pair of rows among the threadgroup's.
    uint pair = simdgroup * (32 / ROW_LANES) + lane / ROW_LANES, own = first + pair * 2;
    Session session = sessions[position.z];
    uint from = SEQUENCE ? 0 : position.z, end = SEQUENCE ? row_count : position.z + 1;

    StateRows<LANE_ROWS> state;
    load_state(state, session.live + states, head, own, lane);
    Ahead ahead;
    read_ahead(ahead, query_key, convolved, decay, strength, from, end, head, first, thread_index);
    Part key;
    uint key_head = head / (VALUE_HEADS / KEY_HEADS);
    load_part(key, query_key + (ulong)from * 2 * KEYS + KEYS + key_head * KEY_WIDTH, lane);
    // S of the token before by this token's key.
    float2 before = sum_row(float2(product_part(state.of[0], key), product_part(state.of[1], key)));

    for (uint row = from; row < end; row += BATCH) {
        stage(batch, ahead, thread_index);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        read_ahead(ahead, query_key, convolved, decay, strength, row + BATCH, end, head, first, thread_index);
        Token token;
        float factor = take(token, state, batch, 0, pair, lane);
#pragma unroll
        for (uint i = 0; i < BATCH; ++i) {
            float2 change = token.strength * (token.value - factor * before);
            add_part(state.of[0], change.x, key);
            add_part(state.of[1], change.y, key);
            float4 sums;
            sums.x = product_part(state.of[0], token.query);
            sums.y = product_part(state.of[1], token.query);
            sums.z = product_part(state.of[0], token.next_key);
            sums.w = product_part(state.of[1], token.next_key);
            key = token.next_key;
            // Work for while the sums are on their way.
            if (i + 1 < BATCH) factor = take(token, state, batch, i + 1, pair, lane);
            sums = sum_row(sums);
            before = sums.zw;
            if (lane % ROW_LANES == 0) *(threadgroup float2*)(outputs[i] + pair * 2) = sums.xy;
        }
        // The barrier between them keeps compilers from leaving both out.
        bool leaves = BLOCKWISE && row + BATCH < end && (row + BATCH - from) % BLOCKWISE_ROWS == 0;
        if (leaves) store_state(state, session.next + states, head, own, lane);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (leaves) load_state(state, session.next + states, head, own, lane);
#pragma unroll
        for (uint i = 0; i < 2; ++i) {
            uint at = thread_index / SCAN_ROWS + i * (BATCH / 2), value = first + thread_index % SCAN_ROWS;
            if (row + at < end && value < VALUE_WIDTH) {
                ulong out = ((ulong)(row + at) * VALUE_HEADS + head) * VALUE_WIDTH + value;
                store1(output, out, outputs[at][thread_index % SCAN_ROWS], OUTPUT_BFLOAT);
            }
        }
    }
    store_state(state, session.next + states, head, own, lane);
}

// Contract. output = weight · input / rms(input) · silu(gate) over each head of VALUE_WIDTH. A simdgroup a head and
// row; 8 simdgroups a threadgroup; grid: value heads · rows / 8.
kernel void gated_norm(
    device const uchar* input [[buffer(0)]],
    device const uchar* gate [[buffer(1)]],
    device const float* weight [[buffer(2)]],
    device uchar* output [[buffer(3)]],
    constant uint& head_count [[buffer(4)]],
    uint position [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]])
{
    uint head = position * 8 + simdgroup;
    if (head >= head_count) return;
    ulong first = (ulong)head * VALUE_WIDTH;
    float squares = 0.0f;
    for (uint column = lane; column < VALUE_WIDTH; column += 32) {
        float x = load1(input, first + column, INPUT_BFLOAT);
        squares += x * x;
    }
    float factor = precise::rsqrt(sum_lanes(squares) / float(VALUE_WIDTH) + EPSILON);
    for (uint column = lane; column < VALUE_WIDTH; column += 32) {
        float x = load1(input, first + column, INPUT_BFLOAT) * factor * weight[column];
        store1(output, first + column, x * silu(load1(gate, first + column, GATE_BFLOAT)), OUTPUT_BFLOAT);
    }
}

// Contract. Decode: convolution, preparation, one token of the delta rule and the gated norm of one value head and
// session; nothing between them is rounded or leaves the threadgroup. input [rows, CHANNELS], gate z and output
// [rows, VALUE_HEADS · VALUE_WIDTH], a and b [rows, VALUE_HEADS] f32. The value heads of one key head all convolve its
// channels; the lowest writes their history. 32 simdgroups, four rows of the state each, eight lanes a row: 64 KB of
// state in, 64 KB out, and three exchanges of five numbers a lane. 32 value heads are 32 threadgroups, fewer than two a
// core; splitting a head would need its norm, and so a second dispatch.
[[max_total_threads_per_threadgroup(1024)]] kernel void delta_step(
    device const Session* sessions [[buffer(0)]],
    device const uchar* input [[buffer(1)]],
    device const uchar* gate [[buffer(2)]],
    device const float* a [[buffer(3)]],
    device const float* b [[buffer(4)]],
    device const float* tap_weights [[buffer(5)]],
    device const float* a_log [[buffer(6)]],
    device const float* dt_bias [[buffer(7)]],
    device const float* norm [[buffer(8)]],
    device uchar* output [[buffer(9)]],
    constant uint& history [[buffer(10)]],
    constant uint& states [[buffer(11)]],
    uint2 position [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]])
{
    // Queries, keys and values of this head after the convolution.
    threadgroup float convolved[3 * MOST_WIDTH];
    threadgroup float outputs[MOST_WIDTH];
    threadgroup float mean[1];
    uint head = position.x, row = position.y, shared_by = VALUE_HEADS / KEY_HEADS, key_head = head / shared_by;
    Session session = sessions[row];
    // This lane's row of the state. The state first: its loads are under way while the convolution runs.
    uint own = simdgroup * (32 / ROW_LANES) + lane / ROW_LANES;
    StateRows<1> state;
    load_state(state, session.live + states, head, own, lane);

    device const uchar* live = session.live + history;
    device uchar* next = session.next + history;
    if (thread_index < 3 * MOST_WIDTH) {
        uint part = thread_index / MOST_WIDTH, column = thread_index % MOST_WIDTH;
        uint width = part == 2 ? VALUE_WIDTH : KEY_WIDTH;
        uint channel = part == 2 ? 2 * KEYS + head * VALUE_WIDTH + column : part * KEYS + key_head * KEY_WIDTH + column;
        float value = 0.0f;
        if (column < width) {
            bool writes = part == 2 || head % shared_by == 0;
            float newest = load1(input, (ulong)row * CHANNELS + channel, INPUT_BFLOAT);
            float sum = 0.0f;
            for (uint tap = 0; tap < TAPS - 1; ++tap) {
                float x = load1(live, (ulong)tap * CHANNELS + channel, HISTORY_BFLOAT);
                sum = fma(tap_weights[channel * TAPS + tap], x, sum);
                if (tap > 0 && writes) store1(next, (ulong)(tap - 1) * CHANNELS + channel, x, HISTORY_BFLOAT);
            }
            if (writes) store1(next, (ulong)(TAPS - 2) * CHANNELS + channel, newest, HISTORY_BFLOAT);
            value = silu(fma(tap_weights[channel * TAPS + TAPS - 1], newest, sum));
        }
        convolved[thread_index] = value;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    // All that is summed over lanes is summed at once: y = q(gS + change ⊗ k) = g · Sq + change · kq, the norms of q and k
    // beside it, by every simdgroup for itself.
    threadgroup const float4* vectors = (threadgroup const float4*)convolved;
    Part query, key;
    load_part(query, vectors, lane);
    load_part(key, vectors + MOST_WIDTH / 4, lane);
    float4 products;
    products.x = product_part(query, query);
    products.y = product_part(state.of[0], query);
    products.z = product_part(key, query);
    products.w = product_part(state.of[0], key);
    products = sum_row(products);
    float query_factor = precise::rsqrt(products.x + 1e-6f) * precise::rsqrt(float(KEY_WIDTH));
    float key_factor = precise::rsqrt(sum_row(product_part(key, key)) + 1e-6f);
    uint scalar = row * VALUE_HEADS + head;
    float decay = decay_of(a[scalar], a_log[head], dt_bias[head]);
    float value = convolved[2 * MOST_WIDTH + own];
    float change = sigmoid(b[scalar]) * (value - decay * (key_factor * products.w)) * key_factor;
    scale_part(state.of[0], decay);
    add_part(state.of[0], change, key);
    float y = query_factor * (decay * products.y + change * products.z);
    store_state(state, session.next + states, head, own, lane);
    if (lane % ROW_LANES == 0) outputs[own] = y;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (simdgroup == 0) {
        float squares = 0.0f;
        for (uint column = lane; column < VALUE_WIDTH; column += 32) squares += outputs[column] * outputs[column];
        squares = sum_lanes(squares);
        if (lane == 0) mean[0] = squares / float(VALUE_WIDTH);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (thread_index < VALUE_WIDTH) {
        ulong out = ((ulong)row * VALUE_HEADS + head) * VALUE_WIDTH + thread_index;
        float x = outputs[thread_index] * precise::rsqrt(mean[0] + EPSILON) * norm[thread_index];
        store1(output, out, x * silu(load1(gate, out, GATE_BFLOAT)), OUTPUT_BFLOAT);
    }
}
