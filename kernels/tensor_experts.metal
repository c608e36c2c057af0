// The kernels of tile_experts.metal on tensor operations.
#include "tensor.h"
#define TILE_EXPERTS tensor_experts
#include "tile_experts.h"

using TensorTile16 = TensorTile<16>;
using TensorTile32 = TensorTile<32>;
using TensorTile64 = TensorTile<64>;
template [[host_name("tensor_experts_16")]] kernel decltype(tensor_experts<TensorTile16>) tensor_experts<TensorTile16>;
template [[host_name("tensor_experts_32")]] kernel decltype(tensor_experts<TensorTile32>) tensor_experts<TensorTile32>;
template [[host_name("tensor_experts_64")]] kernel decltype(tensor_experts<TensorTile64>) tensor_experts<TensorTile64>;
