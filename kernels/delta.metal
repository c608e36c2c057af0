// Gated DeltaNet: convolution, preparation, scan and norm over the rows of a prompt; and all of them in one step for
// decode. The recurrent state is [value heads, value width, key width] f32; the lanes of a simdgroup share a row
// of it, four columns each, so that it is read and written in full lines and a product with it is a sum over lanes.
#include "session.h"

constant uint KEY_HEADS [[function_constant(0)]];
constant uint VALUE_HEADS [[function_constant(1)]];
// Width of a key head; a multiple of 4, at most 128.
constant uint KEY_WIDTH [[function_constant(2)]];
// Width of a value head; at most 128.
constant uint VALUE_WIDTH [[function_constant(3)]];
constant uint TAPS [[function_constant(4)]];
constant float EPSILON [[function_constant(5)]];
constant bool INPUT_BFLOAT [[function_constant(6)]];
constant bool GATE_BFLOAT [[function_constant(7)]];
constant bool OUTPUT_BFLOAT [[function_constant(8)]];
constant bool HISTORY_BFLOAT [[function_constant(9)]];

constant uint KEYS = KEY_HEADS * KEY_WIDTH;
constant uint CHANNELS = 2 * KEYS + VALUE_HEADS * VALUE_WIDTH;
constant constexpr uint MOST_WIDTH = 128;

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

// A simdgroup's rows of the state: four columns a lane.
constant constexpr int SCAN_ROWS = 4;

// One token of the gated delta rule for SCAN_ROWS rows of the state: S ← gS; u = S·k; S ← S + β(v − u)⊗k; y = S·q.
inline float4 delta_rule(
    thread float4 (&state)[SCAN_ROWS], float4 query, float4 key, float4 value, float decay, float strength)
{
    float4 u;
    for (int r = 0; r < SCAN_ROWS; ++r) {
        state[r] *= decay;
        u[r] = dot(state[r], key);
    }
    u = sum_lanes(u);
    float4 change = strength * (value - u), y;
    for (int r = 0; r < SCAN_ROWS; ++r) {
        state[r] += change[r] * key;
        y[r] = dot(state[r], query);
    }
    return sum_lanes(y);
}

// Contract. The gated delta rule over the rows in order; output y [rows, VALUE_HEADS · VALUE_WIDTH]. The state stays
// in registers from the first row to the last: it is read once and written once, whatever the number of rows.
// A simdgroup takes SCAN_ROWS rows of one head's state; grid: value width / (4 · SCAN_ROWS), value heads, sessions;
// 4 simdgroups a threadgroup. Queries and keys are f32 ([rows, 2 · KEYS]); values are convolved's last columns.
kernel void delta_scan(
    device const Session* sessions [[buffer(0)]],
    device const float* query_key [[buffer(1)]],
    device const uchar* convolved [[buffer(2)]],
    device const float* decay [[buffer(3)]],
    device const float* strength [[buffer(4)]],
    device uchar* output [[buffer(5)]],
    constant uint& states [[buffer(6)]],
    constant uint& row_count [[buffer(7)]],
    uint3 position [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]])
{
    uint head = position.y, key_head = head / (VALUE_HEADS / KEY_HEADS);
    uint first = (position.x * 4 + simdgroup) * SCAN_ROWS;
    if (first >= VALUE_WIDTH) return;
    Session session = sessions[position.z];
    uint from = SEQUENCE ? 0 : position.z, end = SEQUENCE ? row_count : position.z + 1;
    bool inside = lane * 4 < KEY_WIDTH;
    ulong at = ((ulong)head * VALUE_WIDTH + first) * KEY_WIDTH + lane * 4;
    device const float* live = (device const float*)(session.live + states) + at;
    float4 state[SCAN_ROWS];
    for (int r = 0; r < SCAN_ROWS; ++r) {
        state[r] = float4(0.0f);
        if (inside && first + r < VALUE_WIDTH) state[r] = *(device const float4*)(live + r * KEY_WIDTH);
    }
    for (uint row = from; row < end; ++row) {
        float4 query = float4(0.0f), key = float4(0.0f), value = float4(0.0f);
        device const float* queries = query_key + (ulong)row * 2 * KEYS + key_head * KEY_WIDTH + lane * 4;
        if (inside) {
            query = *(device const float4*)(queries);
            key = *(device const float4*)(queries + KEYS);
        }
        ulong values = (ulong)row * CHANNELS + 2 * KEYS + head * VALUE_WIDTH + first;
        for (int r = 0; r < SCAN_ROWS; ++r) {
            if (first + r < VALUE_WIDTH) value[r] = load1(convolved, values + r, INPUT_BFLOAT);
        }
        uint scalar = row * VALUE_HEADS + head;
        float4 y = delta_rule(state, query, key, value, decay[scalar], strength[scalar]);
        if (lane < SCAN_ROWS && first + lane < VALUE_WIDTH) {
            ulong out = ((ulong)row * VALUE_HEADS + head) * VALUE_WIDTH + first + lane;
            store1(output, out, y[lane], OUTPUT_BFLOAT);
        }
    }
    device float* next = (device float*)(session.next + states) + at;
    for (int r = 0; r < SCAN_ROWS; ++r) {
        if (inside && first + r < VALUE_WIDTH) *(device float4*)(next + r * KEY_WIDTH) = state[r];
    }
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
// channels; the lowest writes their history. 32 simdgroups, four rows of the state each: 64 KB of state in, 64 KB
// out. 32 value heads are 32 threadgroups, fewer than two a core; splitting a head would need its norm, and so
// a second dispatch.
kernel void delta_step(
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
    threadgroup float factors[2];
    threadgroup float outputs[MOST_WIDTH];
    threadgroup float mean[1];
    uint head = position.x, row = position.y, shared_by = VALUE_HEADS / KEY_HEADS, key_head = head / shared_by;
    Session session = sessions[row];
    uint first = simdgroup * SCAN_ROWS;
    bool inside = lane * 4 < KEY_WIDTH;

    // The state first: its loads are under way while the convolution runs.
    ulong at = ((ulong)head * VALUE_WIDTH + first) * KEY_WIDTH + lane * 4;
    device const float* live_state = (device const float*)(session.live + states) + at;
    float4 state[SCAN_ROWS];
    for (int r = 0; r < SCAN_ROWS; ++r) {
        state[r] = float4(0.0f);
        if (inside && first + r < VALUE_WIDTH) state[r] = *(device const float4*)(live_state + r * KEY_WIDTH);
    }

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
    threadgroup const float4* vectors = (threadgroup const float4*)convolved;
    if (simdgroup < 2) {
        float4 x = vectors[simdgroup * (MOST_WIDTH / 4) + lane];
        float factor = precise::rsqrt(sum_lanes(dot(x, x)) + 1e-6f);
        if (simdgroup == 0) factor *= precise::rsqrt(float(KEY_WIDTH));
        if (lane == 0) factors[simdgroup] = factor;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    float4 query = vectors[lane] * factors[0], key = vectors[MOST_WIDTH / 4 + lane] * factors[1], value;
    for (int r = 0; r < SCAN_ROWS; ++r) value[r] = convolved[2 * MOST_WIDTH + first + r];
    uint scalar = row * VALUE_HEADS + head;
    float decay = decay_of(a[scalar], a_log[head], dt_bias[head]);
    float4 y = delta_rule(state, query, key, value, decay, sigmoid(b[scalar]));
    device float* next_state = (device float*)(session.next + states) + at;
    for (int r = 0; r < SCAN_ROWS; ++r) {
        if (inside && first + r < VALUE_WIDTH) *(device float4*)(next_state + r * KEY_WIDTH) = state[r];
    }
    if (lane < SCAN_ROWS) outputs[first + lane] = y[lane];
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
