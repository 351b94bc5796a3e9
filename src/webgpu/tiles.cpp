#include "webgpu/tiles.hpp"

#include "webgpu/backend.hpp"

namespace attnspan::webgpu {

const ForwardTile& forward_tile(const Capabilities& c, int64_t width) {
  for (const ForwardTile& tile : kForwardTiles) {
    // A CPU that plays the GPU gains nothing from large workgroups.
    const bool fits = tile.storage_bytes() <= (c.software ? 16384 : c.workgroup_storage) &&
                      tile.threads() <= c.workgroup_threads;
    if (fits && width <= tile.value_width) return tile;
  }
  throw Error(ErrorCode::unsupported, "webgpu",
              "no tile for rows of " + std::to_string(width) + " values within this adapter's limits");
}

}  // namespace attnspan::webgpu
