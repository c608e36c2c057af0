// The kernels of tile_experts.metal on tensor operations.
#include "tensor.h"
#include "tile_experts.h"

using TensorTile16 = TensorTile<16>;
using TensorTile32 = TensorTile<32>;
using TensorTile64 = TensorTile<64>;
template [[host_name("tensor_experts_16")]] kernel decltype(tile_experts<TensorTile16>) tile_experts<TensorTile16>;
template [[host_name("tensor_experts_32")]] kernel decltype(tile_experts<TensorTile32>) tile_experts<TensorTile32>;
template [[host_name("tensor_experts_64")]] kernel decltype(tile_experts<TensorTile64>) tile_experts<TensorTile64>;
