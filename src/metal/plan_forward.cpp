// Launches of forward: sequences of few query rows in decode tiles, their keys split and merged; longer ones
// in tiles of many rows. Which a sequence gets depends on its own rows, so a packed call may hold both.

#include <algorithm>

#include "metal/plan_parts.hpp"

namespace attnspan::metal {
namespace {

using attnspan_metal::AttentionParams;

// What both kinds of launch of one call share.
struct ForwardParts {
  FunctionConstants constants;
  AttentionParams params;
  std::vector<TensorSlot> tensors;
  int64_t widest;  // of a stored row
};

Launch forward_launch(const Problem& p, const ForwardParts& parts, const Tile& tile, int64_t rows) {
  const DType type = tile_type(p);
  Launch launch = attention_launch(parts.constants, parts.params, parts.tensors);
  launch.kernel = kernel_name("attention_forward", tile, type);
  launch.groups = {tiles(rows * p.group(), tile.rows()), static_cast<uint32_t>(p.kv_heads),
                   static_cast<uint32_t>(p.batch * parts.params.splits)};
  launch.threadgroup_bytes = static_cast<uint32_t>(
      attnspan_metal::forward_layout(tile.max_dim, tile.rows(), static_cast<int>(size_of(type))).bytes);
  return launch;
}

Launch merge_splits(Launch launch, const Problem& p, int64_t rows) {
  launch.kernel = "attention_merge";
  launch.groups = {tiles(rows * p.group(), ATTNSPAN_SIMDGROUPS), static_cast<uint32_t>(p.kv_heads),
                   static_cast<uint32_t>(p.batch)};
  launch.threadgroup_bytes = static_cast<uint32_t>(ATTNSPAN_SIMDGROUPS * launch.constants[VALUE_WIDTH] * 4);
  return launch;
}

// The most splits that a sequence of up to `rows` query rows can need, from the shape of the call alone.
int64_t most_splits(const Problem& p, int64_t rows) {
  const bool windowed = p.window_left < kUnlimited && p.window_right < kUnlimited;
  const int64_t keys = windowed ? std::min(p.seqlen_k, p.window_left + p.window_right + rows) : p.seqlen_k;
  return std::clamp<int64_t>((keys + ATTNSPAN_SPLIT_KEYS - 1) / ATTNSPAN_SPLIT_KEYS, 1, ATTNSPAN_MAX_SPLITS);
}

void add_decode(const Problem& p, ForwardParts parts, Plan& plan, Scratch& scratch) {
  const int64_t rows = std::min(p.seqlen_q, kDecodeRows), splits = most_splits(p, rows);
  parts.params.most_rows = static_cast<int32_t>(rows);
  parts.params.splits = static_cast<int32_t>(splits);
  parts.constants[SPLIT] = splits > 1;
  if (splits > 1) {
    // Packed sequences may hold fewer rows in all than `rows` for each of them.
    const bool as_packed = p.packed() && p.seqlen_q <= p.batch * rows;
    parts.params.partial_pitch = as_packed ? 0 : static_cast<int32_t>(rows);
    const int64_t partials = splits * p.heads * (as_packed ? p.seqlen_q : p.batch * rows);
    parts.tensors[k_partial_out] = scratch.take(partials * parts.constants[VALUE_WIDTH] * 4);
    parts.tensors[k_partial_state] = scratch.take(partials * 2 * 4);
  }
  const Launch launch = forward_launch(p, parts, tile_for(parts.widest, true), rows);
  plan.launches.push_back(launch);
  if (splits > 1) plan.launches.push_back(merge_splits(launch, p, rows));
}

void add_rows(const Problem& p, ForwardParts parts, Plan& plan) {
  parts.params.least_rows = static_cast<int32_t>(kDecodeRows + 1);
  plan.launches.push_back(forward_launch(p, parts, tile_for(parts.widest, false), p.seqlen_q));
}

}  // namespace

Plan plan_forward(const Problem& p) {
  if (is_unfused(p)) return plan_unfused_forward(p);
  Plan plan;
  Scratch scratch(plan);
  if (p.batch == 0 || p.seqlen_q == 0) return plan;
  ForwardParts parts = {constants_of(p), params_of(p), tensors_of(p), 0};
  parts.widest = std::max(parts.constants[KEY_WIDTH], parts.constants[VALUE_WIDTH]);
  if (p.nan_guard) parts.tensors[k_nonfinite] = {nullptr, plan.nonfinite_offset = 0, true};
  // Packed lengths lie on the device: of several sequences, any may be short.
  const bool may_be_long = p.seqlen_q > kDecodeRows;
  if (!may_be_long || (p.packed() && p.batch > 1)) add_decode(p, parts, plan, scratch);
  if (may_be_long) add_rows(p, parts, plan);
  return plan;
}

}  // namespace attnspan::metal
