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

// row[0, n) *= factor, but a factor of 0 gives zeros whatever the row holds.
HWY_INLINE void scale_row(float* HWY_RESTRICT row, size_t n, float factor) {
  for (size_t i = 0; i < n; ++i) row[i] = factor == 0 ? 0.0F : factor * row[i];
}

// Writes out and lse of the panel's rows; sums in the domain in which `values` are stored leave it here, once
// a row. `rows` is scratch of kRowsAtOnce rows of `stride` floats, `row` of one.
inline HWY_NOINLINE int64_t store_rows(const RowBlock& block, const KvSource& values,
                                       const ForwardPanel& panel, float* HWY_RESTRICT rows, size_t stride,
                                       float* HWY_RESTRICT row) {
  const Problem& problem = *block.problem;
  const size_t width = panel.width();
  int64_t replaced = 0;
  for (size_t lane = 0; lane < panel.rows(); ++lane) {
    const size_t first = lane / kRowsAtOnce * kRowsAtOnce;
    if (lane == first) {
      const size_t count = std::min(kRowsAtOnce, width - first);
      transpose(panel.out + first, width, values.stored_dim(), count, rows, stride);
    }
    const int64_t stacked = panel.begin + static_cast<int64_t>(lane);
    float lse = 0;
    const float factor = finish_state(block, stacked, panel.row_max[lane], panel.row_sum[lane], lse);
    float* sums = rows + (lane - first) * stride;
    scale_row(sums, values.stored_dim(), factor);
    if (values.rotated()) {
      values.leave_domain(sums, row);
      sums = row;
    }
    replaced += store_row(problem, sums, values.dim(), block.address(problem.out, stacked));
    if (problem.lse) static_cast<float*>(problem.lse.data)[block.index(problem.lse, stacked)] = lse;
  }
  return replaced;
}

}  // namespace HWY_NAMESPACE
}  // namespace attnspan::cpu
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
