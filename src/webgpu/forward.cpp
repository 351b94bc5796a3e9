// Host side of attention_forward.wgsl: dense tensors straight to out and lse; caches in splits of the keys,
// which attention_merge.wgsl joins.

#include <algorithm>

#include "kv/format.hpp"
#include "kv/tbq4_constants.hpp"
#include "webgpu/backend.hpp"
#include "webgpu/tiles.hpp"

namespace attnspan::webgpu {
namespace {

Specialisation specialised(const Capabilities& c, const ForwardTile& tile, const Params& p) {
  Specialisation s{"attention_forward", "forward", "", {}};
  s.constants = {{"THREADS", tile.threads()},      {"TILE_ROWS", tile.rows},
                 {"TILE_KEYS", tile.keys},         {"DIM_QUADS", tile.dim_quads},
                 {"VALUE_KEYS", tile.value_keys},  {"COLUMN_VECS", tile.column_vecs},
                 {"STAGE_VECS", tile.stage_vecs()}};
  if (c.software) return s;  // formats stay parameters: compiling costs more than their branches
  const auto constant = [&](const char* name, Loader loader) {
    s.constants.emplace_back(name, static_cast<double>(loader));
  };
  constant("QUERY_FORMAT", p.query_format);
  constant("KEY_FORMAT", p.key_format);
  constant("VALUE_FORMAT", p.value_format);
  constant("OUT_FORMAT", p.out_format);
  return s;
}

struct Operands {
  BoundRows query, key, value, key_scale, value_scale, out, lse;
  Binding side;
};

void dispatch_forward(Context& context, Commands& commands, const Problem& problem, Params& p,
                      const Operands& o, int64_t value_width) {
  p.query = o.query.params, p.key = o.key.params, p.value = o.value.params;
  p.key_scale = o.key_scale.params, p.value_scale = o.value_scale.params;
  p.out = o.out.params, p.lse = o.lse.params;
  p.query_format = o.query.loader, p.key_format = o.key.loader, p.value_format = o.value.loader;
  const Capabilities& c = context.device.capabilities();
  const ForwardTile& tile = forward_tile(c, value_width);
  const Pipeline& pipeline = context.pipelines.get(specialised(c, tile, p), "urrrrrrww");
  const int64_t tiles = problem.packed() ? problem.seqlen_q / tile.rows + problem.batch
                                         : (problem.seqlen_q + tile.rows - 1) / tile.rows;
  commands.dispatch(pipeline, &p, sizeof(p),
                    {o.query.binding, o.key.binding, o.value.binding, o.key_scale.binding,
                     o.value_scale.binding, o.side, o.out.binding, o.lse.binding},
                    static_cast<uint32_t>(tiles) * p.splits, p.heads, problem.packed() ? 1 : p.batch);
}

Extent query_extent(const Problem& problem, int64_t dim) {
  return {problem.packed() ? 1 : problem.batch, problem.heads, problem.seqlen_q, dim};
}

void bind_results(GpuDevice& device, const Problem& problem, Operands& o) {
  o.out = bind_rows(device, problem.out, query_extent(problem, problem.head_dim_v), problem.dtype, "out");
  o.lse = bind_lse(device, problem.lse, query_extent(problem, 1), "lse");
  require_distinct(o.out, "out", {o.query, o.key, o.value, o.lse});
  require_distinct(o.lse, "lse", {o.query, o.key, o.value});
}

void forward_dense(Context& context, Commands& commands, const Problem& problem) {
  GpuDevice& device = context.device;
  Params p = base_params(problem);
  const int64_t batch = problem.packed() ? 1 : problem.batch;
  const Extent k{batch, problem.kv_heads, problem.seqlen_k, problem.head_dim};
  const Extent v{batch, problem.kv_heads, problem.seqlen_k, problem.head_dim_v};
  Operands o;
  o.query = bind_rows(device, problem.query, query_extent(problem, problem.head_dim), problem.dtype, "query");
  o.key = bind_rows(device, problem.key, k, problem.dtype, "key");
  o.value = bind_rows(device, problem.value, v, problem.dtype, "value");
  bind_results(device, problem, o);
  o.side = bind_side(device, commands, problem, p);
  p.out_format = plain_loader(problem.dtype);
  dispatch_forward(context, commands, problem, p, o, problem.head_dim_v);
}

// How many parts the keys of a sequence may be cut into: enough workgroups to fill a device at batch 1.
// Neither the batch nor its other lengths count, so that a sequence's answer does not depend on its
// neighbours.
constexpr int64_t kBusyWorkgroups = 512;
constexpr int64_t kMaxSplits = 256;  // what attention_merge.wgsl joins

void set_splits(const Capabilities& c, const Problem& problem, int64_t workgroups, Params& p) {
  p.min_split_keys = c.software ? 64 : 256;
  p.max_splits = static_cast<uint32_t>(std::clamp<int64_t>(kBusyWorkgroups / workgroups, 1, kMaxSplits));
  const int64_t longest = (problem.seqlen_k + p.min_split_keys - 1) / p.min_split_keys;
  p.splits = static_cast<uint32_t>(std::clamp<int64_t>(longest, 1, p.max_splits));
}

void forward_cache(Context& context, Commands& commands, const Problem& problem) {
  GpuDevice& device = context.device;
  const KvView& cache = *problem.cache;
  Params p = base_params(problem);
  Operands o;
  o.query = bind_rows(device, problem.query, query_extent(problem, problem.head_dim), problem.dtype, "query");
  o.key = bind_cache_rows(device, cache, cache.key, "cache");
  o.value = bind_cache_rows(device, cache, cache.value, "cache");
  o.key_scale = bind_cache_scales(device, cache, cache.key, "cache");
  o.value_scale = bind_cache_scales(device, cache, cache.value, "cache");
  bind_results(device, problem, o);
  o.side = bind_side(device, commands, problem, p);

  if (cache.key.format == KvFormat::tbq4) {
    p.key_block = static_cast<uint32_t>(tbq4::block_size(problem.head_dim));
    const int64_t width = tbq4::padded_dim(problem.head_dim);
    o.query = rotate_query(context, commands, problem, o.query, width, p.key_block);
    p.head_dim = static_cast<uint32_t>(width);
  }
  int64_t width = problem.head_dim_v;
  uint32_t rotated_block = 0;
  if (cache.value.format == KvFormat::tbq4) {
    const int64_t dim = encoded_dim(cache, KvSide::value);
    rotated_block = p.value_block = static_cast<uint32_t>(tbq4::block_size(dim));
    width = tbq4::padded_dim(dim);
  }
  const ForwardTile& tile = forward_tile(device.capabilities(), width);
  set_splits(device.capabilities(), problem, problem.heads * ((problem.seqlen_q + tile.rows - 1) / tile.rows),
             p);
  if (p.splits == 1 && rotated_block == 0) {
    p.out_format = plain_loader(problem.dtype);
    dispatch_forward(context, commands, problem, p, o, width);
    return;
  }
  const uint32_t sinks = p.sinks;
  const BoundRows out = o.out, lse = o.lse;
  const SplitStates states = make_split_states(device, commands, problem, p.splits, width);
  o.out = states.out, o.lse = states.lse;
  p.out_split = states.out_split, p.lse_split = states.lse_split;
  p.out_format = Loader::f32_vec;
  p.head_dim_v = static_cast<uint32_t>(width);
  p.sinks = kNone;  // partial states are made without sinks
  dispatch_forward(context, commands, problem, p, o, width);
  merge_splits(context, commands, problem, states, rotated_block, o.side, sinks, out, lse);
}

}  // namespace

void record_forward(Context& context, Commands& commands, const Problem& problem) {
  if (problem.batch == 0 || problem.seqlen_q == 0) return;
  problem.cache != nullptr ? forward_cache(context, commands, problem)
                           : forward_dense(context, commands, problem);
}

}  // namespace attnspan::webgpu
