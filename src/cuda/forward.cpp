#include "cuda/forward.hpp"

#include <algorithm>

#include "cuda/make_params.hpp"
#include "cuda/merge.hpp"
#include "cuda/split.hpp"

namespace attnspan::cuda {
namespace {

constexpr int32_t kPortableSplitKeys = 256;
constexpr int kDecodeRows = 16;  // up to this many query rows the keys are split across the chip

// f16 products where f32 or bf16 values would not fit its range go through f32.
int compute_dtype(const Params& p) {
  const auto beyond_f16 = [](const KvPlane& plane) {
    return plane.format == Format::f32 || plane.format == Format::bf16;
  };
  if (p.dtype == static_cast<int>(DType::f16) && (beyond_f16(p.key) || beyond_f16(p.value))) {
    return static_cast<int>(DType::f32);
  }
  return p.dtype;
}

// Keys that all rows of a sequence can see together, at most.
int64_t longest_span(const Params& p) {
  if (p.window_left >= kUnlimited || p.window_right >= kUnlimited) return p.seqlen_k;
  return std::min<int64_t>(p.seqlen_k, p.window_left + p.window_right + p.seqlen_q);
}

// Few rows: the keys are split so that one sequence fills the device. Packed queries are not: the host knows
// their total only, and what a sequence gets may not depend on its batchmates.
void plan_splits_of(ForwardPlan& plan, const DeviceLimits& device) {
  Params& p = plan.params;
  if (p.cu_seqlens_q != nullptr || p.seqlen_q > kDecodeRows || p.seqlen_q == 0) return;
  plan.decode = plan_decode_kernel(p, device);
  plan.overlap = device.major >= 9;
  const int64_t tile = plan.decode.ok ? plan.decode.tile_rows : plan.mma.warps * 16;
  const int64_t row_tiles = (static_cast<int64_t>(p.seqlen_q) * p.group + tile - 1) / tile;
  const int64_t blocks = row_tiles * p.kv_heads * (plan.decode.ok ? 1 : plan.mma.chunks);
  const int64_t resident = plan.decode.ok ? plan.decode.teams : 4;
  p.min_split_keys = plan.decode.ok ? plan.decode.min_split_keys : kPortableSplitKeys;
  p.split_target = static_cast<int32_t>(std::max<int64_t>(1, device.multiprocessors * resident / blocks));
  const int64_t splits =
      std::min<int64_t>(p.split_target, (longest_span(p) + p.min_split_keys - 1) / p.min_split_keys);
  p.max_splits = static_cast<int32_t>(std::max<int64_t>(1, splits));
  if (p.max_splits == 1 && !plan.decode.ok) return;
  if (plan.decode.ok) plan_decode_grid(plan.decode, p, device);
  const size_t rows = static_cast<size_t>(p.max_splits) * p.heads * p.seqlen_q * static_cast<size_t>(p.batch);
  plan.partial_out_bytes = rows * p.head_dim_v * sizeof(float);
  plan.partial_lse_bytes = rows * sizeof(float);
}

}  // namespace

size_t ForwardPlan::scratch_bytes() const {
  return scratch_size(partial_out_bytes) + scratch_size(partial_lse_bytes) +
         (sm90.needs_counter ? scratch_size(sizeof(uint32_t)) : 0) +
         (params.nan_guard ? scratch_size(sizeof(unsigned long long)) : 0);
}

ForwardPlan plan_forward(const Problem& problem, const DeviceLimits& device) {
  ForwardPlan plan;
  plan.params = make_params(problem);
  plan.compute = compute_dtype(plan.params);
  if (!choose_mma_shape(plan.params, plan.compute, device.shared_bytes, plan.mma)) {
    plan.support = Support::no("head dims " + std::to_string(problem.head_dim) + " and " +
                               std::to_string(problem.head_dim_v) + " need more shared memory than " +
                               std::to_string(device.shared_bytes) + " bytes a block");
    return plan;
  }
  plan_splits_of(plan, device);
  if (plan.partial_out_bytes == 0) {
    plan.sm90 = plan_forward_sm90(plan.params, device.major, device.multiprocessors, device.l2_bytes);
  }
  return plan;
}

int64_t run_forward(ForwardPlan plan, const Execution& execution) {
  Params& p = plan.params;
  const cudaStream_t stream = static_cast<cudaStream_t>(execution.stream);
  Scratch scratch(execution, plan.scratch_bytes());
  if (plan.partial_out_bytes > 0) {
    p.partial_out = static_cast<float*>(scratch.take(plan.partial_out_bytes));
    p.partial_lse = static_cast<float*>(scratch.take(plan.partial_lse_bytes));
  }
  NanGuard guard(p.nan_guard, scratch, stream);
  p.replaced = guard.counter();
  if (plan.decode.ok) {
    check(launch_decode(p, plan.decode, stream), "launching the decode kernel");
    check(launch_merge_splits(p, plan.overlap, stream), "launching the merge of splits");
    return guard.replaced();
  }
  if (plan.sm90.ok) {
    if (plan.sm90.needs_counter) {
      plan.sm90.schedule.next = static_cast<uint32_t*>(scratch.take(sizeof(uint32_t)));
      check(cudaMemsetAsync(plan.sm90.schedule.next, 0, sizeof(uint32_t), stream),
            "clearing the tile counter");
    }
    check(launch_forward_sm90(p, plan.sm90, stream), "launching the Hopper forward kernel");
    return guard.replaced();
  }
  check(launch_forward_mma(p, plan.compute, plan.mma, stream), "launching the portable forward kernel");
  if (p.max_splits > 1) check(launch_merge_splits(p, false, stream), "launching the merge of splits");
  return guard.replaced();
}

}  // namespace attnspan::cuda
