#include "attnspan/tensor.hpp"

#include <gtest/gtest.h>

namespace attnspan {
namespace {

TEST(Tensor, LayoutsAreStridesOverTheSameShape) {
  float data[2 * 3 * 4 * 5] = {};
  const Tensor a = bshd(data, DType::f32, 2, 3, 4, 5);
  const Tensor b = bhsd(data, DType::f32, 2, 3, 4, 5);
  EXPECT_EQ(a.shape, b.shape);
  EXPECT_EQ(a.stride, (std::array<int64_t, 4>{60, 20, 5, 1}));
  EXPECT_EQ(b.stride, (std::array<int64_t, 4>{60, 5, 15, 1}));
  EXPECT_EQ(a.shape_text(), "[2, 3, 4, 5]");
  EXPECT_EQ(a.numel(), 120);
}

TEST(Tensor, NotGivenIsFalse) {
  EXPECT_FALSE(Tensor{});
  EXPECT_TRUE(contiguous(nullptr, DType::f32, {0}));
  EXPECT_EQ(Tensor{}.numel(), 0);
}

}  // namespace
}  // namespace attnspan
