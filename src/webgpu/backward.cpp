// Host side of attention_bwd_delta, attention_bwd_dq and attention_bwd_dkv: (lse, delta) of every row once,
// then one dispatch for each of dq, dv and dk.

#include <algorithm>

#include "webgpu/backend.hpp"
#include "webgpu/tiles.hpp"

namespace attnspan::webgpu {
namespace {

struct Operands {
  BoundRows query, key, value, out, dout, lse, dlse, stats;
  Binding side;
};

Extent rows_extent(const Problem& problem, int64_t heads, int64_t rows, int64_t dim) {
  return {problem.packed() ? 1 : problem.batch, heads, rows, dim};
}

BoundRows make_stats(Commands& commands, const Extent& e) {
  BoundRows stats;
  stats.binding.buffer = commands.scratch(static_cast<uint64_t>(8 * e.batch * e.heads * e.rows));
  stats.params.row = 8;
  stats.params.head = static_cast<uint32_t>(8 * e.rows);
  stats.params.batch = e.batch > 1 ? static_cast<uint32_t>(e.heads) * stats.params.head : 0;
  return stats;
}

void record_delta(Context& context, Commands& commands, const Problem& problem, const Operands& o) {
  DeltaParams p;
  p.out = o.out.params, p.dout = o.dout.params, p.lse = o.lse.params, p.dlse = o.dlse.params;
  p.stats = o.stats.params;
  p.batch = problem.packed() ? 1 : static_cast<uint32_t>(problem.batch);
  p.heads = static_cast<uint32_t>(problem.heads);
  p.rows = static_cast<uint32_t>(problem.seqlen_q);
  p.head_dim_v = static_cast<uint32_t>(problem.head_dim_v);
  p.in_format = plain_loader(problem.dtype);
  constexpr int64_t kThreads = 64;  // one a row
  const int64_t groups = (int64_t{p.batch} * p.heads * p.rows + kThreads - 1) / kThreads;
  p.grid_x = static_cast<uint32_t>(std::min<int64_t>(groups, kGridWidth));
  Binding d_sinks, sinks;
  if (problem.d_sinks != nullptr) {
    sinks.buffer = static_cast<WGPUBuffer>(static_cast<void*>(const_cast<float*>(problem.sinks)));
    d_sinks.buffer = static_cast<WGPUBuffer>(static_cast<void*>(problem.d_sinks));
  }
  const std::vector<Binding> bindings = {o.out.binding, o.dout.binding,  o.lse.binding, o.dlse.binding,
                                         sinks,         o.stats.binding, d_sinks};
  if (groups > 0) {
    const Pipeline& delta = context.pipelines.get({"attention_bwd_delta", "delta", "", {}}, "urrrrrww");
    commands.dispatch(delta, &p, sizeof(p), bindings, p.grid_x,
                      static_cast<uint32_t>((groups + p.grid_x - 1) / p.grid_x), 1);
  }
  if (problem.d_sinks == nullptr) return;
  const Pipeline& sum = context.pipelines.get({"attention_bwd_delta", "sink_gradient", "", {}}, "urrrrrww");
  commands.dispatch(sum, &p, sizeof(p), bindings, p.heads, 1, 1);
}

Specialisation specialised(const Capabilities& c, const char* shader, const char* entry,
                           const ForwardTile& tile, const Params& p) {
  Specialisation s{shader, entry, "", {}};
  s.constants = {
      {"THREADS", tile.threads()},      {"OWN", tile.rows},         {"OTHER", tile.keys},
      {"DIM_QUADS", tile.dim_quads},    {"CHUNK", tile.value_keys}, {"COLUMN_VECS", tile.column_vecs},
      {"STAGE_VECS", tile.stage_vecs()}};
  if (c.software) return s;
  const auto constant = [&](const char* name, Loader loader) {
    s.constants.emplace_back(name, static_cast<double>(loader));
  };
  constant("QUERY_FORMAT", p.query_format);
  constant("KEY_FORMAT", p.key_format);
  constant("VALUE_FORMAT", p.value_format);
  constant("DOUT_FORMAT", p.dout_format);
  constant("OUT_FORMAT", p.out_format);
  return s;
}

int64_t tiles_of(const Problem& problem, int64_t length, int64_t own) {
  return problem.packed() ? length / own + problem.batch : (length + own - 1) / own;
}

// dq (rows of query), or dk and dv (keys): one dispatch.
void record_gradient(Context& context, Commands& commands, const Problem& problem, Params p,
                     const Operands& o, const BoundRows& gradient, const char* name, bool of_query,
                     bool of_key) {
  if (gradient.binding.buffer == nullptr) return;
  require_distinct(gradient, name, {o.query, o.key, o.value, o.dout});
  p.out = gradient.params;
  const int64_t width = of_query || of_key ? problem.head_dim : problem.head_dim_v;
  const ForwardTile& tile = forward_tile(context.device.capabilities(), width);
  p.column_blocks = static_cast<uint32_t>((width + tile.columns() - 1) / tile.columns());
  Specialisation s =
      specialised(context.device.capabilities(), of_query ? "attention_bwd_dq" : "attention_bwd_dkv",
                  of_query ? "backward_query" : "backward_key_value", tile, p);
  if (!of_query) s.constants.emplace_back("WANT_KEY", of_key ? 1 : 0);
  const int64_t tiles = tiles_of(problem, of_query ? problem.seqlen_q : problem.seqlen_k, tile.rows);
  commands.dispatch(context.pipelines.get(s, "urrrrrrw"), &p, sizeof(p),
                    {o.query.binding, o.key.binding, o.value.binding, o.dout.binding, o.stats.binding, o.side,
                     gradient.binding},
                    static_cast<uint32_t>(tiles) * p.column_blocks, of_query ? p.heads : p.kv_heads,
                    problem.packed() ? 1 : p.batch);
}

}  // namespace

void record_backward(Context& context, Commands& commands, const Problem& problem) {
  if (problem.batch == 0) return;
  GpuDevice& device = context.device;
  const DType dtype = problem.dtype;
  Params p = base_params(problem);
  const Extent q = rows_extent(problem, problem.heads, problem.seqlen_q, problem.head_dim);
  const Extent out = rows_extent(problem, problem.heads, problem.seqlen_q, problem.head_dim_v);
  const Extent k = rows_extent(problem, problem.kv_heads, problem.seqlen_k, problem.head_dim);
  const Extent v = rows_extent(problem, problem.kv_heads, problem.seqlen_k, problem.head_dim_v);
  Operands o;
  o.query = bind_rows(device, problem.query, q, dtype, "query");
  o.key = bind_rows(device, problem.key, k, dtype, "key");
  o.value = bind_rows(device, problem.value, v, dtype, "value");
  o.out = bind_rows(device, problem.out, out, dtype, "out");
  o.dout = bind_rows(device, problem.dout, out, dtype, "dout");
  o.lse = bind_lse(device, problem.lse, out, "lse");
  o.dlse = bind_lse(device, problem.dlse, out, "dlse");
  o.stats = make_stats(commands, out);
  o.side = bind_side(device, commands, problem, p);
  record_delta(context, commands, problem, o);

  p.query = o.query.params, p.key = o.key.params, p.value = o.value.params;
  p.dout = o.dout.params, p.stats = o.stats.params;
  p.query_format = o.query.loader, p.key_format = o.key.loader, p.value_format = o.value.loader;
  p.dout_format = o.dout.loader;
  p.out_format = plain_loader(dtype);
  record_gradient(context, commands, problem, p, o, bind_rows(device, problem.dq, q, dtype, "dq"), "dq", true,
                  false);
  record_gradient(context, commands, problem, p, o, bind_rows(device, problem.dv, v, dtype, "dv"), "dv",
                  false, false);
  record_gradient(context, commands, problem, p, o, bind_rows(device, problem.dk, k, dtype, "dk"), "dk",
                  false, true);
}

}  // namespace attnspan::webgpu
