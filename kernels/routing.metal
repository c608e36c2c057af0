// Choosing: experts for a row, the pairs of each expert, the most probable token.
#include "turn.h"

constant uint EXPERTS [[function_constant(0)]];
constant uint CHOICES [[function_constant(1)]];
constant uint VOCABULARY [[function_constant(2)]];

// Whether (value, index) comes before (other, other_index): the larger value, of equal ones the lower index.
inline bool before(float value, uint index, float other, uint other_index) {
    return value > other || (value == other && index < other_index);
}

// Logits of a lane: 256 experts at most.
constant constexpr uint LANE_EXPERTS = 8;

// Contract. The CHOICES largest of each row's EXPERTS logits (f32), in descending order, the lower id first among
// equals; weights = their softmax. A simdgroup a row; its lanes keep the logits in registers, and each choice is one
// search in them and one exchange of five steps. A row fills no GPU, but the step is 1 KB and bound by its latency.
// A row of NaN has NaN as weights, and ids that are experts' all the same: the weights they stand for are read.
kernel void route(
    device const float* logits [[buffer(0)]],
    device uint* ids [[buffer(1)]],
    device float* weights [[buffer(2)]],
    uint row [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]])
{
    device const float* mine = logits + (ulong)row * EXPERTS;
    float values[LANE_EXPERTS];
#pragma unroll
    for (uint i = 0; i < LANE_EXPERTS; ++i) {
        values[i] = i * 32 + lane < EXPERTS ? mine[i * 32 + lane] : -INFINITY;
        if (isnan(values[i])) values[i] = -INFINITY;
    }
    uint taken = 0;
    float largest = 0.0f, total = 0.0f, own = 0.0f;
    uint own_id = 0;
    for (uint choice = 0; choice < CHOICES; ++choice) {
        float best = -INFINITY;
        uint best_index = 0xffffffffu;
#pragma unroll
        for (uint i = 0; i < LANE_EXPERTS; ++i) {
            uint expert = i * 32 + lane;
            bool there = expert < EXPERTS && (taken >> i & 1) == 0;
            if (there && before(values[i], expert, best, best_index)) {
                best = values[i];
                best_index = expert;
            }
        }
        for (ushort distance = 16; distance > 0; distance /= 2) {
            float other = simd_shuffle_xor(best, distance);
            uint other_index = simd_shuffle_xor(best_index, distance);
            if (before(other, other_index, best, best_index)) {
                best = other;
                best_index = other_index;
            }
        }
        if (best_index % 32 == lane) taken |= 1u << (best_index / 32);
        if (choice == 0) largest = best;
        float p = exp(best - largest);
        total += p;
        // At most 32 choices: one a lane.
        if (choice == lane) {
            own = p;
            own_id = best_index;
        }
    }
    if (lane < CHOICES) {
        ids[row * CHOICES + lane] = own_id;
        weights[row * CHOICES + lane] = own / total;
    }
}

// Contract. grouping = EXPERTS + 1 offsets, then the pair numbers in the order of their experts, ascending within
// an expert. One threadgroup of 1,024 threads: each simdgroup takes a run of pairs, counts its experts,
// learns from a scan over simdgroups where each of its experts begins, and places its pairs in order.
kernel void group_experts(
    device const uint* ids [[buffer(0)]],
    device uint* grouping [[buffer(1)]],
    constant uint& pair_count [[buffer(2)]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]])
{
    constexpr uint SIMDGROUPS = 32, MOST = 256;
    threadgroup ushort counts[SIMDGROUPS * MOST];
    threadgroup uint starts[MOST];
    threadgroup ushort* own = counts + simdgroup * MOST;
    for (uint expert = lane; expert < MOST; expert += 32) own[expert] = 0;
    simdgroup_barrier(mem_flags::mem_threadgroup);
    uint each = (pair_count + SIMDGROUPS * 32 - 1) / (SIMDGROUPS * 32) * 32;
    uint first = simdgroup * each;
    for (uint at = first; at < first + each; at += 32) {
        uint pair = at + lane;
        uint expert = pair < pair_count ? ids[pair] : 0xffffffffu;
        // Lanes with the same expert: how many before this one, and whether any after.
        bool is_last = true;
        uint rank = 0;
        for (ushort other = 0; other < 32; ++other) {
            uint theirs = simd_broadcast(expert, other);
            if (theirs == expert && other < lane) rank += 1;
            if (theirs == expert && other > lane) is_last = false;
        }
        if (pair < pair_count && is_last) own[expert] += ushort(rank + 1);
        simdgroup_barrier(mem_flags::mem_threadgroup);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    // Over simdgroups: each count becomes what comes before it.
    if (thread_index < MOST) {
        uint sum = 0;
        for (uint s = 0; s < SIMDGROUPS; ++s) {
            uint count = counts[s * MOST + thread_index];
            counts[s * MOST + thread_index] = ushort(sum);
            sum += count;
        }
        starts[thread_index] = sum;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    // Over experts.
    if (simdgroup == 0) {
        uint before_these = 0;
        for (uint base = 0; base < MOST; base += 32) {
            uint size = starts[base + lane];
            uint inclusive = before_these + simd_prefix_inclusive_sum(size);
            starts[base + lane] = inclusive - size;
            before_these = simd_broadcast(inclusive, ushort(31));
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (thread_index < EXPERTS) grouping[thread_index] = starts[thread_index];
    if (thread_index == 0) grouping[EXPERTS] = pair_count;
    for (uint at = first; at < first + each; at += 32) {
        uint pair = at + lane;
        uint expert = pair < pair_count ? ids[pair] : 0xffffffffu;
        bool is_last = true;
        uint rank = 0;
        for (ushort other = 0; other < 32; ++other) {
            uint theirs = simd_broadcast(expert, other);
            if (theirs == expert && other < lane) rank += 1;
            if (theirs == expert && other > lane) is_last = false;
        }
        uint taken = pair < pair_count ? own[expert] : 0;
        if (pair < pair_count) grouping[EXPERTS + 1 + starts[expert] + taken + rank] = pair;
        simdgroup_barrier(mem_flags::mem_threadgroup);
        if (pair < pair_count && is_last) own[expert] = ushort(taken + rank + 1);
        simdgroup_barrier(mem_flags::mem_threadgroup);
    }
}

// Contract. The id of the largest of the row's first `limit` logits, the lower among equals, takes its turn (turn.h);
// ids from `limit` on have no token. NO_TOKEN where a logit is NaN or +infinity, or all are -infinity. One threadgroup of
// 1,024 threads a row: 1 MB of logits, read once, at the speed of one core; splitting it would cost a second dispatch.
kernel void arg_max(
    device const float* logits [[buffer(0)]],
    device RunTable* table [[buffer(1)]],
    device uint* tokens [[buffer(2)]],
    device uint* chosen [[buffer(3)]],
    uint row [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]])
{
    threadgroup float values[32];
    threadgroup uint indices[32];
    threadgroup uint unsound[32];
    device const float* mine = logits + (ulong)row * VOCABULARY;
    uint end = min(VOCABULARY, table->limit);
    float best = -INFINITY;
    uint best_index = NO_TOKEN;
    bool is_sound = true;
    for (uint token = thread_index; token < end; token += 1024) {
        float value = mine[token];
        // NaN is below nothing.
        is_sound = is_sound && value < INFINITY;
        if (before(value, token, best, best_index)) {
            best = value;
            best_index = token;
        }
    }
    for (ushort distance = 16; distance > 0; distance /= 2) {
        float other = simd_shuffle_xor(best, distance);
        uint other_index = simd_shuffle_xor(best_index, distance);
        if (before(other, other_index, best, best_index)) {
            best = other;
            best_index = other_index;
        }
    }
    bool any_unsound = simd_any(!is_sound);
    if (lane == 0) {
        values[simdgroup] = best;
        indices[simdgroup] = best_index;
        unsound[simdgroup] = any_unsound ? 1 : 0;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (thread_index != 0) return;
    for (uint s = 1; s < 32; ++s) {
        any_unsound = any_unsound || unsound[s] != 0;
        if (before(values[s], indices[s], best, best_index)) {
            best = values[s];
            best_index = indices[s];
        }
    }
    take_turn(table, tokens, chosen, row, any_unsound || best == -INFINITY ? NO_TOKEN : best_index);
}
