// Dense products of many rows on simdgroup matrices: prefill at bf16 on every GPU. tile.h says how the work is shaped.
#include "tile_project.h"

using MatrixTile16 = MatrixTile<16>;
using MatrixTile32 = MatrixTile<32>;
using MatrixTile64 = MatrixTile<64>;
template [[host_name("tile_project_16")]] kernel decltype(tile_project<MatrixTile16>) tile_project<MatrixTile16>;
template [[host_name("tile_project_32")]] kernel decltype(tile_project<MatrixTile32>) tile_project<MatrixTile32>;
template [[host_name("tile_project_64")]] kernel decltype(tile_project<MatrixTile64>) tile_project<MatrixTile64>;
