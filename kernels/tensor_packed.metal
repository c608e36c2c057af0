// The kernels of tile.metal on tensor operations that take codes. Their weights are exact, not rounded to bfloat.
#include "tensor_packed.h"
#include "tile_project.h"

using PackedTile16 = PackedTile<16>;
using PackedTile32 = PackedTile<32>;
using PackedTile64 = PackedTile<64>;
template [[host_name("packed_project_16")]] kernel decltype(tile_project<PackedTile16>) tile_project<PackedTile16>;
template [[host_name("packed_project_32")]] kernel decltype(tile_project<PackedTile32>) tile_project<PackedTile32>;
template [[host_name("packed_project_64")]] kernel decltype(tile_project<PackedTile64>) tile_project<PackedTile64>;
