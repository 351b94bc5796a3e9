#include "core/softmax_state.hpp"

#include <gtest/gtest.h>

#include <random>

namespace attnspan {
namespace {

using State = SoftmaxState<double>;

TEST(SoftmaxState, EmptyMergedWithEmptyIsEmpty) {
  State a;
  merge(a, State{});
  EXPECT_TRUE(a.empty());
  EXPECT_EQ(a.lse(), -std::numeric_limits<double>::infinity());
}

TEST(SoftmaxState, EmptyIsNeutralOnBothSides) {
  const State x{-1e6, 3};
  State a = x;
  EXPECT_EQ(merge(a, State{}).a, 1);
  EXPECT_EQ(a.m, x.m);
  State b;
  EXPECT_EQ(merge(b, x).b, 1);
  EXPECT_EQ(b.l, x.l);
}

TEST(SoftmaxState, AMaximumOfAnyMagnitudeIsExact) {
  for (double base : {-1e6, 0.0, 1e6}) {
    State a;
    for (double offset : {0.0, 1.0, -2.0}) merge(a, single_logit(base + offset));
    EXPECT_NEAR(a.lse(), base + std::log(1 + std::exp(1.0) + std::exp(-2.0)), 1e-9);
  }
}

TEST(SoftmaxState, ASinkOfMinusInfinityIsNoSink) {
  EXPECT_TRUE(single_logit(-std::numeric_limits<double>::infinity()).empty());
}

TEST(SoftmaxState, MergeIsAssociativeToRounding) {
  std::mt19937 random(3);
  std::normal_distribution<double> normal(0, 30);
  for (int trial = 0; trial < 200; ++trial) {
    const State x = single_logit(normal(random)), y = single_logit(normal(random)),
                z = single_logit(normal(random));
    State left = x, right = y, other = x;
    merge(left, y);
    merge(left, z);
    merge(right, z);
    merge(other, right);
    EXPECT_NEAR(left.lse(), other.lse(), 1e-12 * std::abs(left.lse()) + 1e-12);
  }
}

}  // namespace
}  // namespace attnspan
