// What `group_experts` in routing.metal wrote, as the products of experts read it: EXPERTS + 1 offsets, and then the
// pairs, those of an expert together.
#pragma once
#include "elements.h"

// Some pairs of one expert: `count` of them from place `first` of the grouping's list on.
struct ExpertTile {
    uint expert;
    uint first;
    uint count;
};

// Tile `tile` of at most `rows` pairs, counted over the experts in their order, each expert's last tile being what is
// left of its pairs; a count of 0 behind the last tile. Every simdgroup finds it for itself: that costs no barrier.
inline ExpertTile find_tile(device const uint* grouping, uint experts, uint rows, uint tile, uint lane) {
    ExpertTile found;
    found.expert = 0;
    found.first = 0;
    found.count = 0;
    uint before = 0;
    for (uint base = 0; base < experts; base += 32) {
        uint expert = base + lane;
        uint start = expert < experts ? grouping[expert] : 0;
        uint size = expert < experts ? grouping[expert + 1] - start : 0;
        uint tiles = (size + rows - 1) / rows;
        uint last = before + simd_prefix_inclusive_sum(tiles);
        uint end = simd_broadcast(last, ushort(31));
        if (tile < end) {
            // Of one lane alone.
            bool mine = tile < last && tile >= last - tiles;
            uint from = (tile - (last - tiles)) * rows;
            found.expert = simd_sum(mine ? expert : 0);
            found.first = simd_sum(mine ? start + from : 0);
            found.count = simd_sum(mine ? min(size - from, rows) : 0);
            return found;
        }
        before = end;
    }
    return found;
}
