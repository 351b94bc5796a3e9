#include "core/dtype.hpp"

#include <gtest/gtest.h>

#include <cmath>

namespace attnspan {
namespace {

TEST(F16, EveryBitPatternSurvivesTheRoundTrip) {
  for (uint32_t bits = 0; bits < 0x10000U; ++bits) {
    const float value = f32_from_f16(static_cast<uint16_t>(bits));
    if (std::isnan(value)) {
      EXPECT_TRUE(std::isnan(f32_from_f16(f16_from_f32(value)))) << bits;
    } else {
      EXPECT_EQ(f16_from_f32(value), bits);
    }
  }
}

TEST(F16, RoundsHalfwayCasesToEven) {
  for (uint32_t bits = 0; bits < 0x7bffU; ++bits) {  // between each finite value and its successor
    const double low = f32_from_f16(static_cast<uint16_t>(bits)),
                 high = f32_from_f16(static_cast<uint16_t>(bits + 1));
    const float middle = static_cast<float>((low + high) / 2);
    EXPECT_EQ(f16_from_f32(middle), bits % 2 == 0 ? bits : bits + 1) << middle;
    EXPECT_EQ(f16_from_f32(std::nextafter(middle, 0.0F)), bits);
    EXPECT_EQ(f16_from_f32(std::nextafter(middle, 1e9F)), bits + 1);
  }
}

TEST(F16, OverflowsToInfinityFrom65520) {
  EXPECT_EQ(f16_from_f32(65519.996F), 0x7bffU);
  EXPECT_EQ(f16_from_f32(65520.0F), 0x7c00U);
  EXPECT_EQ(f16_from_f32(-1e30F), 0xfc00U);
  EXPECT_EQ(f16_from_f32(1e-9F), 0U);
  EXPECT_EQ(f16_from_f32(-1e-9F), 0x8000U);
}

TEST(Bf16, EveryBitPatternSurvivesTheRoundTrip) {
  for (uint32_t bits = 0; bits < 0x10000U; ++bits) {
    const float value = f32_from_bf16(static_cast<uint16_t>(bits));
    if (std::isnan(value)) {
      EXPECT_TRUE(std::isnan(f32_from_bf16(bf16_from_f32(value))));
    } else {
      EXPECT_EQ(bf16_from_f32(value), bits);
    }
  }
}

TEST(Bf16, RoundsToNearestEven) {
  EXPECT_EQ(bf16_from_f32(std::bit_cast<float>(0x3f808000U)), 0x3f80U);  // halfway, even below
  EXPECT_EQ(bf16_from_f32(std::bit_cast<float>(0x3f818000U)), 0x3f82U);  // halfway, even above
  EXPECT_EQ(bf16_from_f32(std::bit_cast<float>(0x3f808001U)), 0x3f81U);
}

}  // namespace
}  // namespace attnspan
