// The kernels of tile.metal on tensor operations.
#include "tensor.h"
#define TILE_PROJECT tensor_project
#include "tile_project.h"

using TensorTile16 = TensorTile<16>;
using TensorTile32 = TensorTile<32>;
using TensorTile64 = TensorTile<64>;
template [[host_name("tensor_project_16")]] kernel decltype(tensor_project<TensorTile16>) tensor_project<TensorTile16>;
template [[host_name("tensor_project_32")]] kernel decltype(tensor_project<TensorTile32>) tensor_project<TensorTile32>;
template [[host_name("tensor_project_64")]] kernel decltype(tensor_project<TensorTile64>) tensor_project<TensorTile64>;
