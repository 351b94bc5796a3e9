// From the running state of a panel to out and lse.

#if defined(ATTNSPAN_CPU_EPILOGUE_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef ATTNSPAN_CPU_EPILOGUE_INL_HPP
#undef ATTNSPAN_CPU_EPILOGUE_INL_HPP
#else
#define ATTNSPAN_CPU_EPILOGUE_INL_HPP
#endif

#include <cmath>

#include "core/softmax_state.hpp"
#include "cpu/panel-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace attnspan::cpu {
namespace HWY_NAMESPACE {

// The state of one row in natural logits, the sink merged in. Returns the factor that turns the row's sums
// into out.
HWY_INLINE float finish_state(const RowBlock& block, int64_t stacked, float row_max, float row_sum,
                              float& lse) {
  const Problem& problem = *block.problem;
  SoftmaxState<float> state{row_max * score_unit(problem), row_sum};
  float weight = 1.0F;
  if (problem.sinks != nullptr) {
    weight = merge(state, single_logit(problem.sinks[block.head(stacked)])).a;
  }
  lse = state.lse();
  return state.empty() ? 0.0F : weight / state.l;
}

// Replaces the non-finite values of a stored row by 0 and counts them.
inline int64_t replace_nonfinite(void* row, DType dtype, size_t n) {
  int64_t replaced = 0;
  for (size_t i = 0; i < n; ++i) {
    if (std::isfinite(load_f32(row, static_cast<int64_t>(i), dtype))) continue;
    store_f32(row, static_cast<int64_t>(i), dtype, 0.0F);
    ++replaced;
  }
  return replaced;
}

// Rounds a row to the dtype and stores it. Returns the number of non-finite values replaced.
HWY_INLINE int64_t store_row(const Problem& problem, const float* HWY_RESTRICT row, size_t dim, void* to) {
  row_from_f32(row, problem.dtype, dim, to);
  return problem.nan_guard ? replace_nonfinite(to, problem.dtype, dim) : 0;
}

// Writes out and lse of the panel's rows; sums in the domain in which `values` are stored leave it here, once
// a row. `row` and `rotated` are scratch of one padded row each.
inline HWY_NOINLINE int64_t store_rows(const RowBlock& block, const KvSource& values,
                                       const ForwardPanel& panel, float* HWY_RESTRICT row,
                                       float* HWY_RESTRICT rotated) {
  const Problem& problem = *block.problem;
  const size_t width = panel.width(), dim = values.dim();
  int64_t replaced = 0;
  for (size_t lane = 0; lane < panel.rows(); ++lane) {
    const int64_t stacked = panel.begin + static_cast<int64_t>(lane);
    float lse = 0;
    const float factor = finish_state(block, stacked, panel.row_max[lane], panel.row_sum[lane], lse);
    float* sums = values.rotated() ? rotated : row;
    for (size_t i = 0; i < values.stored_dim(); ++i) {
      sums[i] = factor == 0 ? 0.0F : factor * panel.out[i * width + lane];
    }
    if (values.rotated()) values.leave_domain(rotated, row);
    replaced += store_row(problem, row, dim, block.address(problem.out, stacked));
    if (problem.lse) static_cast<float*>(problem.lse.data)[block.index(problem.lse, stacked)] = lse;
  }
  return replaced;
}

}  // namespace HWY_NAMESPACE
}  // namespace attnspan::cpu
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
