#include "cuda/backward.hpp"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "cuda/make_params.hpp"

namespace attnspan::cuda {
namespace {

// Query and dout, or key and value, of `warps * 16` rows, and the other pair of one step.
size_t shared_bytes(const BackwardShape& shape, size_t element, int warps) {
  const size_t pad = 16 / element;
  const size_t rows = static_cast<size_t>(warps) * 16 + kBackwardStep;
  return rows * (shape.key_width + pad + shape.value_width + pad) * element;
}

int64_t total_rows(const Params& p) {
  return p.cu_seqlens_q != nullptr ? p.seqlen_q : static_cast<int64_t>(p.batch) * p.seqlen_q;
}

}  // namespace

size_t BackwardPlan::scratch_bytes() const {
  return scratch_size(delta_bytes) +
         (params.forward.nan_guard ? scratch_size(sizeof(unsigned long long)) : 0);
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
  plan.delta_bytes = static_cast<size_t>(total_rows(p)) * p.heads * sizeof(float);

  BackwardShape& shape = plan.shape;
  const int widest = std::max(p.head_dim, p.head_dim_v);
  const size_t element = problem.dtype == DType::f32 ? 4 : 2;
  constexpr size_t kStatic = 2048;  // rows' gradients
  // Narrower outputs pad less: the second try of the widest head dims.
  for (const int columns : {widest <= 64 ? 64 : 128, 64}) {
    shape.columns = columns;
    shape.chunks = (widest + columns - 1) / columns;
    shape.key_width = (p.head_dim + columns - 1) / columns * columns;
    shape.value_width = (p.head_dim_v + columns - 1) / columns * columns;
    shape.warps = 4;
    while (shape.warps > 1 && shared_bytes(shape, element, shape.warps) + kStatic > device.shared_bytes)
      shape.warps /= 2;
    shape.shared_bytes = shared_bytes(shape, element, shape.warps);
    if (shape.shared_bytes + kStatic <= device.shared_bytes) break;
  }
  if (shape.shared_bytes + kStatic > device.shared_bytes) {
    plan.support = Support::no("backward with head dims " + std::to_string(p.head_dim) + " and " +
                               std::to_string(p.head_dim_v) + " needs more shared memory than " +
                               std::to_string(device.shared_bytes) + " bytes a block");
  }
  return plan;
}

int64_t run_backward(BackwardPlan plan, const Execution& execution) {
  BackwardParams& b = plan.params;
  const cudaStream_t stream = static_cast<cudaStream_t>(execution.stream);
  Scratch scratch(execution, plan.scratch_bytes());
  if (plan.delta_bytes > 0) b.delta = static_cast<float*>(scratch.take(plan.delta_bytes));
  NanGuard guard(b.forward.nan_guard, scratch, stream);
  b.forward.replaced = guard.counter();
  switch (static_cast<DType>(b.forward.dtype)) {
    case DType::f32:
      check(detail::launch_backward_as<float>(b, plan.shape, stream), "launching backward");
      break;
    case DType::f16:
      check(detail::launch_backward_as<__half>(b, plan.shape, stream), "launching backward");
      break;
    default:
      check(detail::launch_backward_as<__nv_bfloat16>(b, plan.shape, stream), "launching backward");
  }
  if (b.d_sinks != nullptr) check(detail::launch_d_sinks(b, stream), "launching the gradient of sinks");
  return guard.replaced();
}

}  // namespace attnspan::cuda
