// Kernels whose memory traffic can be counted by hand.
#include <metal_stdlib>
using namespace metal;

// Each lane one float, side by side.
kernel void copy_coalesced(
    device const float* x [[buffer(0)]],
    device float* y [[buffer(1)]],
    uint t [[thread_position_in_grid]])
{
    y[t] = x[t];
}

// Each lane one float, 33 floats apart.
kernel void copy_strided(
    device const float* x [[buffer(0)]],
    device float* y [[buffer(1)]],
    uint t [[thread_position_in_grid]])
{
    y[t] = x[t * 33];
}

// Each lane 16 bytes, side by side.
kernel void copy_wide(
    device const float4* x [[buffer(0)]],
    device float4* y [[buffer(1)]],
    uint t [[thread_position_in_grid]])
{
    y[t] = x[t];
}

// Each lane four floats, one after the other: the same bytes, more lines touched.
kernel void copy_narrow(
    device const float* x [[buffer(0)]],
    device float* y [[buffer(1)]],
    uint t [[thread_position_in_grid]])
{
    for (uint i = 0; i < 4; ++i) y[t * 4 + i] = x[t * 4 + i];
}

// Each lane four bfloats as one vector.
kernel void copy_bfloats(
    device const bfloat4* x [[buffer(0)]],
    device bfloat4* y [[buffer(1)]],
    uint t [[thread_position_in_grid]])
{
    y[t] = x[t];
}

// All lanes the same float, and the count from constant memory.
kernel void broadcast(
    device const float* x [[buffer(0)]],
    device float* y [[buffer(1)]],
    constant uint& n [[buffer(2)]],
    uint t [[thread_position_in_grid]])
{
    if (t < n) y[t] = x[0];
}

// Half of the lanes take each branch; both read the same buffer.
kernel void branches(
    device const float* x [[buffer(0)]],
    device float* y [[buffer(1)]],
    uint t [[thread_position_in_grid]])
{
    float v;
    if (t & 1) v = x[t] * 2.0f;
    else v = x[t + 32] + 1.0f;
    y[t] = v;
}

// A loop with a simdgroup operation: a row of 128 floats by one simdgroup.
kernel void row_sum(
    device const float* x [[buffer(0)]],
    device float* y [[buffer(1)]],
    uint row [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]])
{
    float sum = 0;
    for (uint i = lane; i < 128; i += 32) sum += x[row * 128 + i];
    sum = simd_sum(sum);
    if (lane == 0) y[row] = sum;
}

constant uint STRIDE [[function_constant(0)]];

// Threadgroup memory, lane i at word i * STRIDE.
kernel void banks(
    device float* y [[buffer(0)]],
    threadgroup float* shared [[threadgroup(0)]],
    uint t [[thread_index_in_threadgroup]])
{
    shared[t * STRIDE] = float(t);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    y[t] = shared[t * STRIDE];
}

// Threadgroup memory as vectors, side by side.
kernel void wide_banks(
    device float* y [[buffer(0)]],
    uint t [[thread_index_in_threadgroup]])
{
    threadgroup float4 shared[32];
    shared[t] = float4(float(t));
    simdgroup_barrier(mem_flags::mem_threadgroup);
    y[t] = shared[31 - t].x + shared[31 - t].w;
}

// Atomics on one word of device memory.
kernel void count_threads(
    device atomic_uint* n [[buffer(0)]],
    uint t [[thread_position_in_grid]])
{
    atomic_fetch_add_explicit(n, t, memory_order_relaxed);
}
