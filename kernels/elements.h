// Stored elements and exact sums over a simdgroup.
//
// An activation is stored as float or as bfloat; which of the two is a function constant of the kernel that
// reads or writes it, so that the choice is made when the pipeline is. Every value is computed in float and
// rounded once, when it is stored.
#pragma once
#include <metal_stdlib>
using namespace metal;

// Two bfloats in a word, the first in its low half.
inline float2 unpack_bfloats(uint word) {
    return float2(as_type<float>(word << 16), as_type<float>(word & 0xffff0000u));
}

// Four elements from `index` on, which is a multiple of four.
inline float4 load4(device const uchar* base, ulong index, bool is_bfloat) {
    if (is_bfloat) {
        uint2 words = *(device const uint2*)(base + index * 2);
        return float4(unpack_bfloats(words.x), unpack_bfloats(words.y));
    }
    return *(device const float4*)(base + index * 4);
}

inline float load1(device const uchar* base, ulong index, bool is_bfloat) {
    if (is_bfloat) return float(*(device const bfloat*)(base + index * 2));
    return *(device const float*)(base + index * 4);
}

inline void store1(device uchar* base, ulong index, float value, bool is_bfloat) {
    if (is_bfloat) {
        *(device bfloat*)(base + index * 2) = bfloat(value);
    } else {
        *(device float*)(base + index * 4) = value;
    }
}

inline void store4(device uchar* base, ulong index, float4 value, bool is_bfloat) {
    if (is_bfloat) {
        *(device bfloat4*)(base + index * 2) = bfloat4(value);
    } else {
        *(device float4*)(base + index * 4) = value;
    }
}

// Sums over the lanes in one fixed order, the same on every device: pairs 16 apart first.
inline float sum_lanes(float value) {
    for (ushort distance = 16; distance > 0; distance /= 2) value += simd_shuffle_xor(value, distance);
    return value;
}

inline float4 sum_lanes(float4 value) {
    for (ushort distance = 16; distance > 0; distance /= 2) value += simd_shuffle_xor(value, distance);
    return value;
}

// Without overflow for any argument.
inline float sigmoid(float x) {
    float small = exp(-fabs(x));
    return (x >= 0.0f ? 1.0f : small) / (1.0f + small);
}

inline float silu(float x) { return x * sigmoid(x); }
