// The splits of a group, merged in their order, to out and lse.

#if defined(ATTNSPAN_CPU_DECODE_FINISH_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef ATTNSPAN_CPU_DECODE_FINISH_INL_HPP
#undef ATTNSPAN_CPU_DECODE_FINISH_INL_HPP
#else
#define ATTNSPAN_CPU_DECODE_FINISH_INL_HPP
#endif

#include <cmath>

#include "cpu/decode-inl.hpp"
#include "cpu/epilogue-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace attnspan::cpu {
namespace HWY_NAMESPACE {

#if HWY_TARGET != HWY_SCALAR

// The state of one row over all splits: their common maximum, and sums[out_stride] moved to it.
struct MergedRow {
  float row_max = -std::numeric_limits<float>::infinity();
  float row_sum = 0;
};

HWY_INLINE MergedRow merge_splits(const DecodeGroup& group, size_t row, float* HWY_RESTRICT sums) {
  const F32 d;
  const size_t stride = group.layout.out_stride;
  const float unit = score_unit(*group.block.problem);
  MergedRow merged;
  for (int64_t split = 0; split < group.splits; ++split) {
    const Partial partial(group, split);
    if (partial.row_sum[row] != 0) merged.row_max = std::max(merged.row_max, partial.row_max[row]);
  }
  std::fill(sums, sums + stride, 0.0F);
  for (int64_t split = 0; split < group.splits; ++split) {
    const Partial partial(group, split);
    if (partial.row_sum[row] == 0) continue;
    const float weight = std::exp((partial.row_max[row] - merged.row_max) * unit);
    merged.row_sum += weight * partial.row_sum[row];
    const VecF w = hn::Set(d, weight);
    const float* out = partial.out + row * stride;
    for (size_t i = 0; i < stride; i += kLanes) {
      hn::Store(hn::MulAdd(w, hn::Load(d, out + i), hn::Load(d, sums + i)), d, sums + i);
    }
  }
  return merged;
}

// sums in the order of the kernels to values[dim] in the caller's domain.
HWY_INLINE void to_values(const KvSource& source, const float* HWY_RESTRICT sums,
                          float* HWY_RESTRICT values) {
  if (source.format() != KvFormat::tbq4) {
    std::copy(sums, sums + source.dim(), values);
    return;
  }
  HWY_ALIGN float rotated[kMaxStoredDim];
  for (size_t i = 0; i < source.stored_dim(); ++i) rotated[i] = sums[tbq4_lane(i)];
  source.leave_domain(rotated, values);
}

// Returns the number of non-finite values replaced.
inline HWY_NOINLINE int64_t finish_group(const DecodeGroup& group) {
  const Problem& problem = *group.block.problem;
  const KvSource source = KvSource::values(problem, group.block.sequence, group.block.kv_head);
  HWY_ALIGN float sums[kMaxStoredDim + 128], values[kMaxStoredDim + 16];
  int64_t replaced = 0;
  for (int64_t row = 0; row < group.layout.rows; ++row) {
    const MergedRow merged = merge_splits(group, static_cast<size_t>(row), sums);
    float lse = 0;
    const float factor = finish_state(group.block, row, merged.row_max, merged.row_sum, lse);
    for (size_t i = 0; i < group.layout.out_stride; ++i) sums[i] = factor == 0 ? 0.0F : factor * sums[i];
    to_values(source, sums, values);
    void* to =
        static_cast<char*>(problem.out.data) + group.block.index(problem.out, row) * size_of(problem.dtype);
    replaced += store_row(problem, values, source.dim(), to);
    if (problem.lse) static_cast<float*>(problem.lse.data)[group.block.index(problem.lse, row)] = lse;
  }
  return replaced;
}

#endif  // not scalar

}  // namespace HWY_NAMESPACE
}  // namespace attnspan::cpu
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
