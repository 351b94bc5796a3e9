// The stated errors of the elementary functions, on every instruction set of this machine, in units of the
// last place of the exact result.

#include "core/simd_targets.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/exp_test.cpp"
#include <hwy/foreach_target.h>
// After foreach_target.h:
#include "cpu/simd-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace attnspan::cpu {
namespace HWY_NAMESPACE {

// Of n values (a multiple of every target's lanes), in place.
void exp2_of(float* values, size_t n, float scale) {
  const F32 d;
  for (size_t i = 0; i < n; i += kLanes) {
    const VecF x = hn::LoadU(d, values + i);
    hn::StoreU(exp2_scaled(x, hn::Set(d, scale), hn::Set(d, -126.0F / scale)), d, values + i);
  }
}

void tanh_of(float* values, size_t n) {
  const F32 d;
  for (size_t i = 0; i < n; i += kLanes) hn::StoreU(tanh(hn::LoadU(d, values + i)), d, values + i);
}

// Without FMA the argument's product with the scale is rounded, and its error counts |x * scale| times.
bool has_fma() { return HWY_NATIVE_FMA != 0; }

}  // namespace HWY_NAMESPACE
}  // namespace attnspan::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

namespace attnspan::cpu {

HWY_EXPORT(exp2_of);
HWY_EXPORT(tanh_of);
HWY_EXPORT(has_fma);

namespace {

// |found - exact| in units of the last place of an f32 at `exact`.
double ulps(float found, double exact) {
  int exponent = 0;
  std::frexp(exact, &exponent);
  return std::abs(found - exact) / std::ldexp(1.0, exponent - 24);
}

class ElementaryFunctions : public testing::TestWithParam<int64_t> {
 protected:
  void SetUp() override { hwy::GetChosenTarget().Update(GetParam()); }
  void TearDown() override { hwy::GetChosenTarget().DeInit(); }
};

constexpr size_t kCount = 1 << 20;

TEST_P(ElementaryFunctions, Exp2IsWithinTwoUnits) {
  for (const float scale : {1.0F, 1.44269504F, 0.12751743F, 0.18033688F, 3.1e-6F}) {
    std::vector<float> x(kCount), found;
    for (size_t i = 0; i < kCount; ++i) {
      x[i] = -125.999F / scale * static_cast<float>(i) / static_cast<float>(kCount);
    }
    found = x;
    HWY_DYNAMIC_DISPATCH(exp2_of)(found.data(), kCount, scale);
    double worst = 0;
    for (size_t i = 0; i < kCount; ++i) {
      const double argument = static_cast<double>(x[i]) * scale;
      const double allowed = HWY_DYNAMIC_DISPATCH(has_fma)() ? 2 : 2 + std::abs(argument);
      worst = std::max(worst, ulps(found[i], std::exp2(argument)) / allowed);
    }
    EXPECT_LE(worst, 1) << "scale " << scale;
    RecordProperty("share_of_allowed_" + std::to_string(scale), std::to_string(worst));
  }
}

TEST_P(ElementaryFunctions, Exp2IsExactlyOneAtZeroAndZeroFarBelow) {
  std::vector<float> x(16, 0.0F);
  HWY_DYNAMIC_DISPATCH(exp2_of)(x.data(), x.size(), 1.5F);
  EXPECT_EQ(x, std::vector<float>(16, 1.0F));
  for (const float far : {-126.5F, -1e4F, -1e38F, -std::numeric_limits<float>::infinity()}) {
    x.assign(16, far);
    HWY_DYNAMIC_DISPATCH(exp2_of)(x.data(), x.size(), 1.0F);
    EXPECT_EQ(x, std::vector<float>(16, 0.0F)) << far;
  }
}

TEST_P(ElementaryFunctions, TanhIsWithinThreeUnits) {
  std::vector<float> x(kCount), found;
  for (size_t i = 0; i < kCount; ++i) {
    x[i] = 20.0F * (static_cast<float>(i) / static_cast<float>(kCount) - 0.5F);
  }
  found = x;
  HWY_DYNAMIC_DISPATCH(tanh_of)(found.data(), kCount);
  double worst = 0;
  for (size_t i = 0; i < kCount; ++i) {
    if (x[i] != 0) worst = std::max(worst, ulps(found[i], std::tanh(static_cast<double>(x[i]))));
  }
  EXPECT_LE(worst, 3);
  RecordProperty("worst_ulp", std::to_string(worst));
}

INSTANTIATE_TEST_SUITE_P(Cpu, ElementaryFunctions, testing::ValuesIn(hwy::SupportedAndGeneratedTargets()),
                         [](const auto& info) { return hwy::TargetName(info.param); });

}  // namespace
}  // namespace attnspan::cpu

#endif  // HWY_ONCE
