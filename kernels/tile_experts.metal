// Products with routed experts on simdgroup matrices: prefill at bf16 on every GPU. tile.h says how the work is shaped.
#include "tile_experts.h"

using MatrixTile16 = MatrixTile<16>;
using MatrixTile32 = MatrixTile<32>;
using MatrixTile64 = MatrixTile<64>;
template [[host_name("tile_experts_16")]] kernel decltype(tile_experts<MatrixTile16>) tile_experts<MatrixTile16>;
template [[host_name("tile_experts_32")]] kernel decltype(tile_experts<MatrixTile32>) tile_experts<MatrixTile32>;
template [[host_name("tile_experts_64")]] kernel decltype(tile_experts<MatrixTile64>) tile_experts<MatrixTile64>;
