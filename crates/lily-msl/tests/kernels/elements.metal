// A kernel that takes a matrix apart: the lane's two elements lie where Apple's GPUs have them.
#include <metal_stdlib>
#include <metal_simdgroup_matrix>
using namespace metal;

kernel void scaled_product(
    device const bfloat* a [[buffer(0)]],
    device const bfloat* b [[buffer(1)]],
    device float* c [[buffer(2)]],
    ushort lane [[thread_index_in_simdgroup]])
{
    simdgroup_bfloat8x8 left, right;
    simdgroup_float8x8 sum = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    simdgroup_load(left, a, 8);
    simdgroup_load(right, b, 8, ulong2(0, 0), true);
    simdgroup_multiply_accumulate(sum, left, right, sum);
    const ushort quad = lane / 4;
    const ushort row = (quad & 4) + (lane / 2) % 4, column = (quad & 2) * 2 + (lane % 2) * 2;
    sum.thread_elements()[0] *= float(row * 8 + column);
    sum.thread_elements()[1] *= float(row * 8 + column + 1);
    simdgroup_store(sum, c, 8);
}
