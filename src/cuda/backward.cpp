#include "cuda/backward.hpp"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <utility>

#include "cuda/backward_sm90.hpp"
#include "cuda/make_params.hpp"

namespace attnspan::cuda {
namespace {

// Both tensors' rows: `warps * 16` that a block keeps, and those of the steps.
size_t shared_bytes(const BackwardShape& shape, size_t element) {
  const size_t pad = 16 / element;
  const size_t rows =
      static_cast<size_t>(shape.warps) * 16 + static_cast<size_t>(shape.stages) * kBackwardStep;
  return rows * (shape.key_width + pad + shape.value_width + pad) * element;
}

BackwardShape choose_shape(const Params& p, size_t limit) {
  BackwardShape shape;
  const int widest = std::max(p.head_dim, p.head_dim_v);
  const size_t element = p.dtype == static_cast<int>(DType::f32) ? 4 : 2;
  shape.columns = widest <= 64 ? 64 : 128;
  shape.chunks = (widest + shape.columns - 1) / shape.columns;
  shape.key_width = (p.head_dim + 63) / 64 * 64;
  shape.value_width = (p.head_dim_v + 63) / 64 * 64;
  // Two blocks that fit a multiprocessor together hide each other's waits better than two stages do: 1.7 x at
  // D = 256, bf16, and at D = 128, f32 (H200).
  for (const size_t blocks : {2, 1}) {
    for (const auto& [warps, stages] : {std::pair{4, 2}, {4, 1}, {2, 1}, {1, 1}}) {
      shape.warps = warps;
      shape.stages = stages;
      shape.shared_bytes = shared_bytes(shape, element);
      if (shape.shared_bytes * blocks <= limit && (blocks == 1 || warps == 4)) return shape;
    }
  }
  return shape;
}

// Padded rows of a head: stat_row0() in backward_rows.cuh.
int64_t stat_rows(const Params& p) {
  const int64_t tiles = p.cu_seqlens_q != nullptr
                            ? p.seqlen_q / kStatRows + p.batch
                            : static_cast<int64_t>(p.batch) * ((p.seqlen_q + kStatRows - 1) / kStatRows);
  return tiles * kStatRows;
}

}  // namespace

size_t BackwardPlan::scratch_bytes() const {
  return scratch_size(stat_bytes) + (params.forward.nan_guard ? scratch_size(sizeof(unsigned long long)) : 0);
}

BackwardPlan plan_backward(const Problem& problem, const DeviceLimits& device) {
  BackwardPlan plan;
  BackwardParams& b = plan.params;
  b.forward = make_params(problem);
  b.dout = device_rows(problem.dout);
  b.dq = device_rows(problem.dq);
  b.dk = device_rows(problem.dk);
  b.dv = device_rows(problem.dv);
  b.dlse = device_rows(problem.dlse);
  b.d_sinks = problem.d_sinks;
  const Params& p = b.forward;
  b.stat_rows = stat_rows(p);
  plan.stat_bytes = static_cast<size_t>(b.stat_rows) * p.heads * sizeof(RowStat);
  plan.sm90 = backward_sm90_runs(b, device.major);
  if (plan.sm90) return plan;

  plan.shape = choose_shape(p, device.shared_bytes);
  if (plan.shape.shared_bytes > device.shared_bytes) {
    plan.support = Support::no("backward with head dims " + std::to_string(p.head_dim) + " and " +
                               std::to_string(p.head_dim_v) + " needs more shared memory than " +
                               std::to_string(device.shared_bytes) + " bytes a block");
  }
  return plan;
}

namespace {

cudaError_t launch_gradients(const BackwardPlan& plan, cudaStream_t stream) {
  const BackwardParams& b = plan.params;
  if (plan.sm90) return launch_backward_sm90(b, stream);
  switch (static_cast<DType>(b.forward.dtype)) {
    case DType::f32:
      return detail::launch_backward_mma_as<float>(b, plan.shape, stream);
    case DType::f16:
      return detail::launch_backward_mma_as<__half>(b, plan.shape, stream);
    default:
      return detail::launch_backward_mma_as<__nv_bfloat16>(b, plan.shape, stream);
  }
}

}  // namespace

int64_t run_backward(BackwardPlan plan, const Execution& execution) {
  BackwardParams& b = plan.params;
  const cudaStream_t stream = static_cast<cudaStream_t>(execution.stream);
  Scratch scratch(execution, plan.scratch_bytes());
  if (plan.stat_bytes > 0) b.stats = static_cast<RowStat*>(scratch.take(plan.stat_bytes));
  NanGuard guard(b.forward.nan_guard, scratch, stream);
  b.forward.replaced = guard.counter();
  check(detail::launch_row_stats(b, stream), "launching backward's statistics of rows");
  check(launch_gradients(plan, stream), "launching backward");
  if (b.d_sinks != nullptr) check(detail::launch_d_sinks(b, stream), "launching the gradient of sinks");
  return guard.replaced();
}

}  // namespace attnspan::cuda
