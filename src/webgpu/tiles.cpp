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

std::string matrix_prelude(const Capabilities& c, const MatrixTile& tile, int64_t head_dim,
                           int64_t head_dim_v) {
  std::string prelude =
      "enable f16;\nenable subgroups;\nenable chromium_experimental_subgroup_matrix;\n"
      "diagnostic(off, chromium.subgroup_matrix_uniformity);\ndiagnostic(off, subgroup_uniformity);\n";
  const auto constant = [&](const char* name, int64_t value) {
    prelude += std::string("const ") + name + " = " + std::to_string(value) + "u;\n";
  };
  constant("MATRIX", c.matrix);
  constant("SUBGROUP", c.subgroup_min);
  constant("SUBGROUPS", tile.subgroups);
  constant("KEY_TILES", tile.key_tiles);
  constant("DIM_TILES", (head_dim + c.matrix - 1) / c.matrix);
  constant("VALUE_TILES", (head_dim_v + c.matrix - 1) / c.matrix);
  return prelude;
}

}  // namespace attnspan::webgpu
