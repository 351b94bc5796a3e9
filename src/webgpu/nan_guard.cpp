// Host side of nan_guard.wgsl.

#include <algorithm>

#include "webgpu/backend.hpp"

namespace attnspan::webgpu {
namespace {

void guard(Context& context, Commands& commands, const Rows& rows, const Extent& e, DType dtype,
           const char* name, WGPUBuffer count) {
  const BoundRows bound = bind_rows(context.device, rows, e, dtype, name);
  if (bound.binding.buffer == nullptr) return;
  GuardParams p;
  p.out = bound.params;
  p.batch = static_cast<uint32_t>(e.batch);
  p.heads = static_cast<uint32_t>(e.heads);
  p.rows = static_cast<uint32_t>(e.rows);
  p.dim = static_cast<uint32_t>(e.dim);
  p.format = plain_loader(dtype);
  const int64_t groups = e.batch * e.heads * e.rows;
  p.grid_x = static_cast<uint32_t>(std::min<int64_t>(groups, kGridWidth));
  commands.dispatch(context.pipelines.get({"nan_guard", "guard", "", {}}, "uww"), &p, sizeof(p),
                    {bound.binding, {count, 0, 0}}, p.grid_x,
                    static_cast<uint32_t>((groups + p.grid_x - 1) / p.grid_x), 1);
}

}  // namespace

WGPUBuffer record_nan_guard(Context& context, Commands& commands, const Problem& problem) {
  const WGPUBuffer count = commands.scratch(16);
  commands.clear(count);
  const int64_t batch = problem.packed() ? 1 : problem.batch;
  const auto apply = [&](const Rows& rows, int64_t heads, int64_t length, int64_t dim, const char* name) {
    guard(context, commands, rows, {batch, heads, length, dim}, problem.dtype, name, count);
  };
  if (problem.phase == Phase::forward) {
    apply(problem.out, problem.heads, problem.seqlen_q, problem.head_dim_v, "out");
    return count;
  }
  apply(problem.dq, problem.heads, problem.seqlen_q, problem.head_dim, "dq");
  apply(problem.dk, problem.kv_heads, problem.seqlen_k, problem.head_dim, "dk");
  apply(problem.dv, problem.kv_heads, problem.seqlen_k, problem.head_dim_v, "dv");
  if (problem.d_sinks != nullptr) {
    Rows sinks;
    sinks.data = problem.d_sinks;
    guard(context, commands, sinks, {1, 1, 1, problem.heads}, DType::f32, "d_sinks", count);
  }
  return count;
}

}  // namespace attnspan::webgpu
