// Choosing a token by sampling parameters, without a round trip to the processor.
#include "sampling.h"

constant uint VOCABULARY [[function_constant(0)]];

// Entries of the list of good tokens.
constant constexpr uint LISTED = 2048;
// The list is filled with everything as good as the so-manieth best of the threads' own best logits: among 248,320
// tokens in no order, about 700 of them; for top-k, about k.
constant constexpr uint NEAR = 512;

// Whether (value, index) comes before (other, other_index): the larger value, of equal ones the lower index.
inline bool is_better(float value, uint index, float other, uint other_index) {
    return value > other || (value == other && index < other_index);
}

// A logit kept from overflowing.
inline float stay_finite(float logit) { return clamp(logit, -3.402823466e38f, 3.402823466e38f); }

// lily-sampling's Adjustment::apply: one rounding for each of bias, repetition and subtraction.
inline float adjusted_logit(float logit, Adjustment adjustment, SamplingRow row) {
    if (logit == -INFINITY) return logit;
    if (adjustment.flags & HAS_BIAS) logit = stay_finite(logit + adjustment.bias);
    if (adjustment.flags & IN_HISTORY) {
        float penalty = row.repetition_penalty;
        float repeated = logit > 0.0f ? logit / penalty : apart(logit * penalty, row.zero);
        logit = stay_finite(repeated - adjustment.subtracted);
    }
    return logit;
}

inline bool is_allowed(device const uint* sampling, SamplingRow row, uint token) {
    return (row.flags & HAS_MASK) == 0 || (sampling[row.mask + token / 32] >> (token % 32) & 1) != 0;
}

// Contract: lily-plan's Operation::Sample. The token that the row's parameters choose from its first `limit` logits, or
// NO_TOKEN, takes its turn (turn.h), and the parameters become those of the next run: `sampling` is written. `adjusted`
// is memory to work in, used where bias, penalties or a mask act.
//
// A threadgroup of 1,024 threads a row. One pass over the logits finds the best and each thread's own best; the latter
// give a bar above which a list of good tokens remains, gathered in a second pass, and the filters and the draw search
// that list. Where it does not hold what the filters ask for (top-k above NEAR, a share beyond the list, equal logits
// beyond its length) and where there is no filter, they search all logits, a digit of the key a pass: seven passes at
// most for a filter, three for the draw. Nothing is sorted, and no memory depends on the vocabulary but `adjusted`.
kernel void sample(
    device const float* logits [[buffer(0)]],
    device float* adjusted [[buffer(1)]],
    device uint* sampling [[buffer(2)]],
    device RunTable* table [[buffer(3)]],
    device uint* tokens [[buffer(4)]],
    device uint* chosen [[buffer(5)]],
    uint row_index [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]])
{
    threadgroup atomic_uint bins[2 * BINS];
    threadgroup uint ranks[LISTED];
    threadgroup uint ids[LISTED];
    threadgroup uint found[6];
    // How many tokens are good enough for the list; the weight of all.
    threadgroup atomic_uint gathered[1];
    threadgroup atomic_uint weight_of_all[2];
    threadgroup float values[32];
    threadgroup uint indices[32];
    threadgroup uint unsound[32];
    SamplingRow row = ((device const SamplingRow*)sampling)[row_index];
    device const float* mine = logits + (ulong)row_index * VOCABULARY;
    device float* changed = adjusted + (ulong)row_index * VOCABULARY;
    uint end = min(VOCABULARY, table->limit);
    bool was_stopped = is_stopped(table, row_index);
    bool is_changed = row.adjustment_count != 0 || (row.flags & HAS_MASK) != 0;
    if (thread_index == 0) {
        atomic_store_explicit(&gathered[0], 0u, memory_order_relaxed);
        atomic_store_explicit(&weight_of_all[0], 0u, memory_order_relaxed);
        atomic_store_explicit(&weight_of_all[1], 0u, memory_order_relaxed);
    }

    float best = -INFINITY;
    uint best_index = NO_TOKEN;
    bool is_sound = true;
    for (uint token = thread_index; token < end; token += SAMPLERS) {
        float logit = mine[token];
        // NaN is below nothing.
        is_sound = is_sound && logit < INFINITY;
        if (is_changed) {
            changed[token] = is_allowed(sampling, row, token) ? logit : -INFINITY;
        } else if (is_better(logit, token, best, best_index)) {
            best = logit;
            best_index = token;
        }
    }
    if (is_changed) {
        threadgroup_barrier(mem_flags::mem_device);
        device const Adjustment* adjustments = (device const Adjustment*)(sampling + row.adjustments);
        for (uint i = thread_index; i < row.adjustment_count; i += SAMPLERS) {
            Adjustment adjustment = adjustments[i];
            uint token = adjustment.token;
            if (token < end && is_allowed(sampling, row, token)) {
                changed[token] = adjusted_logit(mine[token], adjustment, row);
            }
        }
        threadgroup_barrier(mem_flags::mem_device);
        for (uint token = thread_index; token < end; token += SAMPLERS) {
            float logit = changed[token];
            if (is_better(logit, token, best, best_index)) {
                best = logit;
                best_index = token;
            }
        }
    }
    uint own = rank_of(best);
    for (ushort distance = 16; distance > 0; distance /= 2) {
        float other = simd_shuffle_xor(best, distance);
        uint other_index = simd_shuffle_xor(best_index, distance);
        if (is_better(other, other_index, best, best_index)) {
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
    best = values[lane];
    best_index = indices[lane];
    for (ushort distance = 16; distance > 0; distance /= 2) {
        float other = simd_shuffle_xor(best, distance);
        uint other_index = simd_shuffle_xor(best_index, distance);
        if (is_better(other, other_index, best, best_index)) {
            best = other;
            best_index = other_index;
        }
    }
    any_unsound = simd_any(unsound[lane] != 0);
    if (any_unsound || best == -INFINITY || (row.flags & IS_GREEDY) != 0) {
        uint token = any_unsound || best == -INFINITY ? NO_TOKEN : best_index;
        // Who reads what the next run is bound to has done so.
        threadgroup_barrier(mem_flags::mem_device);
        if (token != NO_TOKEN && !was_stopped) remember(sampling, row_index, row, token, &gathered[0], thread_index);
        if (thread_index == 0) take_turn(table, tokens, chosen, row_index, token);
        return;
    }

    Memory memory;
    memory.bins = bins;
    memory.ranks = ranks;
    memory.ids = ids;
    memory.found = found;
    Search search;
    search.logits = is_changed ? (device const float*)changed : mine;
    search.count = end;
    search.is_listed = false;
    search.best = best;
    search.cut = ~0ul;
    bool has_count = row.top_k != 0 && row.top_k < end;
    bool has_share = (row.flags & HAS_SHARE) != 0;
    ulong whole = 0, key = 0;
    if ((has_count && row.top_k <= NEAR) || (!has_count && has_share)) {
        uint bar = EXCLUDED - 1;
        uint wanted = has_count ? row.top_k : NEAR;
        if (end > LISTED
            && search_key(search, row, memory, MAXIMA, wanted, 0, own, key, thread_index, simdgroup, lane)) {
            bar = (uint)(key >> ID_BITS);
        }
        ulong sum = 0;
        for (uint token = thread_index; token < end; token += SAMPLERS) {
            float logit = search.logits[token];
            uint rank = rank_of(logit);
            if (rank <= bar) {
                uint at = atomic_fetch_add_explicit(&gathered[0], 1u, memory_order_relaxed);
                if (at < LISTED) {
                    ranks[at] = rank;
                    ids[at] = token;
                }
            }
            if (!has_count && rank < EXCLUDED) sum += weight_of(power_of(logit, best, row));
        }
        if (sum != 0) add(weight_of_all, sum);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        uint count = atomic_load_explicit(&gathered[0], memory_order_relaxed);
        whole = number_at(weight_of_all);
        if (count <= LISTED) {
            search.is_listed = true;
            search.count = count;
        }
    }
    if (has_count && search_key(search, row, memory, TOP_K, row.top_k, 0, own, key, thread_index, simdgroup, lane)) {
        search.cut = key;
    }
    if (has_share) {
        ulong share = ((ulong)row.share_high << 32) | row.share_low;
        bool is_reached = search_key(search, row, memory, TOP_P, share, whole, own, key, thread_index, simdgroup, lane);
        if (!is_reached) {
            // The list does not hold so much.
            search.is_listed = false;
            search.count = end;
            is_reached = search_key(search, row, memory, TOP_P, share, whole, own, key, thread_index, simdgroup, lane);
        }
        // A key that takes all equal logits takes none that top-k left out.
        if (is_reached) search.cut = min(search.cut, key);
    }
    search_key(search, row, memory, DRAW, random_of(row), 0, own, key, thread_index, simdgroup, lane);
    threadgroup_barrier(mem_flags::mem_device);
    if (!was_stopped) remember(sampling, row_index, row, (uint)key, &gathered[0], thread_index);
    if (thread_index == 0) take_turn(table, tokens, chosen, row_index, (uint)key);
}
