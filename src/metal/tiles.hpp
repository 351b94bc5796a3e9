#pragma once
// The host's view of shaders/tiles.h.

#include <cstdint>
#include <string>

#include "attnspan/tensor.hpp"
#include "metal/shaders/params.h"
#include "metal/shaders/tiles.h"

namespace attnspan::metal {

// One row of the tile table.
struct Tile {
  const char* name;
  int max_dim;
  int row_groups, column_groups, blocks;

  constexpr int rows() const { return 8 * row_groups; }
};

inline constexpr Tile kTiles[] = {
#define ATTNSPAN_ROW(NAME, MAX_DIM, ROW_GROUPS, COLUMN_GROUPS, BLOCKS) \
  {#NAME, MAX_DIM, ROW_GROUPS, COLUMN_GROUPS, BLOCKS},
    ATTNSPAN_TILES(ATTNSPAN_ROW)
#undef ATTNSPAN_ROW
};

// Every Apple GPU with simdgroup matrices (M1, A14 and later) has this much.
inline constexpr int kThreadgroupBytes = 32 * 1024;

constexpr bool tiles_are_consistent() {
  for (const Tile& tile : kTiles) {
    if (tile.row_groups * tile.column_groups != ATTNSPAN_SIMDGROUPS) return false;
    if (tile.blocks * tile.column_groups * 8 != tile.max_dim) return false;
    for (int element_bytes : {2, 4}) {
      const int forward = attnspan_metal::forward_layout(tile.max_dim, tile.rows(), element_bytes).bytes;
      const int backward = attnspan_metal::backward_layout(tile.max_dim, tile.rows(), element_bytes).bytes;
      if (forward > kThreadgroupBytes || backward > kThreadgroupBytes) return false;
    }
  }
  return true;
}
static_assert(tiles_are_consistent());

// Decode: at most this many query rows of a sequence (its own, never a batchmate's).
inline constexpr int64_t kDecodeRows = 16;

// The first tile of the wanted kind that holds `dim`.
const Tile& tile_for(int64_t dim, bool decode);

}  // namespace attnspan::metal
