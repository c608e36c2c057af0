// What sampling is made of: the parameters of a row, random numbers, ranks, weights, and the search for a token by
// count or by weight.
//
// Weights are whole numbers, so that their sums do not depend on the order in which they are added, and a row's token
// is the same on every machine and in every run. They are within 2e-9 of the real numbers that they stand for (or
// within 2^-46 of the best token's weight).
#pragma once
#include "turn.h"

// The host writes it: lily-gpu/src/sampling.rs.
struct SamplingRow {
    // log2(e) / temperature, as a sum of two floats.
    float scale_high, scale_low;
    float repetition_penalty;
    uint flags;
    // 0: all.
    uint top_k;
    // Always 0, which a compiler cannot know: see `apart`.
    uint zero;
    // Top-p in units of 2^-64, where flags have it.
    uint share_low, share_high;
    // The largest power that min-p lets pass.
    uint power_low, power_high;
    uint seed_low, seed_high;
    uint step_low, step_high;
    // Where changes of single logits begin, in words, and how many there are; where the mask begins.
    uint adjustments, adjustment_count, mask;
    float presence_penalty, frequency_penalty;
    uint unused;
};

constant constexpr uint IS_GREEDY = 1, HAS_SHARE = 2, HAS_MASK = 4, HAS_PENALTIES = 8;

// A change of one logit: lily-sampling's Adjustment.
struct Adjustment {
    uint token;
    float bias;
    float subtracted;
    // Behind the bits below, how often the answer has the token.
    uint flags;
};

constant constexpr uint HAS_BIAS = 1, IN_HISTORY = 2, HISTORY_SHIFT = 2;
// Threads of a threadgroup.
constant constexpr uint SAMPLERS = 1024;
// Keys end with an id of so many bits.
constant constexpr uint ID_BITS = 24;
// The rank of -infinity, which is never chosen. Those of numbers are below.
constant constexpr uint EXCLUDED = 0xff800000u;

// A product that no compiler may join with the sum it goes into: the host rounds it.
inline float apart(float product, uint zero) { return as_type<float>(as_type<uint>(product) ^ zero); }

// lily-sampling's Sampler::accept, for the run behind this one: the next random number, and a history that has `token`
// once more. There is room for it behind the row's changes of logits: the host sees to that.
inline void remember(
    device uint* sampling, uint row_index, SamplingRow row, uint token, threadgroup atomic_uint* known, uint thread_index)
{
    device SamplingRow* kept = (device SamplingRow*)sampling + row_index;
    if (thread_index == 0) {
        kept->step_low = row.step_low + 1;
        if (kept->step_low == 0) kept->step_high = row.step_high + 1;
        atomic_store_explicit(known, 0u, memory_order_relaxed);
    }
    if ((row.flags & HAS_PENALTIES) == 0) return;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    device Adjustment* adjustments = (device Adjustment*)(sampling + row.adjustments);
    for (uint i = thread_index; i < row.adjustment_count; i += SAMPLERS) {
        if (adjustments[i].token != token) continue;
        uint count = (adjustments[i].flags >> HISTORY_SHIFT) + 1;
        adjustments[i].subtracted = row.presence_penalty + apart((float)count * row.frequency_penalty, row.zero);
        adjustments[i].flags = (adjustments[i].flags & HAS_BIAS) | IN_HISTORY | (count << HISTORY_SHIFT);
        atomic_store_explicit(known, 1u, memory_order_relaxed);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (thread_index != 0 || atomic_load_explicit(known, memory_order_relaxed) != 0) return;
    Adjustment added;
    added.token = token;
    added.bias = 0.0f;
    added.subtracted = row.presence_penalty + row.frequency_penalty;
    added.flags = IN_HISTORY | (1u << HISTORY_SHIFT);
    adjustments[row.adjustment_count] = added;
    kept->adjustment_count = row.adjustment_count + 1;
}

// Better logits have lower ranks; both zeros have one.
inline uint rank_of(float logit) {
    uint bits = logit == 0.0f ? 0 : as_type<uint>(logit);
    return bits >> 31 == 0 ? ~bits & 0x7fffffffu : bits;
}

inline float logit_of(uint rank) { return as_type<float>(rank >> 31 == 0 ? ~rank & 0x7fffffffu : rank); }

// Philox4x32-10: two words of the four. Together they are the random number, in units of 2^-64.
inline ulong random_of(SamplingRow row) {
    uint4 counter = uint4(row.step_low, row.step_high, 0, 0);
    uint2 key = uint2(row.seed_low, row.seed_high);
    for (uint i = 0; i < 10; ++i) {
        uint high0 = mulhi(0xD2511F53u, counter.x), low0 = 0xD2511F53u * counter.x;
        uint high1 = mulhi(0xCD9E8D57u, counter.z), low1 = 0xCD9E8D57u * counter.z;
        counter = uint4(high1 ^ counter.y ^ key.x, low1, high0 ^ counter.w ^ key.y, low0);
        key += uint2(0x9E3779B9u, 0xBB67AE85u);
    }
    // 53 bits of it, as the host has them.
    return (((ulong)counter.x << 32) | counter.y) & ~0x7fful;
}

// `number` times a fraction in units of 2^-64, rounded down; `rest` says whether anything was lost.
inline ulong part_of(ulong number, ulong fraction, thread bool& rest) {
    ulong number_low = number & 0xffffffffu, number_high = number >> 32;
    ulong fraction_low = fraction & 0xffffffffu, fraction_high = fraction >> 32;
    ulong low = number_low * fraction_low;
    ulong cross = number_low * fraction_high, other = number_high * fraction_low;
    ulong middle = (low >> 32) + (cross & 0xffffffffu) + (other & 0xffffffffu);
    rest = ((low | middle) & 0xffffffffu) != 0;
    return number_high * fraction_high + (cross >> 32) + (other >> 32) + (middle >> 32);
}

// How far a logit is below the best, in powers of two after the temperature, in units of 2^-32: exact to some of those.
// The difference is taken as a sum of two floats and loses nothing.
inline ulong power_of(float logit, float best, SamplingRow row) {
    float high = best - logit;
    float back = high - best;
    float low = (best - (high - back)) - (logit + back);
    float product = apart(high * row.scale_high, row.zero);
    float further = fma(high, row.scale_low, apart(low * row.scale_high, row.zero));
    float product_low = fma(high, row.scale_high, -product) + further;
    // From here on the weight is nothing.
    if (!(product < 60.0f)) return 60ul << 32;
    float whole = floor(product);
    float fraction = (product - whole) * 4294967296.0f;
    float units = floor(fraction);
    float rest = rint((fraction - units) + product_low * 4294967296.0f);
    long power = ((long)(uint)whole << 32) + (long)(uint)units + (long)(int)rest;
    return power > 0 ? (ulong)power : 0;
}

// 2 to minus a power, in units of 2^-45: sums over 2^18 tokens fit 64 bits.
inline ulong weight_of(ulong power) {
    uint whole = (uint)(power >> 32);
    if (whole > 45) return 0;
    uint y = (uint)power;
    // 1 - 2^-y = y (c0 - y (c1 - y (c2 - ...))).
    uint sum = 0x0000bda6u;
    sum = 0x0009c200u - mulhi(sum, y);
    sum = 0x005728b0u - mulhi(sum, y);
    sum = 0x027641a9u - mulhi(sum, y);
    sum = 0x0e358127u - mulhi(sum, y);
    sum = 0x3d7f7bcbu - mulhi(sum, y);
    sum = 0xb17217f7u - mulhi(sum, y);
    return (((1ul << 32) - mulhi(sum, y)) << 13) >> whole;
}

// Adds to a number of 64 bits in two words: the carry of each addition is known from what it found.
inline void add(threadgroup atomic_uint* words, ulong number) {
    uint low = (uint)number;
    uint before = atomic_fetch_add_explicit(&words[0], low, memory_order_relaxed);
    uint high = (uint)(number >> 32) + (before + low < low ? 1 : 0);
    if (high != 0) atomic_fetch_add_explicit(&words[1], high, memory_order_relaxed);
}

inline ulong number_at(threadgroup atomic_uint* words) {
    ulong low = atomic_load_explicit(&words[0], memory_order_relaxed);
    return ((ulong)atomic_load_explicit(&words[1], memory_order_relaxed) << 32) | low;
}

// What is searched.
constant constexpr uint MAXIMA = 0, TOP_K = 1, TOP_P = 2, DRAW = 3;
constant constexpr uint BINS = 256;

// Memory of the threadgroup.
struct Memory {
    // Sums of the keys that agree with what is known and have one next digit; two words each.
    threadgroup atomic_uint* bins;
    // A list of good tokens: ranks and ids, in no order.
    threadgroup uint* ranks;
    threadgroup uint* ids;
    // What a round found.
    threadgroup uint* found;
};

// Where a row's choice stands; the same in all threads.
struct Search {
    device const float* logits;
    // Tokens, or entries of the list.
    uint count;
    bool is_listed;
    float best;
    // Keys (rank, then id) behind it are out.
    ulong cut;
};

// The smallest key at which the sum over all keys up to it reaches the target; false where it never does. Keys are
// rank and id (top-k: the sum is a count; top-p), rank (the threads' own best logits; a count) or id (the draw). The
// target is `fraction` (counts), that part of `whole` or of all (top-p), or just above that part of all (the draw). A
// digit of eight bits at a time: all threads add what may still be it to the digit's bins.
inline bool search_key(
    Search search, SamplingRow row, Memory memory, uint what, ulong fraction, ulong whole, uint own,
    thread ulong& key, uint thread_index, uint simdgroup, uint lane)
{
    key = 0;
    ulong remaining = 0;
    bool is_count = what == MAXIMA || what == TOP_K;
    uint first = what == DRAW ? 4 : 0, end = what == MAXIMA ? 4 : 7;
    uint count = what == MAXIMA ? SAMPLERS : search.count;
    ulong most = ((ulong)row.power_high << 32) | row.power_low;
    for (uint digit = first; digit < end; ++digit) {
        uint shift = ID_BITS + 24 - 8 * digit;
        if (thread_index < 2 * BINS) atomic_store_explicit(&memory.bins[thread_index], 0u, memory_order_relaxed);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (uint base = 0; base < count; base += SAMPLERS) {
            uint at = base + thread_index;
            uint rank = EXCLUDED, id = 0;
            if (what == MAXIMA) {
                rank = own;
            } else if (at < count) {
                rank = search.is_listed ? memory.ranks[at] : rank_of(search.logits[at]);
                id = search.is_listed ? memory.ids[at] : at;
            }
            ulong full = ((ulong)rank << ID_BITS) | id;
            ulong mine = what == DRAW ? id : full;
            ulong weight = 0;
            if (rank < EXCLUDED && full <= search.cut && mine >> (shift + 8) == key >> (shift + 8)) {
                if (is_count) {
                    weight = 1;
                } else {
                    ulong power = power_of(logit_of(rank), search.best, row);
                    if (what != DRAW || power <= most) weight = weight_of(power);
                }
            }
            uint bin = (uint)(mine >> shift) & (BINS - 1);
            uint lowest = simd_min(weight == 0 ? BINS : bin), highest = simd_max(weight == 0 ? 0 : bin);
            if (lowest == highest) {
                // One bin for the simdgroup, as often: one lane adds for all.
                ulong low = simd_sum((uint)weight & 0x7fffffu), high = simd_sum((uint)(weight >> 23));
                if (lane == 0) add(&memory.bins[2 * lowest], (high << 23) + low);
            } else if (weight != 0) {
                add(&memory.bins[2 * bin], weight);
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (simdgroup == 0) {
            ulong own_sum = 0;
            for (uint i = 0; i < 8; ++i) own_sum += number_at(&memory.bins[2 * (lane * 8 + i)]);
            ulong sum = own_sum;
            for (ushort distance = 1; distance < 32; distance *= 2) {
                ulong low = simd_shuffle_up((uint)sum, distance);
                ulong high = simd_shuffle_up((uint)(sum >> 32), distance);
                if (lane >= distance) sum += (high << 32) | low;
            }
            ulong total_low = simd_broadcast((uint)sum, ushort(31));
            ulong total = ((ulong)simd_broadcast((uint)(sum >> 32), ushort(31)) << 32) | total_low;
            ulong target = remaining;
            if (digit == first) {
                bool rest = false;
                if (is_count) {
                    target = fraction;
                } else if (what == TOP_P) {
                    target = part_of(whole == 0 ? total : whole, fraction, rest);
                    target = max(target + (rest ? 1 : 0), 1ul);
                } else {
                    target = part_of(total, fraction, rest) + 1;
                }
            }
            ulong before = sum - own_sum;
            if (lane == 0) memory.found[5] = target <= total ? 1 : 0;
            if (before < target && target <= sum) {
                uint bin = lane * 8;
                ulong inside = number_at(&memory.bins[2 * bin]);
                while (before + inside < target) {
                    before += inside;
                    bin += 1;
                    inside = number_at(&memory.bins[2 * bin]);
                }
                memory.found[0] = bin;
                memory.found[1] = (uint)(target - before);
                memory.found[2] = (uint)((target - before) >> 32);
                memory.found[3] = (uint)inside;
                memory.found[4] = (uint)(inside >> 32);
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (memory.found[5] == 0) return false;
        key |= (ulong)memory.found[0] << shift;
        remaining = ((ulong)memory.found[2] << 32) | memory.found[1];
        ulong inside = ((ulong)memory.found[4] << 32) | memory.found[3];
        if (digit == 3) {
            // Equal logits: where all of them are needed, their ids need not be told apart.
            uint rank = (uint)(key >> ID_BITS);
            ulong each = is_count ? 1 : weight_of(power_of(logit_of(rank), search.best, row));
            if (what != DRAW && remaining + each > inside) {
                key |= (1ul << ID_BITS) - 1;
                return true;
            }
        }
    }
    return true;
}
