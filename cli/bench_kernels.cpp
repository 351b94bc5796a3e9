// The loops behind the ceilings, for every instruction set that the kernels are built for.

#include "core/simd_targets.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "bench_kernels.cpp"
#include <hwy/foreach_target.h>
// After foreach_target.h:
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace attnspan::cli {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Two multiply-adds a cycle that take 4 or 5 cycles each need 10 independent sums.
constexpr size_t kSums = 12;

double fma_loop_of_target(int64_t steps) {
  const hn::ScalableTag<float> d;
  using V = hn::Vec<decltype(d)>;
  V sum[kSums];
  for (size_t i = 0; i < kSums; ++i) sum[i] = hn::Set(d, 1.0F + static_cast<float>(i));
  const volatile float almost_one = 0.999999F, small = 1e-7F;
  const V scale = hn::Set(d, almost_one), offset = hn::Set(d, small);
  for (int64_t step = 0; step < steps; ++step) {
#pragma GCC unroll 12
    for (size_t i = 0; i < kSums; ++i) sum[i] = hn::MulAdd(sum[i], scale, offset);
  }
  V total = sum[0];
  for (size_t i = 1; i < kSums; ++i) total = hn::Add(total, sum[i]);
  volatile float sink = hn::GetLane(total);
  (void)sink;
  return 2.0 * static_cast<double>(steps) * kSums * static_cast<double>(hn::Lanes(d));
}

float read_loop_of_target(const float* floats, size_t count) {
  const hn::ScalableTag<float> d;
  using V = hn::Vec<decltype(d)>;
  const size_t lanes = hn::Lanes(d);
  V sum[8];
  for (V& s : sum) s = hn::Zero(d);
  for (size_t i = 0; i + 8 * lanes <= count; i += 8 * lanes) {
#pragma GCC unroll 8
    for (size_t v = 0; v < 8; ++v) sum[v] = hn::Add(sum[v], hn::LoadU(d, floats + i + v * lanes));
  }
  for (size_t v = 1; v < 8; ++v) sum[0] = hn::Add(sum[0], sum[v]);
  return hn::GetLane(hn::SumOfLanes(d, sum[0]));
}

}  // namespace HWY_NAMESPACE
}  // namespace attnspan::cli
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

#include "bench_kernels.hpp"

namespace attnspan::cli {

HWY_EXPORT(fma_loop_of_target);
HWY_EXPORT(read_loop_of_target);

double fma_loop(int64_t steps) { return HWY_DYNAMIC_DISPATCH(fma_loop_of_target)(steps); }
float read_loop(const float* floats, size_t count) {
  return HWY_DYNAMIC_DISPATCH(read_loop_of_target)(floats, count);
}

}  // namespace attnspan::cli

#endif  // HWY_ONCE
