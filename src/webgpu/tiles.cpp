#include "webgpu/tiles.hpp"

#include "webgpu/backend.hpp"

namespace attnspan::webgpu {

// A CPU that plays the GPU gains nothing from large workgroups.
static uint32_t storage_of(const Capabilities& c) { return c.software ? 16384 : c.workgroup_storage; }

const ForwardTile& forward_tile(const Capabilities& c, int64_t width) {
  const ForwardTile* widest = nullptr;
  for (const ForwardTile& tile : kForwardTiles) {
    if (tile.storage_bytes() > storage_of(c) || tile.threads() > c.workgroup_threads) continue;
    if (widest != nullptr && (tile.keys != widest->keys || tile.rows != widest->rows)) break;
    widest = &tile;
    if (width <= tile.columns()) break;
  }
  if (widest != nullptr) return *widest;
  throw Error(ErrorCode::unsupported, "webgpu", "no tile within this adapter's limits");
}

std::string matrix_extensions() {
  return "enable f16;\nenable subgroups;\nenable chromium_experimental_subgroup_matrix;\n"
         "diagnostic(off, chromium.subgroup_matrix_uniformity);\ndiagnostic(off, subgroup_uniformity);\n";
}

std::string matrix_prelude(const Capabilities& c, const MatrixTile& tile, int64_t head_dim,
                           int64_t head_dim_v) {
  std::string prelude = matrix_extensions();
  const auto constant = [&](const char* name, int64_t value) {
    prelude += std::string("const ") + name + " = " + std::to_string(value) + "u;\n";
  };
  constant("MATRIX", c.matrix);
  constant("SUBGROUP", c.subgroup_min);
  constant("SUBGROUPS", tile.subgroups);
  constant("DIM_TILES", (head_dim + c.matrix - 1) / c.matrix);
  constant("VALUE_TILES", (head_dim_v + c.matrix - 1) / c.matrix);
  return prelude;
}

}  // namespace attnspan::webgpu
