// Host side of attention_forward.wgsl.

#include <algorithm>

#include "webgpu/backend.hpp"
#include "webgpu/tiles.hpp"

namespace attnspan::webgpu {
namespace {

const ForwardTile& forward_tile(const Capabilities& c, int64_t value_width) {
  for (const ForwardTile& tile : kForwardTiles) {
    // A CPU that plays the GPU gains nothing from large workgroups.
    const bool fits = tile.storage_bytes() <= (c.software ? 16384 : c.workgroup_storage) &&
                      tile.threads() <= c.workgroup_threads;
    if (fits && value_width <= tile.value_width) return tile;
  }
  throw Error(ErrorCode::unsupported, "webgpu",
              "no tile for head_dim_v " + std::to_string(value_width) + " within this adapter's limits");
}

}  // namespace

void record_forward(Context& context, Commands& commands, const Problem& problem) {
  GpuDevice& device = context.device;
  if (problem.batch == 0 || problem.seqlen_q == 0) return;
  Params p = base_params(problem);
  const int64_t batch = problem.packed() ? 1 : problem.batch;
  const Extent q{batch, problem.heads, problem.seqlen_q, problem.head_dim};
  const Extent out_extent{batch, problem.heads, problem.seqlen_q, problem.head_dim_v};
  const Extent k{batch, problem.kv_heads, problem.seqlen_k, problem.head_dim};
  const Extent v{batch, problem.kv_heads, problem.seqlen_k, problem.head_dim_v};
  const BoundRows query = bind_rows(device, problem.query, q, problem.dtype, "query");
  const BoundRows key = bind_rows(device, problem.key, k, problem.dtype, "key");
  const BoundRows value = bind_rows(device, problem.value, v, problem.dtype, "value");
  const BoundRows out = bind_rows(device, problem.out, out_extent, problem.dtype, "out");
  const BoundRows lse = bind_lse(device, problem.lse, q, "lse");
  require_distinct(out, "out", {query, key, value, lse});
  require_distinct(lse, "lse", {query, key, value});
  p.query = query.params, p.key = key.params, p.value = value.params;
  p.out = out.params, p.lse = lse.params;
  p.query_format = query.loader, p.key_format = key.loader, p.value_format = value.loader;
  p.out_format = problem.dtype == DType::f32   ? Loader::f32_vec
                 : problem.dtype == DType::f16 ? Loader::f16_vec
                                               : Loader::bf16_vec;
  const Binding side = bind_side(device, commands, problem, p);

  const ForwardTile& tile = forward_tile(device.capabilities(), problem.head_dim_v);
  Specialisation s{"attention_forward", "forward", "", {}};
  s.constants = {{"THREADS", tile.threads()},      {"TILE_ROWS", tile.rows},
                 {"TILE_KEYS", tile.keys},         {"DIM_QUADS", tile.dim_quads},
                 {"VALUE_KEYS", tile.value_keys},  {"COLUMN_VECS", tile.column_vecs},
                 {"STAGE_VECS", tile.stage_vecs()}};
  if (!device.capabilities().software) {
    const auto constant = [&](const char* name, Loader loader) {
      s.constants.emplace_back(name, static_cast<double>(loader));
    };
    constant("QUERY_FORMAT", p.query_format);
    constant("KEY_FORMAT", p.key_format);
    constant("VALUE_FORMAT", p.value_format);
    constant("OUT_FORMAT", p.out_format);
  }
  const Pipeline& pipeline = context.pipelines.get(s, "urrrrrrww");
  const uint32_t tiles =
      static_cast<uint32_t>(problem.packed() ? problem.seqlen_q / tile.rows + problem.batch
                                             : (problem.seqlen_q + tile.rows - 1) / tile.rows);
  commands.dispatch(pipeline, &p, sizeof(p),
                    {query.binding, key.binding, value.binding, {}, {}, side, out.binding, lse.binding},
                    tiles, p.heads, problem.packed() ? 1 : p.batch);
}

}  // namespace attnspan::webgpu
