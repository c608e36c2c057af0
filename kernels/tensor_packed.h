// Tiles on tensor operations that take the weights' codes as they lie in device memory: no code is unpacked by a lane, and
// no weight passes through threadgroup memory. For systems whose tensor operations have elements of four bits.
//
// A group of 64 columns is one product of bfloats and codes, both exact, summed in float; its scale and bias are applied
// to that sum: sum over groups of scale · Σ x · code + bias · Σ x. So weights are not rounded to bfloat16, as in
// tile.h: this is the arithmetic of decode (WeightArithmetic::Exact of lily-plan), and results differ from tile.h's in
// the last bits of a bfloat.
//
// A tensor of codes is made as Apple documents it: of a pointer to bytes, with extents and row stride in elements, the
// columns, along which is summed, being dimension 0. quantised.h's layout is that already. Which half of a byte comes
// first, and whether rows of 32 bytes and more are aligned well enough, is for a probe to find out.
#pragma once
#include "tensor.h"

template <int M> struct PackedTile : TensorTile<M> {
    // Outputs of a product: a tile has two, of one matrix or of gate and up.
    static constexpr constant uint HALF = TILE_OUTPUTS / 2;

    using Left = tensor<threadgroup bfloat, dextents<int32_t, 2>, tensor_inline>;
    template <class Code> using Right = tensor<device Code, dextents<int32_t, 2>, tensor_inline>;
    // Of one group of columns: the default mode, which forgets what was there.
    using Product =
        matmul2d<matmul2d_descriptor(M, 32, 64, false, true, false), execution_simdgroups<M < 32 ? 2 : 4>>;

    template <class Code> static auto make() {
        Product product;
        return product.template get_destination_cooperative_tensor<Left, Right<Code>, float>();
    }

    // Outputs of `half_index`: the first of them, and how many there are. Behind the last output: none.
    static uint2 outputs_of(TileWeights weights, uint half_index) {
        uint first = weights.first + (weights.gated ? 0 : half_index * HALF);
        return uint2(first, first < weights.outputs ? min(weights.outputs - first, HALF) : 0);
    }

    // A group of columns of `outputs.y` weight rows from `outputs.x` on.
    template <class Code>
    static Right<Code> codes_of(Matrix matrix, uint bits, uint2 outputs, uint columns, uint step) {
        ulong first = (ulong)outputs.x * columns + step * GROUP;
        device uchar* codes = (device uchar*)matrix.codes + first * bits / 8;
        return Right<Code>(codes, dextents<int32_t, 2>(64, outputs.y), array<int32_t, 2>{1, int32_t(columns)});
    }

    template <class Sums> static void clear(thread Sums& sums) {
        for (ushort i = 0; i < sums.get_capacity(); ++i) {
            if (sums.get_mask(i)) sums[i] = 0.0f;
        }
    }

    // Adds a group's product. `totals`: sums of the activations of each row; `pairs`: scale and bias of each output.
    template <class Sums, class Codes>
    static void add_group(
        thread Sums& sums, thread Sums& part, threadgroup bfloat* x, Codes codes, threadgroup const float* totals,
        threadgroup const float2* pairs)
    {
        Left left(x, dextents<int32_t, 2>(64, M));
        Product product;
        product.run(left, codes, part);
        for (ushort i = 0; i < sums.get_capacity(); ++i) {
            if (!sums.get_mask(i)) continue;
            auto place = sums.get_multidimensional_index(i);
            float2 pair = pairs[place[0]];
            sums[i] += pair.x * part[i] + pair.y * totals[place[1]];
        }
    }

    template <class Sums> static void store(thread Sums& sums, threadgroup float* stage, uint half_index) {
        typename TensorTile<M>::Result to(
            stage + half_index * HALF, dextents<int32_t, 2>(32, M), array<int32_t, 2>{1, 64});
        sums.store(to);
    }
};

// Writes a step's activations and the sum of each row. Eight threads side by side have a row.
template <int M>
inline void write_packed_step(
    threadgroup bfloat* x, threadgroup float* totals, thread InputPieces<PackedTile<M>>& pieces, uint thread_index)
{
#pragma unroll
    for (uint i = 0; i < InputPieces<PackedTile<M>>::COUNT; ++i) {
        uint2 place = PackedTile<M>::input_place(i * PackedTile<M>::THREADS + thread_index);
        uint4 words = pieces.words[i];
        *(threadgroup uint4*)(x + PackedTile<M>::operand(place.x, place.y)) = words;
        float2 sum = unpack_bfloats(words.x) + unpack_bfloats(words.y) + unpack_bfloats(words.z) +
                     unpack_bfloats(words.w);
        float total = sum.x + sum.y;
        for (ushort distance = 1; distance < 8; distance *= 2) total += simd_shuffle_xor(total, distance);
        if (place.y == 0) totals[place.x] = total;
    }
}

// Codes of the first half and of the second may be of different widths.
template <int M, class Code, class OtherCode>
inline void multiply_packed(
    threadgroup uint4* memory, thread InputPieces<PackedTile<M>>& pieces, TileWeights weights, uint thread_index)
{
    using Tile = PackedTile<M>;
    threadgroup bfloat* x = (threadgroup bfloat*)memory;
    // Behind the activations, where other tiles have weights.
    threadgroup float2* pairs = (threadgroup float2*)(x + M * GROUP);
    threadgroup float* totals = (threadgroup float*)(pairs + TILE_OUTPUTS);
    Matrix other = weights.matrix;
    if (weights.gated) other = weights.up;
    uint other_bits = weights.gated ? weights.up_bits : weights.bits;
    uint2 outputs = Tile::outputs_of(weights, 0), other_outputs = Tile::outputs_of(weights, 1);
    auto sums = Tile::template make<Code>();
    auto part = Tile::template make<Code>();
    auto other_sums = Tile::template make<OtherCode>();
    auto other_part = Tile::template make<OtherCode>();
    Tile::clear(sums);
    Tile::clear(other_sums);

    // Whose scale and bias this thread reads: an output of the tile, or none.
    bool second = thread_index >= Tile::HALF;
    uint within = thread_index - (second ? Tile::HALF : 0);
    bool has_pair = thread_index < TILE_OUTPUTS && within < (second ? other_outputs.y : outputs.y);
    uint row = (second ? other_outputs.x : outputs.x) + within;
    device const uchar* pair_at = second ? other.pairs : weights.matrix.pairs;
    pair_at += has_pair ? ((ulong)(row / 4) * (weights.columns / GROUP) * 4 + row % 4) * 4 : 0;

    for (uint step = 0; step < weights.columns / GROUP; ++step) {
        float2 pair = has_pair ? unpack_bfloats(*(device const uint*)(pair_at + step * 16)) : float2(0.0f);
#pragma unroll
        for (uint i = 0; i < InputPieces<Tile>::COUNT; ++i) {
            pieces.words[i] = uint4(0u);
            if (pieces.inside[i]) pieces.words[i] = *(device const uint4*)(pieces.at[i] + step * GROUP * 2);
        }
        // The step before has been multiplied.
        threadgroup_barrier(mem_flags::mem_threadgroup);
        write_packed_step<M>(x, totals, pieces, thread_index);
        if (thread_index < TILE_OUTPUTS) pairs[thread_index] = pair;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        auto codes = Tile::template codes_of<Code>(weights.matrix, weights.bits, outputs, weights.columns, step);
        Tile::add_group(sums, part, x, codes, totals, pairs);
        if (other_outputs.y > 0) {
            auto more = Tile::template codes_of<OtherCode>(other, other_bits, other_outputs, weights.columns, step);
            Tile::add_group(other_sums, other_part, x, more, totals, pairs + Tile::HALF);
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    Tile::store(sums, (threadgroup float*)memory, 0);
    Tile::store(other_sums, (threadgroup float*)memory, 1);
    threadgroup_barrier(mem_flags::mem_threadgroup);
}

template <int M> inline TileWeights weights_of(PackedTile<M>, TileWeights weights, uint) { return weights; }

// Weights of 16 bits have no codes: those are for the other tiles.
template <int M>
inline void multiply_rows(
    PackedTile<M>, threadgroup uint4* memory, thread InputPieces<PackedTile<M>>& pieces, thread TileWeights& weights,
    bool, uint, uint thread_index, uint)
{
    uint other_bits = weights.gated ? weights.up_bits : weights.bits;
    if (weights.bits == 4 && other_bits == 4) {
        multiply_packed<M, uint4b_format, uint4b_format>(memory, pieces, weights, thread_index);
    } else if (weights.bits == 4) {
        multiply_packed<M, uint4b_format, uint8_t>(memory, pieces, weights, thread_index);
    } else if (other_bits == 4) {
        multiply_packed<M, uint8_t, uint4b_format>(memory, pieces, weights, thread_index);
    } else {
        multiply_packed<M, uint8_t, uint8_t>(memory, pieces, weights, thread_index);
    }
}
