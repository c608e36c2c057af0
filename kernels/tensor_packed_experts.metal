// The kernels of tile_experts.metal on tensor operations that take codes. Their weights are exact, not rounded to bfloat.
#include "tensor_packed.h"
#include "tile_experts.h"

using PackedTile16 = PackedTile<16>;
using PackedTile32 = PackedTile<32>;
using PackedTile64 = PackedTile<64>;
template [[host_name("packed_experts_16")]] kernel decltype(tile_experts<PackedTile16>) tile_experts<PackedTile16>;
template [[host_name("packed_experts_32")]] kernel decltype(tile_experts<PackedTile32>) tile_experts<PackedTile32>;
template [[host_name("packed_experts_64")]] kernel decltype(tile_experts<PackedTile64>) tile_experts<PackedTile64>;
