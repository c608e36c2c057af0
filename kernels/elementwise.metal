// Kernels whose every result is made of a few values: embedding, norms of rows, activations, sums, the combination
// of experts. They move their operands once; threads side by side take four elements side by side.
#include "quantised.h"

constant uint COLUMNS [[function_constant(0)]];
constant bool INPUT_BFLOAT [[function_constant(1)]];
constant bool OUTPUT_BFLOAT [[function_constant(2)]];
constant uint BITS [[function_constant(3)]];
constant float EPSILON [[function_constant(4)]];
constant uint CHOICES [[function_constant(5)]];
constant bool SHARED_BFLOAT [[function_constant(6)]];
constant bool HAS_RESIDUAL [[function_constant(7)]];
constant bool OTHER_BFLOAT [[function_constant(8)]];

// Contract. output [rows, COLUMNS] = the dequantised rows `tokens` of table [.., COLUMNS]: scale · code rounded, then
// the sum. One thread for four columns; grid: columns / (4 · 64), rows.
kernel void embed(
    device const uint* tokens [[buffer(0)]],
    device const uchar* table [[buffer(1)]],
    device uchar* output [[buffer(2)]],
    constant uint& table_rows [[buffer(3)]],
    uint2 position [[thread_position_in_grid]])
{
    uint column = position.x * 4;
    if (column >= COLUMNS) return;
    uint row = tokens[position.y];
    Matrix matrix = matrix_at(table, 0, table_rows, COLUMNS, BITS);
    ulong pair = ((ulong)(row / 4) * (COLUMNS / GROUP) + column / GROUP) * 4 + row % 4;
    float2 scale_bias = unpack_bfloats(*(device const uint*)(matrix.pairs + pair * 4));
    ulong at = (ulong)row * COLUMNS + column;
    float4 codes;
    if (BITS == 4) {
        uint word = *(device const ushort*)(matrix.codes + at / 2);
        codes = float4(word & 15, word >> 4 & 15, word >> 8 & 15, word >> 12);
    } else {
        uint word = *(device const uint*)(matrix.codes + at);
        codes = float4(word & 255, word >> 8 & 255, word >> 16 & 255, word >> 24);
    }
    float4 scaled = scale_bias.x * codes;
    store4(output, (ulong)position.y * COLUMNS + column, scaled + float4(scale_bias.y), OUTPUT_BFLOAT);
}

// Contract. output [matrices, matrix_rows, COLUMNS] bfloat = scale · code + bias of weight [matrices, matrix_rows,
// COLUMNS], rounded once to float and then to bfloat, as tile.h makes its weights. One thread for four columns; grid:
// columns / (4 · 64), rows, matrices.
kernel void dequantise(
    device const uchar* weight [[buffer(0)]],
    device uchar* output [[buffer(1)]],
    constant uint& matrix_rows [[buffer(2)]],
    uint3 position [[thread_position_in_grid]])
{
    uint column = position.x * 4, row = position.y;
    if (column >= COLUMNS) return;
    Matrix matrix = matrix_at(weight, position.z, matrix_rows, COLUMNS, BITS);
    ulong pair = ((ulong)(row / 4) * (COLUMNS / GROUP) + column / GROUP) * 4 + row % 4;
    float2 scale_bias = unpack_bfloats(*(device const uint*)(matrix.pairs + pair * 4));
    ulong at = (ulong)row * COLUMNS + column;
    float4 codes;
    if (BITS == 4) {
        codes = codes4(*(device const ushort*)(matrix.codes + at / 2));
    } else {
        codes = codes8(*(device const uint*)(matrix.codes + at));
    }
    float4 value = fma(codes, shrink(float4(scale_bias.x)), float4(scale_bias.y));
    store4(output, (ulong)position.z * matrix_rows * COLUMNS + at, value, true);
}

// Contract. output [rows, COLUMNS] = weight · input / sqrt(mean(input²) + EPSILON). A threadgroup of 256 threads a
// row; the squares are added in one order whatever the number of rows.
kernel void rms_norm(
    device const uchar* input [[buffer(0)]],
    device const float* weight [[buffer(1)]],
    device uchar* output [[buffer(2)]],
    uint row [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]])
{
    threadgroup float partial[8];
    float squares = 0.0f;
    for (uint column = thread_index * 4; column < COLUMNS; column += 1024) {
        float4 x = load4(input, (ulong)row * COLUMNS + column, INPUT_BFLOAT);
        squares += dot(x, x);
    }
    squares = sum_lanes(squares);
    if (lane == 0) partial[simdgroup] = squares;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float sum = 0.0f;
    for (uint s = 0; s < 8; ++s) sum += partial[s];
    float factor = precise::rsqrt(sum / float(COLUMNS) + EPSILON);
    for (uint column = thread_index * 4; column < COLUMNS; column += 1024) {
        ulong at = (ulong)row * COLUMNS + column;
        float4 x = load4(input, at, INPUT_BFLOAT) * factor;
        store4(output, at, x * *(device const float4*)(weight + column), OUTPUT_BFLOAT);
    }
}

// Contract. output = silu(gate) · up, elementwise, four elements a thread.
kernel void gated_activation(
    device const uchar* gate [[buffer(0)]],
    device const uchar* up [[buffer(1)]],
    device uchar* output [[buffer(2)]],
    constant uint& count [[buffer(3)]],
    uint thread_index [[thread_position_in_grid]])
{
    uint at = thread_index * 4;
    if (at >= count) return;
    float4 g = load4(gate, at, INPUT_BFLOAT);
    float4 activated = float4(silu(g.x), silu(g.y), silu(g.z), silu(g.w));
    store4(output, at, activated * load4(up, at, OTHER_BFLOAT), OUTPUT_BFLOAT);
}

// Contract. output = residual + update, elementwise, four elements a thread.
kernel void residual_add(
    device const uchar* residual [[buffer(0)]],
    device const uchar* update [[buffer(1)]],
    device uchar* output [[buffer(2)]],
    constant uint& count [[buffer(3)]],
    uint thread_index [[thread_position_in_grid]])
{
    uint at = thread_index * 4;
    if (at >= count) return;
    float4 sum = load4(residual, at, INPUT_BFLOAT) + load4(update, at, OTHER_BFLOAT);
    store4(output, at, sum, OUTPUT_BFLOAT);
}

// Contract. output [1, COLUMNS] = row `row` of input.
kernel void select_row(
    device const uchar* input [[buffer(0)]],
    device uchar* output [[buffer(1)]],
    constant uint& row [[buffer(2)]],
    uint thread_index [[thread_position_in_grid]])
{
    uint column = thread_index * 4;
    if (column >= COLUMNS) return;
    store4(output, column, load4(input, (ulong)row * COLUMNS + column, INPUT_BFLOAT), OUTPUT_BFLOAT);
}

// Contract. output [rows, COLUMNS] = Σ weights_i · experts_i + sigmoid(shared_gate) · shared (+ residual), the sum in
// order of choice; experts [rows · CHOICES, COLUMNS], weights [rows, CHOICES] f32, shared_gate [rows] f32. Four
// columns a thread; grid: columns, rows.
kernel void combine(
    device const uchar* experts [[buffer(0)]],
    device const float* weights [[buffer(1)]],
    device const uchar* shared_output [[buffer(2)]],
    device const float* shared_gate [[buffer(3)]],
    device const float* residual [[buffer(4), function_constant(HAS_RESIDUAL)]],
    device uchar* output [[buffer(5)]],
    uint2 position [[thread_position_in_grid]])
{
    uint column = position.x * 4, row = position.y;
    if (column >= COLUMNS) return;
    float4 sum = float4(0.0f);
    for (uint choice = 0; choice < CHOICES; ++choice) {
        uint pair = row * CHOICES + choice;
        sum += weights[pair] * load4(experts, (ulong)pair * COLUMNS + column, INPUT_BFLOAT);
    }
    ulong at = (ulong)row * COLUMNS + column;
    sum += sigmoid(shared_gate[row]) * load4(shared_output, at, SHARED_BFLOAT);
    if (HAS_RESIDUAL) sum += *(device const float4*)(residual + at);
    store4(output, at, sum, OUTPUT_BFLOAT);
}
