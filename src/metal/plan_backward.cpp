// Launches of backward: delta, d_sinks, dq, dkv.

#include <algorithm>

#include "metal/plan_parts.hpp"

namespace attnspan::metal {
namespace {

using attnspan_metal::AttentionParams;

// delta is dense like lse: [batch, heads, seqlen_q], packed [heads, total_q].
attnspan_metal::RowStrides delta_strides(const Problem& p) {
  return {p.packed() ? 0 : p.heads * p.seqlen_q, p.seqlen_q, 1};
}

Launch tiled(Launch launch, const char* stem, const Tile& tile, DType type, int64_t rows, const Problem& p) {
  launch.kernel = kernel_name(stem, tile, type);
  launch.groups = {tiles(rows, tile.rows()), static_cast<uint32_t>(p.kv_heads),
                   static_cast<uint32_t>(p.batch)};
  launch.threadgroup_bytes = static_cast<uint32_t>(
      attnspan_metal::backward_layout(tile.max_dim, tile.rows(), static_cast<int>(size_of(type))).bytes);
  return launch;
}

std::vector<Launch> tiled_gradients(const Problem& p, const Launch& common) {
  const Tile& tile = tile_for(std::max(p.head_dim, p.head_dim_v), false);
  std::vector<Launch> launches;
  if (p.batch > 0 && p.seqlen_q > 0) {
    launches.push_back(tiled(common, "attention_dq", tile, p.dtype, p.seqlen_q * p.group(), p));
  }
  if (p.batch > 0 && p.seqlen_k > 0) {
    launches.push_back(tiled(common, "attention_dkv", tile, p.dtype, p.seqlen_k, p));
  }
  return launches;
}

}  // namespace

Plan plan_backward(const Problem& p) {
  Plan plan;
  Scratch scratch(plan);
  AttentionParams params = params_of(p);
  params.delta = delta_strides(p);
  std::vector<TensorSlot> tensors = tensors_of(p);
  if (p.nan_guard) tensors[k_nonfinite] = {nullptr, plan.nonfinite_offset = 0, true};
  tensors[k_delta] = scratch.take((p.packed() ? 1 : p.batch) * p.heads * p.seqlen_q * 4);
  const Launch common = attention_launch(constants_of(p), params, tensors);
  if (p.batch > 0 && p.seqlen_q > 0) {
    Launch delta = common;
    delta.kernel = "attention_delta";
    delta.groups = {tiles(p.seqlen_q, ATTNSPAN_SIMDGROUPS), static_cast<uint32_t>(p.heads),
                    static_cast<uint32_t>(p.batch)};
    plan.launches.push_back(delta);
  }
  for (Launch& launch : is_unfused(p) ? unfused_gradients(p, common, scratch) : tiled_gradients(p, common)) {
    plan.launches.push_back(std::move(launch));
  }
  if (p.d_sinks != nullptr) {
    Launch d_sinks = common;
    d_sinks.kernel = "attention_d_sinks";
    d_sinks.groups = {static_cast<uint32_t>(p.heads), 1, 1};
    d_sinks.threadgroup_bytes = ATTNSPAN_SIMDGROUPS * 4;
    plan.launches.push_back(d_sinks);
  }
  return plan;
}

}  // namespace attnspan::metal
