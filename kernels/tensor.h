// Tiles on the tensor operations of Metal 4, for GPUs with matrix units of their own. tile.h says what a tile is.
//
// Both operands lie in threadgroup memory as dense bfloat tensors; the sums are a cooperative tensor of the whole
// threadgroup. tensor_packed.h has another way with the weights, which rounds differently.
//
// Steps are added in order, but the order within a step is the implementation's and may differ between sizes of tiles:
// where results must not depend on how a prompt is cut into chunks, one size is used for all of its rows.
#pragma once
#include "tile.h"
#include <metal_tensor>
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>
using namespace mpp::tensor_ops;

template <int M> struct TensorTile {
    static constexpr constant uint ROWS = M;
    static constexpr constant uint SIMDGROUPS = M < 32 ? 2 : 4;
    static constexpr constant uint THREADS = SIMDGROUPS * 32;

    using Operand = tensor<threadgroup bfloat, dextents<int32_t, 2>, tensor_inline>;
    using Result = tensor<threadgroup float, dextents<int32_t, 2>, tensor_inline>;
    // The mode is not the default one: that would forget the steps before.
    using Product = matmul2d<
        matmul2d_descriptor(M, 64, 64, false, true, false, matmul2d_descriptor::mode::multiply_accumulate),
        execution_simdgroups<M < 32 ? 2 : 4>>;

    static uint operand(uint row, uint eighth) { return row * 64 + eighth * 8; }
    // Rows are as long as all banks: eight threads side by side write to one row, or with `turn` to different eighths.
    static uint2 input_place(uint piece) { return uint2(piece / 8, piece % 8); }
    static uint2 weight_place(uint run) { return uint2(run / 2, run % 2); }
    static uint turn(uint row) { return row % 4; }
    static uint result(uint row, uint column) { return row * 64 + column; }
    static uint2 result_place(uint piece, uint quads) { return uint2(piece / quads, piece % quads); }

    static auto make() {
        Product product;
        return product.template get_destination_cooperative_tensor<Operand, Operand, float>();
    }
    template <class Sums> static void clear(thread Sums& sums) {
        for (ushort i = 0; i < sums.get_capacity(); ++i) {
            if (sums.get_mask(i)) sums[i] = 0.0f;
        }
    }

    template <class Sums>
    static void multiply(thread Sums& sums, threadgroup bfloat* x, threadgroup bfloat* w, uint) {
        Operand left(x, dextents<int32_t, 2>(64, M));
        Operand right(w, dextents<int32_t, 2>(64, 64));
        Product product;
        product.run(left, right, sums);
    }

    template <class Sums> static void store(thread Sums& sums, threadgroup float* stage, uint) {
        Result to(stage, dextents<int32_t, 2>(64, M));
        sums.store(to);
    }
};
