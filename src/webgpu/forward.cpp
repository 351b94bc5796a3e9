// Host side of the forward pass: which kernel serves a problem, and how the keys are split.
//   many rows, dense: attention_forward.wgsl straight to out and lse
//   many rows, cache: attention_forward.wgsl over splits of the keys, joined by attention_merge.wgsl
//   few rows:         attention_decode.wgsl over splits of the keys, joined by attention_merge.wgsl

#include <algorithm>
#include <bit>
#include <span>

#include "kv/format.hpp"
#include "kv/tbq4_constants.hpp"
#include "webgpu/backend.hpp"

namespace attnspan::webgpu {
namespace {

struct Operands {
  BoundRows query, key, value, key_scale, value_scale, out, lse;
  Binding side;
  int64_t width = 0;           // of the stored value rows: head_dim_v, or padded where they are rotated
  uint32_t rotated_block = 0;  // of the values; 0 = not rotated
};

constexpr const char* kBindings = "urrrrrrww";

std::vector<Binding> bindings_of(const Operands& o) {
  return {o.query.binding,       o.key.binding, o.value.binding, o.key_scale.binding,
          o.value_scale.binding, o.side,        o.out.binding,   o.lse.binding};
}

void set_operands(Params& p, const Operands& o) {
  p.query = o.query.params, p.key = o.key.params, p.value = o.value.params;
  p.key_scale = o.key_scale.params, p.value_scale = o.value_scale.params;
  p.out = o.out.params, p.lse = o.lse.params;
  p.query_format = o.query.loader, p.key_format = o.key.loader, p.value_format = o.value.loader;
}

// On a CPU that plays the GPU formats stay parameters: compiling costs more than their branches.
void specialise_format(const Capabilities& c, Specialisation& s, const char* name, Loader loader) {
  if (!c.software) s.constants.emplace_back(name, static_cast<double>(loader));
}

// ---- attention_forward.wgsl

void dispatch_forward(Context& context, Commands& commands, const Problem& problem, Params& p,
                      const Operands& o) {
  set_operands(p, o);
  const Capabilities& c = context.device.capabilities();
  const ForwardTile& tile =
      context.forced.forward != nullptr ? *context.forced.forward : forward_tile(c, o.width);
  Specialisation s{"attention_forward", "forward", "", {}};
  s.constants = {{"THREADS", tile.threads()},      {"TILE_ROWS", tile.rows},
                 {"TILE_KEYS", tile.keys},         {"DIM_QUADS", tile.dim_quads},
                 {"VALUE_KEYS", tile.value_keys},  {"COLUMN_VECS", tile.column_vecs},
                 {"STAGE_VECS", tile.stage_vecs()}};
  specialise_format(c, s, "QUERY_FORMAT", p.query_format);
  specialise_format(c, s, "KEY_FORMAT", p.key_format);
  specialise_format(c, s, "VALUE_FORMAT", p.value_format);
  specialise_format(c, s, "OUT_FORMAT", p.out_format);
  const int64_t tiles = problem.packed() ? problem.seqlen_q / tile.rows + problem.batch
                                         : (problem.seqlen_q + tile.rows - 1) / tile.rows;
  p.column_blocks = static_cast<uint32_t>((o.width + tile.columns() - 1) / tile.columns());
  commands.dispatch(context.pipelines.get(s, kBindings), &p, sizeof(p), bindings_of(o),
                    static_cast<uint32_t>(tiles) * p.column_blocks * p.splits, p.heads,
                    problem.packed() ? 1 : p.batch);
}

// ---- attention_forward_matrix.wgsl

// Null where the problem or the adapter does not suit it.
const MatrixTile* plan_matrix(const Context& context, const Problem& problem, const Operands& o) {
  const Capabilities& c = context.device.capabilities();
  const auto whole_vectors = [](const BoundRows& rows) {
    const RowsParams& p = rows.params;
    return rows.binding.buffer != nullptr && (p.base | p.batch | p.head | p.row) % 16 == 0;
  };
  if (c.matrix == 0 || context.forced.no_matrix || problem.dtype != DType::f16 || problem.cache != nullptr ||
      std::max(problem.head_dim, problem.head_dim_v) > std::min<int64_t>(kWidestMatrixRow, 8 * c.matrix) ||
      !whole_vectors(o.query) || !whole_vectors(o.key) || !whole_vectors(o.value))
    return nullptr;
  if (context.forced.matrix != nullptr) return context.forced.matrix;
  const auto whole = [&](int64_t dim) {
    return static_cast<uint32_t>(dim + c.matrix - 1) / c.matrix * c.matrix;
  };
  const uint32_t dim = whole(problem.head_dim), dim_v = whole(problem.head_dim_v);
  for (const MatrixTile& tile : kMatrixTiles) {
    if (std::max(dim, dim_v) <= tile.widest && tile.subgroups * c.subgroup_min <= c.workgroup_threads &&
        tile.storage_bytes(c.matrix, c.subgroup_min, dim, dim_v) <= c.workgroup_storage)
      return &tile;
  }
  return nullptr;
}

void dispatch_matrix(Context& context, Commands& commands, const Problem& problem, Params& p,
                     const Operands& o, const MatrixTile& tile) {
  set_operands(p, o);
  const Capabilities& c = context.device.capabilities();
  const std::string prelude = matrix_prelude(c, tile, problem.head_dim, problem.head_dim_v);
  const int64_t rows = tile.rows(c.matrix);
  const int64_t tiles =
      problem.packed() ? problem.seqlen_q / rows + problem.batch : (problem.seqlen_q + rows - 1) / rows;
  commands.dispatch(context.pipelines.get({"attention_forward_matrix", "forward", prelude, {}}, "urrrrww"),
                    &p, sizeof(p),
                    {o.query.binding, o.key.binding, o.value.binding, o.side, o.out.binding, o.lse.binding},
                    p.heads, static_cast<uint32_t>(tiles), problem.packed() ? 1 : p.batch);
}

// ---- attention_decode.wgsl

// Values in a 16-byte vector of a key row.
uint32_t values_in_vector(Loader loader) {
  switch (loader) {
    case Loader::f16_vec:
    case Loader::bf16_vec:
      return 8;
    case Loader::q8:
      return 16;
    case Loader::tbq4:
      return 32;
    default:
      return 4;
  }
}

// Rows as they lie, 16 bytes at a time: whole vectors at aligned addresses.
bool in_vectors(const BoundRows& rows, int64_t width) {
  const RowsParams& p = rows.params;
  const bool aligned = (p.base | p.batch | p.head | p.row) % 16 == 0;
  switch (rows.loader) {
    case Loader::f32_vec:
      return aligned && width % 4 == 0;
    case Loader::f16_vec:
    case Loader::bf16_vec:
      return aligned && width % 8 == 0;
    case Loader::q8:
    case Loader::tbq4:
      return aligned;
    default:
      return false;
  }
}

struct DecodePlan {
  DecodeTile tile{};
  uint32_t rows = 0;         // 0: this kernel does not serve the problem
  uint32_t query_quads = 0;  // that the scores run over
  uint32_t query_vecs = 0;   // kept in workgroup memory
  uint32_t row_tiles = 0;
};

constexpr int64_t kFewRows = 16;  // more rows keep the tiles of attention_forward.wgsl busy

DecodePlan plan_decode(const Context& context, const Problem& problem, const Params& p, const Operands& o) {
  const Capabilities& c = context.device.capabilities();
  DecodePlan plan;
  const int64_t pairs = problem.seqlen_q * problem.group();
  if (problem.packed() || problem.seqlen_q > kFewRows || pairs > 4 * kFewRows ||
      o.key.binding.buffer == nullptr || !in_vectors(o.key, p.head_dim) || !in_vectors(o.value, o.width)) {
    return plan;
  }
  const uint32_t per_vector = values_in_vector(o.key.loader);
  // The shader takes four vectors at a time: zeros stand behind the last.
  plan.query_quads = (p.head_dim + 4 * per_vector - 1) / (4 * per_vector) * per_vector;
  // One pipeline for many head dims where compiling is what costs.
  const uint32_t kept_quads = c.software ? (plan.query_quads <= 32 ? 32 : 160) : plan.query_quads;
  const auto wanted =
      static_cast<uint32_t>(std::bit_ceil(static_cast<uint64_t>(std::min<int64_t>(pairs, kDecodeRows))));
  const uint32_t rows = c.software ? std::max<uint32_t>(wanted, 4) : wanted;
  const std::span<const DecodeTile> tiles = context.forced.decode != nullptr
                                                ? std::span(context.forced.decode, 1)
                                                : std::span<const DecodeTile>(kDecodeTiles);
  for (const DecodeTile& tile : tiles) {
    const bool enough =
        tile.rows >= rows || tile.storage_bytes(2 * tile.rows, kept_quads) > c.workgroup_storage;
    const uint32_t used = std::min(tile.rows, rows);
    if (!enough || tile.storage_bytes(used, kept_quads) > c.workgroup_storage ||
        tile.threads > c.workgroup_threads)
      continue;
    plan.tile = tile;
    plan.rows = used;
    plan.query_vecs = used * kept_quads;
    plan.row_tiles = static_cast<uint32_t>((pairs + used - 1) / used);
    return plan;
  }
  return plan;
}

void dispatch_decode(Context& context, Commands& commands, const Problem& problem, Params& p,
                     const Operands& o, const DecodePlan& plan) {
  set_operands(p, o);
  if (o.query.loader != Loader::f32_vec) p.query_format = plain_loader(problem.dtype);
  p.query_quads = plan.query_quads;
  const Capabilities& c = context.device.capabilities();
  // Two keys at a time share what is read of the queries: 6% faster on an H200 with several rows; with one
  // row, and where the look-ups of tbq4 take the time, 1 to 3% slower.
  const bool two_keys =
      !c.software && plan.tile.step_tiles % 2 == 0 && plan.rows > 1 && p.key_format != Loader::tbq4;
  Specialisation s{"attention_decode", "decode", "", {}};
  s.constants = {{"THREADS", plan.tile.threads},
                 {"ROWS", plan.rows},
                 {"STEP_TILES", plan.tile.step_tiles},
                 {"TWO_KEYS", two_keys ? 1.0 : 0.0},
                 {"QUERY_VECS", plan.query_vecs}};
  specialise_format(c, s, "KEY_FORMAT", p.key_format);
  specialise_format(c, s, "VALUE_FORMAT", p.value_format);
  commands.dispatch(context.pipelines.get(s, kBindings), &p, sizeof(p), bindings_of(o),
                    plan.row_tiles * p.splits, p.kv_heads, p.batch);
}

// ---- operands

Extent query_extent(const Problem& problem, int64_t dim) {
  return {problem.packed() ? 1 : problem.batch, problem.heads, problem.seqlen_q, dim};
}

void bind_dense(GpuDevice& device, const Problem& problem, Operands& o) {
  const int64_t batch = problem.packed() ? 1 : problem.batch;
  o.key = bind_rows(device, problem.key, {batch, problem.kv_heads, problem.seqlen_k, problem.head_dim},
                    problem.dtype, "key");
  o.value = bind_rows(device, problem.value, {batch, problem.kv_heads, problem.seqlen_k, problem.head_dim_v},
                      problem.dtype, "value");
}

void bind_cache(GpuDevice& device, const Problem& problem, Params& p, Operands& o) {
  const KvView& cache = *problem.cache;
  o.key = bind_cache_rows(device, cache, cache.key, "cache");
  o.value = bind_cache_rows(device, cache, cache.value, "cache");
  o.key_scale = bind_cache_scales(device, cache, cache.key, "cache");
  o.value_scale = bind_cache_scales(device, cache, cache.value, "cache");
  if (cache.value.format == KvFormat::tbq4) {
    const int64_t dim = encoded_dim(cache, KvSide::value);
    o.rotated_block = p.value_block = static_cast<uint32_t>(tbq4::block_size(dim));
    o.width = tbq4::padded_dim(dim);
  }
}

// Scores against tbq4 keys are products in their rotated domain.
void rotate_query_for(Context& context, Commands& commands, const Problem& problem, Params& p, Operands& o) {
  if (problem.cache == nullptr || problem.cache->key.format != KvFormat::tbq4) return;
  p.key_block = static_cast<uint32_t>(tbq4::block_size(problem.head_dim));
  p.head_dim = static_cast<uint32_t>(tbq4::padded_dim(problem.head_dim));
  o.query = rotate_query(context, commands, problem, o.query, p.head_dim, p.key_block);
}

// How many parts the keys of a sequence may be cut into: enough workgroups to fill a device at batch 1.
// Neither the batch nor its other lengths count, so that a sequence's answer does not depend on its
// neighbours.
constexpr int64_t kBusyWorkgroups = 512;
constexpr int64_t kMaxSplits = 256;  // what attention_merge.wgsl joins

int64_t splits_for(int64_t workgroups, int64_t busy) {
  return std::clamp<int64_t>(busy / workgroups, 1, kMaxSplits);
}

void set_splits(const Context& context, const Problem& problem, int64_t workgroups, Params& p) {
  const Capabilities& c = context.device.capabilities();
  const int64_t busy = context.forced.busy_workgroups > 0 ? context.forced.busy_workgroups : kBusyWorkgroups;
  p.min_split_keys = c.software ? 64 : 256;
  p.max_splits = static_cast<uint32_t>(splits_for(workgroups, busy));
  const int64_t longest = (problem.seqlen_k + p.min_split_keys - 1) / p.min_split_keys;
  p.splits = static_cast<uint32_t>(std::clamp<int64_t>(longest, 1, p.max_splits));
}

}  // namespace

int64_t most_splits(const Problem& problem) {
  const int64_t pairs = problem.seqlen_q * problem.group();
  const bool few = problem.seqlen_q <= kFewRows && pairs <= 4 * kFewRows;
  const int64_t workgroups = few ? problem.kv_heads * ((pairs + kDecodeRows - 1) / kDecodeRows)
                                 : problem.heads * (problem.seqlen_q / 64 + 1);
  return splits_for(std::max<int64_t>(workgroups, 1), kBusyWorkgroups);
}

void record_forward(Context& context, Commands& commands, const Problem& problem) {
  if (problem.batch == 0 || problem.seqlen_q == 0) return;
  GpuDevice& device = context.device;
  const Capabilities& c = device.capabilities();
  Params p = base_params(problem);
  Operands o;
  o.width = problem.head_dim_v;
  o.query = bind_rows(device, problem.query, query_extent(problem, problem.head_dim), problem.dtype, "query");
  if (problem.cache != nullptr) {
    bind_cache(device, problem, p, o);
  } else {
    bind_dense(device, problem, o);
  }
  o.out = bind_rows(device, problem.out, query_extent(problem, problem.head_dim_v), problem.dtype, "out");
  o.lse = bind_lse(device, problem.lse, query_extent(problem, 1), "lse");
  require_distinct(o.out, "out", {o.query, o.key, o.value, o.key_scale, o.value_scale, o.lse});
  require_distinct(o.lse, "lse", {o.query, o.key, o.value, o.key_scale, o.value_scale});
  o.side = bind_side(device, commands, problem, p);
  rotate_query_for(context, commands, problem, p, o);

  const DecodePlan decode = plan_decode(context, problem, p, o);
  if (decode.rows > 0) {
    set_splits(context, problem, problem.kv_heads * decode.row_tiles, p);
  } else if (problem.cache != nullptr) {
    const int64_t rows = forward_tile(c, o.width).rows;
    set_splits(context, problem, problem.heads * ((problem.seqlen_q + rows - 1) / rows), p);
  }
  if (decode.rows == 0 && p.splits == 1 && o.rotated_block == 0) {
    p.out_format = plain_loader(problem.dtype);
    if (const MatrixTile* tile = plan_matrix(context, problem, o)) {
      dispatch_matrix(context, commands, problem, p, o, *tile);
    } else {
      dispatch_forward(context, commands, problem, p, o);
    }
    return;
  }
  const uint32_t sinks = p.sinks;
  p.sinks = kNone;  // partial states are made without sinks
  const BoundRows out = o.out, lse = o.lse;
  const int64_t width = (o.width + 3) / 4 * 4;
  const SplitStates states = make_split_states(device, commands, problem, p.splits, width);
  o.out = states.out, o.lse = states.lse;
  p.out_split = states.out_split, p.lse_split = states.lse_split;
  p.out_format = Loader::f32_vec;
  p.head_dim_v = static_cast<uint32_t>(decode.rows > 0 ? width : o.width);
  if (decode.rows > 0) {
    dispatch_decode(context, commands, problem, p, o, decode);
  } else {
    dispatch_forward(context, commands, problem, p, o);
  }
  merge_splits(context, commands, problem, states, o.rotated_block, o.side, sinks, out, lse);
}

}  // namespace attnspan::webgpu
