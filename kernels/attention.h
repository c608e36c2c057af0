// Heads of attention and where their keys and values lie.
#pragma once
#include "session.h"

constant uint QUERY_HEADS [[function_constant(0)]];
constant uint KEY_VALUE_HEADS [[function_constant(1)]];
// Width of a head: a multiple of 32, at most 256.
constant uint WIDTH [[function_constant(2)]];
constant bool CACHE_BFLOAT [[function_constant(3)]];
constant bool INPUT_BFLOAT [[function_constant(4)]];
constant bool OUTPUT_BFLOAT [[function_constant(5)]];
constant float EPSILON [[function_constant(6)]];
constant uint ROTARY [[function_constant(7)]];

constant uint GROUP_HEADS = QUERY_HEADS / KEY_VALUE_HEADS;
constant uint ELEMENT_BYTES = CACHE_BFLOAT ? 2 : 4;
constant uint LAYER_PAGE_BYTES = 2 * KEY_VALUE_HEADS * PAGE * WIDTH * ELEMENT_BYTES;

// From a key to its value.
constant uint VALUES_BEHIND_KEYS = LAYER_PAGE_BYTES / 2;

// The key (which = 0) or value (1) of a KV head at a position, in attention layer `layer` counted among those.
inline device uchar* cached(Session session, uint layer, uint which, uint head, uint position) {
    device uchar* page = session.pages[position / PAGE].memory + (ulong)layer * LAYER_PAGE_BYTES;
    return page + (ulong)((which * KEY_VALUE_HEADS + head) * PAGE + position % PAGE) * WIDTH * ELEMENT_BYTES;
}

// Cosine and sine of an angle of up to some hundred thousand radians. The angle is reduced by multiples of pi/2 in three
// parts, each product exact in its fused sum; the polynomials are Cephes' for |r| <= pi/4, good to an ulp.
inline float2 cosine_sine(float angle) {
    float turns = rint(angle * 0.636619772f);
    float r = fma(turns, -1.5707963705062866f, angle);
    r = fma(turns, 4.371138828673793e-08f, r);
    r = fma(turns, 1.7151245100058819e-15f, r);
    float z = r * r;
    float sine = fma(fma(fma(-1.9515295891e-4f, z, 8.3321608736e-3f), z, -1.6666654611e-1f), z * r, r);
    float cosine = fma(fma(fma(2.443315711809948e-5f, z, -1.388731625493765e-3f), z, 4.166664568298827e-2f), z * z,
                       fma(-0.5f, z, 1.0f));
    int quadrant = int(turns) & 3;
    float2 pair = (quadrant & 1) ? float2(sine, cosine) : float2(cosine, sine);
    if (quadrant == 1 || quadrant == 2) pair.x = -pair.x;
    if (quadrant >= 2) pair.y = -pair.y;
    return pair;
}
