// The kernels of tile.metal on tensor operations.
#include "tensor.h"
#include "tile_project.h"

using TensorTile16 = TensorTile<16>;
using TensorTile32 = TensorTile<32>;
using TensorTile64 = TensorTile<64>;
template [[host_name("tensor_project_16")]] kernel decltype(tile_project<TensorTile16>) tile_project<TensorTile16>;
template [[host_name("tensor_project_32")]] kernel decltype(tile_project<TensorTile32>) tile_project<TensorTile32>;
template [[host_name("tensor_project_64")]] kernel decltype(tile_project<TensorTile64>) tile_project<TensorTile64>;
