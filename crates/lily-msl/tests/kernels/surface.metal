// As much of the library as kernels may use, once: every backend has to know it.
#include <metal_stdlib>
#include <metal_simdgroup_matrix>
using namespace metal;

constant ushort NARROW [[function_constant(0)]];
constant float FACTOR [[function_constant(1)]];
constant int SHIFT [[function_constant(2)]];
constant float BOTH = FACTOR * float(NARROW);
constant uint ODD = 64 / NARROW;

struct Page {
    device float4* memory;
};
struct Table {
    device const Page* pages;
    ulong count;
};

kernel void functions(
    device const float* x [[buffer(0)]],
    device float* y [[buffer(1)]],
    device half* h [[buffer(2)]],
    device bfloat4* b [[buffer(3)]],
    uint i [[thread_position_in_grid]])
{
    float v = x[i], r = 0;
    r += exp(v) + exp2(v) + log(v) + log2(v) + log10(v) + sqrt(v) + rsqrt(v);
    r += tanh(v) + sinh(v) + cosh(v) + asin(v) + acos(v) + atan(v) + floor(v) + ceil(v) + rint(v) + trunc(v);
    r += round(v) + fabs(v) + metal::abs(v) + pow(v, 2.5f) + powr(v, 1.5f) + fmod(v, 3.0f) + atan2(v, 2.0f) + sign(v);
    r += fast::exp(v) + fast::exp2(v) + fast::log(v) + fast::log2(v) + fast::sin(v) + fast::cos(v) + fast::rsqrt(v);
    r += precise::exp(v) + precise::tanh(v) + precise::rsqrt(v) + fma(v, r, v) + clamp(v, 0.0f, 1.0f);
    r += select(v, r, v > 0.0f) + mix(v, r, 0.25f) + max3(v, r, 1.0f) + fmin(v, r) + fmax(v, r);
    r += isnan(v) || isinf(v) ? 1.0f : 0.0f;
    y[i] = r * BOTH + float(ODD + uint(SHIFT));
    h[i] = max(exp(half(v)), half(0.5h)) + half(sqrt(float(h[i])));
    b[i] = fast::exp(b[i]) * bfloat4(float4(v, r, 1.0f, 2.0f)) + bfloat(1.0f);
}

kernel void angles(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
    x[i] = sin(x[i]) + cos(x[i]) + tan(x[i]);
}

kernel void bits(
    device const uint4* x [[buffer(0)]],
    device uint* y [[buffer(1)]],
    device int* z [[buffer(2)]],
    uint i [[thread_position_in_grid]])
{
    uint4 v = x[i];
    uint r = popcount(v.x) + clz(v.y) + ctz(v.z) + reverse_bits(v.w) + rotate(v.x, 5u) + mulhi(v.y, v.z);
    r ^= extract_bits(v.w, 3u, 7u) + insert_bits(v.x, v.y, 4u, 9u) + absdiff(v.x, v.y);
    uchar4 bytes = as_type<uchar4>(v.x);
    uint which = r & 3u;
    y[i] = r + bytes.x + bytes[which] + v[which] + uint(any(v > 3u)) + uint(all(v != 0u));
    z[i] = mulhi(int(v.x), -7) + min(int(v.y), max(int(v.z), -5)) + metal::abs(int(v.w));
}

kernel void exchanges(
    device const uint* x [[buffer(0)]],
    device uint* y [[buffer(1)]],
    device float4* f [[buffer(2)]],
    device half2* h [[buffer(3)]],
    ushort lane [[thread_index_in_simdgroup]],
    ushort quad [[quadgroup_index_in_threadgroup]],
    ushort in_quad [[thread_index_in_quadgroup]],
    ushort simdgroups [[simdgroups_per_threadgroup]],
    ushort width [[threads_per_simdgroup]],
    uint3 place [[thread_position_in_threadgroup]],
    const uint3 size [[threads_per_grid]],
    uint i [[thread_position_in_grid]])
{
    uint v = x[i];
    uint r = simd_sum(v) + simd_product(v) + simd_max(v) + simd_min(v) + simd_or(v) + simd_and(v);
    r += simd_prefix_exclusive_sum(v) + simd_prefix_inclusive_sum(v) + simd_shuffle(v, ushort(31 - lane));
    r += simd_shuffle_xor(v, 3) + simd_shuffle_up(v, 1) + simd_shuffle_down(v, 2) + simd_broadcast(v, 5);
    r += simd_broadcast_first(v) + uint(simd_any(v > 3)) + uint(simd_all(v > 3)) + uint(simd_is_first());
    r += popcount(uint(ulong(simd_ballot(v > 7)))) + uint(ulong(simd_active_threads_mask()));
    y[i] = r + quad + in_quad + simdgroups + width + place.y + size.z;
    int s = int(v) - 3;
    s = simd_max(s) + simd_min(s) + simd_sum(s);
    f[i] = simd_sum(f[i]) + simd_shuffle_xor(f[i], 8) + float4(simd_max(f[i].x), simd_min(f[i].y), float(s), 0.0f);
    f[i].x += simd_prefix_exclusive_sum(f[i].w);
    h[i] = half2(simd_max(h[i].x), simd_sum(h[i].y));
}

kernel void atomics(
    device atomic_uint* u [[buffer(0)]],
    device atomic_int* s [[buffer(1)]],
    device atomic_float* f [[buffer(2)]],
    device uint* out [[buffer(3)]],
    uint i [[thread_position_in_grid]])
{
    threadgroup atomic_uint local[2];
    if (i < 2) atomic_store_explicit(&local[i], 0u, memory_order_relaxed);
    threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);
    uint r = atomic_fetch_add_explicit(&local[i & 1], 1u, memory_order_relaxed);
    r += atomic_fetch_sub_explicit(u, 2u, memory_order_relaxed) + atomic_fetch_or_explicit(u, 4u, memory_order_relaxed);
    r += atomic_fetch_and_explicit(u, ~8u, memory_order_relaxed) + atomic_fetch_xor_explicit(u, 9u, memory_order_relaxed);
    r += atomic_fetch_max_explicit(u, i, memory_order_relaxed) + atomic_fetch_min_explicit(u, i, memory_order_relaxed);
    r += atomic_exchange_explicit(u, 7u, memory_order_relaxed);
    uint expected = 7;
    if (atomic_compare_exchange_weak_explicit(u, &expected, 9u, memory_order_relaxed, memory_order_relaxed)) ++r;
    atomic_fetch_max_explicit(s, -int(i), memory_order_relaxed);
    atomic_fetch_sub_explicit(s, 3, memory_order_relaxed);
    atomic_fetch_add_explicit(f, 0.5f, memory_order_relaxed);
    out[i] = r + expected + atomic_load_explicit(&local[1], memory_order_relaxed);
}

// Memory behind addresses that lie in a buffer, and two pieces of threadgroup memory from the launch.
[[max_total_threads_per_threadgroup(96)]] kernel void gather(
    constant Table& table [[buffer(0)]],
    device float4* out [[buffer(1)]],
    threadgroup float4* second [[threadgroup(3)]],
    threadgroup float4* first [[threadgroup(1)]],
    constant ushort& step [[buffer(2)]],
    uint i [[thread_index_in_threadgroup]])
{
    first[i] = table.pages[i * step].memory[i];
    second[i] = first[i] * 2.0f;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    out[i] = first[95 - i] + second[95 - i];
}

// Memory behind an address that is written and read again: what is read is not what it was at the start.
kernel void rewrite(
    device const Page* pages [[buffer(0)]],
    constant uint& rounds [[buffer(1)]],
    uint i [[thread_index_in_threadgroup]])
{
    threadgroup float4 twice[32];
    for (uint round = 0; round < rounds; ++round) {
        const float4 value = pages[0].memory[i];
        twice[i] = value * 2.0f;
        threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);
        pages[0].memory[31 - i] = twice[31 - i] + value;
        threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);
    }
}

// Products of matrices: the right one as it lies in memory or transposed, results added up in float.
template <typename T>
kernel void product(
    device const T* a [[buffer(0)]],
    device const T* b [[buffer(1)]],
    device const T* bt [[buffer(2)]],
    device float* c [[buffer(3)]],
    device T* narrow [[buffer(4)]])
{
    simdgroup_matrix<T, 8, 8> left, right;
    simdgroup_float8x8 sum(0.5f), other;
    for (uint k = 0; k < 16; k += 8) {
        simdgroup_load(left, a + k, 16);
        simdgroup_load(right, b + k * 8, 8);
        simdgroup_multiply_accumulate(sum, left, right, sum);
        simdgroup_load(right, bt, 16, ulong2(k, 0), true);
        simdgroup_multiply_accumulate(sum, left, right, sum);
    }
    simdgroup_multiply(other, left, right);
    simdgroup_store(sum, c, 8);
    simdgroup_store(other, c + 64, 8, ulong2(0, 0), true);
    simdgroup_store(right, narrow, 8);
    simdgroup_store(left, narrow + 64, 8, ulong2(0, 0), true);
}
template [[host_name("product_float")]] kernel decltype(product<float>) product<float>;
template [[host_name("product_half")]] kernel decltype(product<half>) product<half>;
template [[host_name("product_bfloat")]] kernel decltype(product<bfloat>) product<bfloat>;
