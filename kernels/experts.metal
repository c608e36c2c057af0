// Matrix-vector products with the experts that rows are routed to. Rows that chose the same expert are
// computed together, so that it is read once. vector.h says how the work is shaped.
#include "grouping.h"
#include "vector.h"

constant uint OUTPUTS [[function_constant(10)]];
constant uint EXPERTS [[function_constant(11)]];
// Experts that a row is routed to.
constant uint CHOICES [[function_constant(12)]];
// Pairs that share a row of the input: CHOICES, or 1 where each pair has a row of its own.
constant uint PAIRS_A_ROW [[function_constant(13)]];
constant uint BITS [[function_constant(14)]];
constant bool HAS_UP [[function_constant(15)]];
constant uint UP_BITS [[function_constant(16)]];
constant bool OUTPUT_BFLOAT [[function_constant(17)]];
constant bool GROUPED [[function_constant(18)]];

// The (row, choice) pairs that a threadgroup computes with one expert.
template <int M> struct Members {
    uint expert;
    uint count;
    uint pairs[M];
};

// Decode: the pairs whose expert is that of pair `first`, if no earlier pair has it. A row chooses an expert once,
// so there are at most as many as rows.
template <int M>
inline void find_members(threadgroup Members<M>& members, device const uint* ids, uint pair_count, uint first) {
    uint expert = ids[first], count = 0;
    if (M == 1) {
        // One row: no two pairs share an expert.
        members.expert = expert;
        members.count = 1;
        members.pairs[0] = first;
        return;
    }
    for (uint pair = 0; pair < pair_count; ++pair) {
        if (ids[pair] != expert) continue;
        if (pair < first) {
            members.count = 0;
            return;
        }
        members.pairs[count++] = pair;
    }
    members.expert = expert;
    members.count = count;
}

// Prefill: tile `tile` of M pairs of one expert.
template <int M>
inline void find_tile_members(threadgroup Members<M>& members, device const uint* grouping, uint tile, uint lane) {
    ExpertTile found = find_tile(grouping, EXPERTS, M, tile, lane);
    device const uint* pairs = grouping + EXPERTS + 1 + found.first;
    if (lane < found.count) members.pairs[lane] = pairs[lane];
    if (lane == 0) {
        members.expert = found.expert;
        members.count = found.count;
    }
}

// Contract. input [rows, COLUMNS], or [rows · CHOICES, COLUMNS]; norm [COLUMNS]; ids [rows, CHOICES]; weight and up
// [EXPERTS, OUTPUTS, COLUMNS]; output [rows · CHOICES, OUTPUTS] = x · Wᵀ, or silu(x · Wᵀ) · (x · Upᵀ), rounded
// once to its type. grouping: offsets and pairs of `group_experts`, where GROUPED.
// Grid: blocks of four rows / (SIMDGROUPS / SPLIT); pairs, or where GROUPED the most tiles of M pairs that there can be.
template <int M>
kernel void project_experts(
    device const uchar* input [[buffer(0)]],
    device const float* norm [[buffer(1), function_constant(HAS_NORM)]],
    device const uint* ids [[buffer(2)]],
    device const uint* grouping [[buffer(3), function_constant(GROUPED)]],
    device const uchar* weight [[buffer(4)]],
    device const uchar* up [[buffer(5), function_constant(HAS_UP)]],
    device uchar* output [[buffer(6)]],
    constant uint& pair_count [[buffer(7)]],
    uint2 position [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]])
{
    threadgroup float4 stage[Stage<M>::SIZE];
    threadgroup float4 sums[Stage<M>::RESULTS];
    threadgroup float4 ups[Stage<M>::RESULTS];
    threadgroup float partial[MOST_SIMDGROUPS * M];
    threadgroup uint rows[M];
    threadgroup Members<M> members;
    if (simdgroup == 0) {
        if (GROUPED) {
            find_tile_members<M>(members, grouping, position.y, lane);
        } else if (lane == 0) {
            find_members<M>(members, ids, pair_count, position.y);
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    uint count = members.count;
    if (count == 0) return;
    uint expert = members.expert;
    if (thread_index < count) rows[thread_index] = members.pairs[thread_index] / PAIRS_A_ROW;

    uint base = position.x * BLOCKS_A_ROUND;
    Block block;
    block.matrix = matrix_at(weight, expert, OUTPUTS, COLUMNS, BITS);
    block.other = matrix_at(HAS_UP ? up : weight, expert, OUTPUTS, COLUMNS, UP_BITS);
    block.block = base + simdgroup / SPLIT;
    block.bits = BITS;
    block.other_bits = UP_BITS;
    block.active = block.block < (OUTPUTS + 3) / 4;
    block.gated = HAS_UP && block.active;
    Results<M> results = {sums, ups};
    Factors<M> squares;
    for (int m = 0; m < M; ++m) squares.of[m] = 0.0f;
    if (M == 1) {
        LaneCodes codes = load_codes(block, (simdgroup % SPLIT * 32 + lane) * LANE_COLUMNS, 0);
        for (uint first = 0; first < COLUMNS; first += Stage<1>::CHUNKS * CHUNK) {
            threadgroup_barrier(mem_flags::mem_threadgroup);
            for (uint chunk = 0; chunk < uint(Stage<1>::CHUNKS); ++chunk) {
                if (first + chunk * CHUNK >= COLUMNS) break;
                stage_chunk<M>(stage + chunk * Stage<M>::CHUNK_SIZE, squares, input, norm, rows, count,
                               first + chunk * CHUNK, 0, thread_index);
            }
            threadgroup_barrier(mem_flags::mem_threadgroup);
            if (SPLIT > 1 && block.active) multiply_split({sums, ups}, block, codes, stage, first, simdgroup, lane);
        }
        if (SPLIT == 1 && block.active) {
            Sums<1> own, others;
            clear(own);
            clear(others);
            Block nothing = block;
            nothing.active = nothing.gated = false;
            multiply_alone(own, others, codes, block, nothing, stage, lane);
            leave_sums<1>(sums, own, false, simdgroup, lane);
            if (HAS_UP) leave_sums<1>(ups, others, false, simdgroup, lane);
        }
    } else {
        multiply_together<M>(results, squares, block, HAS_UP, stage, input, norm, rows, count, thread_index, simdgroup,
                             lane);
    }
    if (HAS_NORM) finish_norm<M>(squares, partial, simdgroup, lane);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint at = thread_index; at < BLOCKS_A_ROUND * M * 4; at += SIMDGROUPS * 32) {
        uint local = at / (M * 4), m = at / 4 % M, r = at % 4;
        uint column = (base + local) * 4 + r;
        if (m >= count || column >= OUTPUTS) continue;
        float value = finished<M>(results.first, squares, local, m, r);
        if (HAS_UP) value = silu(value) * finished<M>(results.other, squares, local, m, r);
        store1(output, (ulong)members.pairs[m] * OUTPUTS + column, value, OUTPUT_BFLOAT);
    }
}
template [[host_name("project_experts_1")]] kernel decltype(project_experts<1>) project_experts<1>;
template [[host_name("project_experts_2")]] kernel decltype(project_experts<2>) project_experts<2>;
template [[host_name("project_experts_4")]] kernel decltype(project_experts<4>) project_experts<4>;
template [[host_name("project_experts_8")]] kernel decltype(project_experts<8>) project_experts<8>;

// ---- Decode: down products, routing weights, the shared expert and the residual in one step.

constant uint SHARED_COLUMNS [[function_constant(20)]];
constant uint SHARED_BITS [[function_constant(21)]];
constant bool SHARED_BFLOAT [[function_constant(22)]];
// Outputs of a threadgroup.
constant constexpr uint TILE = 16;
constant constexpr uint MOST_CHOICES = 32;

// The lanes that share a row of `columns` columns: enough to take it in one round, where 32 are.
inline uint lanes_of(uint columns) {
    uint lanes = 1;
    while (lanes < 32 && lanes * LANE_COLUMNS < columns) lanes *= 2;
    return lanes;
}

// A lane's 32 columns of an activation, ready for codes4 and codes8, and their sum.
struct Activation {
    float4 of[8];
    float total;
};

inline Activation load_activation(device const uchar* input, ulong first, bool inside, bool is_bfloat) {
    Activation x;
    x.total = 0.0f;
#pragma unroll
    for (uint v = 0; v < 8; ++v) {
        float4 part = float4(0.0f);
        if (inside) part = load4(input, first + v * 4, is_bfloat);
        x.total += (part.x + part.y) + (part.z + part.w);
        x.of[v] = shrink(part);
    }
    return x;
}

inline float dot_codes(uint4 low, uint4 high, uint bits, thread const Activation& x) {
    float sum = 0.0f;
    if (bits == 4) {
#pragma unroll
        for (uint v = 0; v < 8; ++v) sum += dot(codes4(low[v / 2] >> (v % 2 * 16)), x.of[v]);
    } else {
#pragma unroll
        for (uint v = 0; v < 4; ++v) sum += dot(codes8(low[v]), x.of[v]) + dot(codes8(high[v]), x.of[v + 4]);
    }
    return sum;
}

// The products of a lane's columns with four rows, whose codes it holds.
inline float4 dot_block(BlockCodes low, BlockCodes high, uint bits, thread const Activation& x) {
    float2 pair0 = unpack_bfloats(low.pairs.x), pair1 = unpack_bfloats(low.pairs.y);
    float2 pair2 = unpack_bfloats(low.pairs.z), pair3 = unpack_bfloats(low.pairs.w);
    float4 dots = float4(dot_codes(low.row0, high.row0, bits, x), dot_codes(low.row1, high.row1, bits, x),
                         dot_codes(low.row2, high.row2, bits, x), dot_codes(low.row3, high.row3, bits, x));
    return float4(pair0.x, pair1.x, pair2.x, pair3.x) * dots + float4(pair0.y, pair1.y, pair2.y, pair3.y) * x.total;
}

// The products of one expert's (or the shared expert's) TILE rows from `first_row` on with the activations of the pairs
// that chose it (or of all rows), into `products`. `input` has a row of `columns` a pair (or a row). The lanes that
// share a weight row are as many as take it in one round; the others take the next blocks of four.
template <int M>
inline void add_slot(
    threadgroup float* products, Matrix matrix, uint first_row, uint columns, uint bits, device const uchar* input,
    bool is_bfloat, device const uint* ids, uint slot, uint slot_count, uint expert, bool is_shared, uint lane)
{
    uint lanes = lanes_of(columns), blocks_at_once = 32 / lanes;
    for (uint first = 0; first < columns; first += lanes * LANE_COLUMNS) {
        uint column = first + lane % lanes * LANE_COLUMNS;
        bool inside = column < columns;
        Activation x;
        if (M == 1) x = load_activation(input, (ulong)(is_shared ? 0 : slot) * columns + column, inside, is_bfloat);
#pragma unroll
        for (uint i = 0; i < TILE / 4; ++i) {
            if (i * blocks_at_once >= TILE / 4) break;
            uint local = i * blocks_at_once + lane / lanes, block = first_row / 4 + local;
            bool there = local < TILE / 4 && block * 4 < OUTPUTS;
            uint from = there ? column : columns;
            BlockCodes low = load_block(matrix, block, columns, bits, from, 0), high = low;
            if (bits == 8) high = load_block(matrix, block, columns, bits, from, 1);
            uint last = M == 1 ? slot + 1 : slot_count;
            for (uint pair = M > 1 && is_shared ? 0 : slot; pair < last; ++pair) {
                if (M > 1 && !is_shared && ids[pair] != expert) continue;
                if (M > 1) x = load_activation(input, (ulong)pair * columns + column, inside, is_bfloat);
                float4 dots = dot_block(low, high, bits, x);
                for (ushort distance = lanes / 2; distance > 0; distance /= 2) dots += simd_shuffle_xor(dots, distance);
                // Row and choice of the pair; the shared expert comes behind the choices.
                uint row = is_shared ? (M == 1 ? 0 : pair) : pair / CHOICES;
                uint choice = is_shared ? CHOICES : pair % CHOICES;
                if (there && lane % lanes == 0) {
                    threadgroup float4* sums =
                        (threadgroup float4*)(products + (row * (MOST_CHOICES + 1) + choice) * TILE) + local;
                    // The same lane each time: no barrier is needed.
                    *sums = first == 0 ? dots : *sums + dots;
                }
            }
        }
    }
}

// Contract. output [rows, OUTPUTS] = residual + Σ weights_i · (down_i · activated_i) + sigmoid(shared_gate) · (shared_down ·
// shared), the sum in order of choice; activated [rows · CHOICES, COLUMNS], shared [rows, SHARED_COLUMNS]; residual and
// output f32, nothing between is rounded. At most M rows; rows that chose the same expert read it once.
// A threadgroup makes TILE outputs: its simdgroups take the experts in turn, each expert's TILE rows held in registers;
// their products meet in threadgroup memory. Grid: OUTPUTS / TILE.
template <int M>
kernel void expert_output(
    device const uchar* activated [[buffer(0)]],
    device const uint* ids [[buffer(1)]],
    device const float* weights [[buffer(2)]],
    device const uchar* down [[buffer(3)]],
    device const uchar* shared_input [[buffer(4)]],
    device const uchar* shared_down [[buffer(5)]],
    device const float* shared_gate [[buffer(6)]],
    device const float* residual [[buffer(7)]],
    device float* output [[buffer(8)]],
    constant uint& row_count [[buffer(9)]],
    uint position [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]])
{
    // Products by row, choice (the shared expert last) and output.
    threadgroup float4 product_memory[M * (MOST_CHOICES + 1) * TILE / 4];
    threadgroup float* products = (threadgroup float*)product_memory;
    uint pair_count = row_count * CHOICES, first_row = position * TILE;
    for (uint slot = simdgroup; slot <= pair_count; slot += SIMDGROUPS) {
        if (slot == pair_count) {
            Matrix matrix = matrix_at(shared_down, 0, OUTPUTS, SHARED_COLUMNS, SHARED_BITS);
            add_slot<M>(products, matrix, first_row, SHARED_COLUMNS, SHARED_BITS, shared_input, SHARED_BFLOAT, ids, slot,
                        M == 1 ? slot + 1 : row_count, 0, true, lane);
            continue;
        }
        uint expert = ids[slot];
        if (M > 1) {
            bool taken = false;
            for (uint pair = lane; pair < slot; pair += 32) taken = taken || ids[pair] == expert;
            if (simd_any(taken)) continue;
        }
        Matrix matrix = matrix_at(down, expert, OUTPUTS, COLUMNS, BITS);
        add_slot<M>(products, matrix, first_row, COLUMNS, BITS, activated, INPUT_BFLOAT, ids, slot, pair_count, expert,
                    false, lane);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint at = thread_index; at < row_count * TILE; at += SIMDGROUPS * 32) {
        uint row = at / TILE, column = at % TILE;
        if (first_row + column >= OUTPUTS) continue;
        threadgroup const float* mine = products + row * (MOST_CHOICES + 1) * TILE + column;
        float sum = 0.0f;
        for (uint choice = 0; choice < CHOICES; ++choice) {
            sum = fma(weights[row * CHOICES + choice], mine[choice * TILE], sum);
        }
        sum = fma(sigmoid(shared_gate[row]), mine[CHOICES * TILE], sum);
        ulong out = (ulong)row * OUTPUTS + first_row + column;
        output[out] = residual[out] + sum;
    }
}
template [[host_name("expert_output_1")]] kernel decltype(expert_output<1>) expert_output<1>;
template [[host_name("expert_output_2")]] kernel decltype(expert_output<2>) expert_output<2>;
template [[host_name("expert_output_4")]] kernel decltype(expert_output<4>) expert_output<4>;
template [[host_name("expert_output_8")]] kernel decltype(expert_output<8>) expert_output<8>;
