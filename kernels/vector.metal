// Matrix-vector products with dense weights: decode at every precision, and whole prompts in f32. vector.h says how
// the work is shaped. One kernel computes up to four outputs from one input; one of them may be a gated pair.
#include "vector.h"

constant uint OUTPUTS_0 [[function_constant(10)]];
constant uint OUTPUTS_1 [[function_constant(11)]];
constant uint OUTPUTS_2 [[function_constant(12)]];
constant uint OUTPUTS_3 [[function_constant(13)]];
constant uint BITS_0 [[function_constant(14)]];
constant uint BITS_1 [[function_constant(15)]];
constant uint BITS_2 [[function_constant(16)]];
constant uint BITS_3 [[function_constant(17)]];
constant bool BFLOAT_0 [[function_constant(18)]];
constant bool BFLOAT_1 [[function_constant(19)]];
constant bool BFLOAT_2 [[function_constant(20)]];
constant bool BFLOAT_3 [[function_constant(21)]];
// Which output is silu(gate) · up, `up` being a matrix of the same shape; 4 if none is.
constant uint GATED [[function_constant(22)]];
constant uint UP_BITS [[function_constant(23)]];
constant bool HAS_RESIDUAL [[function_constant(24)]];
constant bool HAS_1 = OUTPUTS_1 > 0;
constant bool HAS_2 = OUTPUTS_2 > 0;
constant bool HAS_3 = OUTPUTS_3 > 0;
constant bool HAS_UP = GATED < 4;

// Contract. input [rows, COLUMNS]; norm [COLUMNS]; weight_i [OUTPUTS_i, COLUMNS]; output_i [rows, OUTPUTS_i],
// rounded once to its type; residual [rows, OUTPUTS_0] f32, added to output 0 before rounding.
// Grid: all blocks of four rows / SIMDGROUPS, rows / M.
template <int M>
kernel void project(
    device const uchar* input [[buffer(0)]],
    device const float* norm [[buffer(1), function_constant(HAS_NORM)]],
    device const uchar* weight_0 [[buffer(2)]],
    device const uchar* weight_1 [[buffer(3), function_constant(HAS_1)]],
    device const uchar* weight_2 [[buffer(4), function_constant(HAS_2)]],
    device const uchar* weight_3 [[buffer(5), function_constant(HAS_3)]],
    device const uchar* up [[buffer(6), function_constant(HAS_UP)]],
    device const float* residual [[buffer(7), function_constant(HAS_RESIDUAL)]],
    device uchar* output_0 [[buffer(8)]],
    device uchar* output_1 [[buffer(9), function_constant(HAS_1)]],
    device uchar* output_2 [[buffer(10), function_constant(HAS_2)]],
    device uchar* output_3 [[buffer(11), function_constant(HAS_3)]],
    constant uint& row_count [[buffer(12)]],
    uint2 position [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]])
{
    threadgroup float4 stage[Stage<M>::SIZE];
    threadgroup float partial[16 * M];
    threadgroup uint rows[M];
    uint count = min(uint(M), row_count - position.y * M);
    if (thread_index < count) rows[thread_index] = position.y * M + thread_index;

    uint block = position.x * SIMDGROUPS + simdgroup;
    uint end_0 = (OUTPUTS_0 + 3) / 4;
    uint end_1 = end_0 + (OUTPUTS_1 + 3) / 4;
    uint end_2 = end_1 + (OUTPUTS_2 + 3) / 4;
    uint end_3 = end_2 + (OUTPUTS_3 + 3) / 4;
    bool active = block < end_3;
    uint segment = 0, outputs = OUTPUTS_0, bits = BITS_0;
    device const uchar* weight = weight_0;
    if (HAS_1 && block >= end_0) {
        segment = 1, outputs = OUTPUTS_1, bits = BITS_1;
        weight = weight_1;
        if (HAS_2 && block >= end_1) {
            segment = 2, outputs = OUTPUTS_2, bits = BITS_2;
            weight = weight_2;
            if (HAS_3 && block >= end_2) {
                segment = 3, outputs = OUTPUTS_3, bits = BITS_3;
                weight = weight_3;
                block -= end_2;
            } else {
                block -= end_1;
            }
        } else {
            block -= end_0;
        }
    }
    Matrix matrix = matrix_at(weight, 0, outputs, COLUMNS, bits);
    bool gated = HAS_UP && segment == GATED;
    Matrix other = matrix_at(HAS_UP ? up : weight, 0, outputs, COLUMNS, UP_BITS);

    Sums<M> sums, ups;
    Factors<M> squares;
    clear(sums);
    clear(ups);
    for (int m = 0; m < M; ++m) squares.of[m] = 0.0f;
    Rows four = {matrix, block, bits}, other_four = {other, block, UP_BITS};
    multiply_rows<M>(sums, ups, squares, four, other_four, active, gated, stage, input, norm, rows, count, thread_index,
                     lane);
    if (HAS_NORM) finish_norm<M>(squares, partial, simdgroup, lane);
    if (!active) return;
    reduce<M>(sums, squares);
    if (HAS_UP) reduce<M>(ups, squares);
    // Lane 4m + r writes row r of activation row m.
    float4 mine = sums.of[0], mine_up = ups.of[0];
    for (int m = 1; m < M; ++m) {
        if (lane / 4 == uint(m)) {
            mine = sums.of[m];
            mine_up = ups.of[m];
        }
    }
    uint m = lane / 4, column = block * 4 + lane % 4;
    if (m >= count || column >= outputs) return;
    float value = mine[lane % 4];
    if (gated) value = silu(value) * mine_up[lane % 4];
    ulong at = (ulong)rows[m] * outputs + column;
    if (HAS_RESIDUAL && segment == 0) value += residual[at];
    if (segment == 0) store1(output_0, at, value, BFLOAT_0);
    if (HAS_1 && segment == 1) store1(output_1, at, value, BFLOAT_1);
    if (HAS_2 && segment == 2) store1(output_2, at, value, BFLOAT_2);
    if (HAS_3 && segment == 3) store1(output_3, at, value, BFLOAT_3);
}
template [[host_name("project_1")]] kernel decltype(project<1>) project<1>;
template [[host_name("project_2")]] kernel decltype(project<2>) project<2>;
template [[host_name("project_4")]] kernel decltype(project<4>) project<4>;
template [[host_name("project_8")]] kernel decltype(project<8>) project<8>;
