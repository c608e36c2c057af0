// What kernels are written with: shared headers, templates, structures, enumerations, casts of memory, and the
// library's functions of integers.
#include "language.h"

enum class Kind : uint { sum, largest };
struct Pair { float value; uint index; };
constant constexpr ushort TABLE[4] = {1, 2, 3, 4};
constant int SCALE [[function_constant(3)]];
constant bool SCALED = SCALE != 1;

namespace detail {
template <Kind K> inline Pair combine(Pair a, Pair b) {
    if (K == Kind::sum) return Pair{a.value + b.value, min(a.index, b.index)};
    const bool first = a.value > b.value || (a.value == b.value && a.index < b.index);
    return first ? a : b;
}
}

// Reduces 256 values by a tree in threadgroup memory.
template <Kind K>
[[kernel, max_total_threads_per_threadgroup(256)]] void reduce(
    device const float* x [[buffer(0)]],
    device Pair* out [[buffer(1)]],
    constant Range& range [[buffer(3)]],
    uint tid [[thread_index_in_threadgroup]])
{
    threadgroup Pair shared[256];
    const uint i = range.first + tid;
    shared[tid] = Pair{tid < range.count ? x[i] : -INFINITY, i};
    if (K == Kind::sum && tid >= range.count) shared[tid].value = 0.0;
    for (uint width = 128; width > 0; width >>= 1) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (tid < width) shared[tid] = detail::combine<K>(shared[tid], shared[tid + width]);
    }
    if (tid == 0) {
        out[0] = shared[0];
        if (SCALED) out[0].value *= SCALE;
    }
}
#define REDUCE(name, kind) \
    template [[host_name(name)]] [[kernel]] decltype(reduce<kind>) reduce<kind>;
REDUCE("reduce_sum", Kind::sum)
REDUCE("reduce_largest", Kind::largest)

// Unpacks bytes of a word that is read as a vector, sums a row through a pointer into threadgroup memory.
inline float total(threadgroup const float* row, ushort count) {
    float sum = 0;
    for (ushort i = 0; i < count; ++i) sum += row[i];
    return sum;
}
kernel void unpack(
    device const uint4* packed [[buffer(0)]],
    device float* out [[buffer(1)]],
    device uint* words [[buffer(2)]],
    ushort lane [[thread_index_in_simdgroup]])
{
    threadgroup float rows[32][17];
    const uint4 word = packed[lane];
    thread float* row = nullptr;
    float local[16];
    row = local;
    for (uint w = 0; w < 4; ++w) {
        const uchar4 codes = as_type<uchar4>(word[w]);
        for (uint b = 0; b < 4; ++b) row[w * 4 + b] = half(codes[b]) * 0.5h;
    }
    for (uint i = 0; i < 16; ++i) rows[lane][i] = local[i];
    simdgroup_barrier(mem_flags::mem_threadgroup);
    out[lane] = total(rows[31 - lane], 16) + TABLE[lane % 4];
    words[lane] = mulhi(word.x, 0x9E3779B9u) ^ rotate(word.y, 7u) ^ reverse_bits(word.z)
        ^ insert_bits(word.w, uint(lane), 8, 5) ^ (absdiff(lane, ushort(9)) << 3);
}
