#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "attnspan/attention.hpp"
#include "registry/registry.hpp"

namespace attnspan {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

struct State {
  std::vector<float> out, lse;
};

State merged(const State& a, const State& b, const std::string& backend) {
  const int64_t rows = static_cast<int64_t>(a.lse.size()), dim = static_cast<int64_t>(a.out.size()) / rows;
  State result{std::vector<float>(a.out.size(), NAN), std::vector<float>(a.lse.size(), NAN)};
  const auto out = [&](const State& s) { return contiguous(s.out.data(), DType::f32, {1, rows, 1, dim}); };
  const auto lse = [&](const State& s) { return contiguous(s.lse.data(), DType::f32, {1, 1, rows}); };
  merge_states({out(a), lse(a), out(b), lse(b), out(result), lse(result)}, {.backend = backend});
  return result;
}

class MergeTest : public testing::TestWithParam<std::string> {};

TEST_P(MergeTest, WeighsByTheExponentialOfLse) {
  const State result = merged({{1, 2}, {std::log(3.0F)}}, {{5, 6}, {std::log(1.0F)}}, GetParam());
  EXPECT_NEAR(result.out[0], 2, 1e-6);
  EXPECT_NEAR(result.out[1], 3, 1e-6);
  EXPECT_NEAR(result.lse[0], std::log(4.0F), 1e-6);
}

TEST_P(MergeTest, EmptyStatesAreNeutralAndTheirStaleOutputsDoNotLeak) {
  const State result = merged({{NAN, NAN, 7, 8}, {-kInf, 2}}, {{3, 4, NAN, NAN}, {-1e6F, -kInf}}, GetParam());
  EXPECT_EQ(result.out, (std::vector<float>{3, 4, 7, 8}));
  EXPECT_EQ(result.lse, (std::vector<float>{-1e6F, 2}));
}

TEST_P(MergeTest, TwoEmptyStatesAreEmpty) {
  const State result = merged({{NAN}, {-kInf}}, {{NAN}, {-kInf}}, GetParam());
  EXPECT_EQ(result.out[0], 0);
  EXPECT_EQ(result.lse[0], -kInf);
}

std::vector<std::string> available() {
  std::vector<std::string> names;
  for (const RegisteredBackend& entry : backends()) {
    if (entry.backend != nullptr) names.push_back(entry.name);
  }
  return names;
}

INSTANTIATE_TEST_SUITE_P(Backends, MergeTest, testing::ValuesIn(available()),
                         [](const auto& info) { return info.param; });

TEST(MergeStates, RefusesShapesThatDiffer) {
  float values[4] = {};
  const Tensor a = contiguous(values, DType::f32, {1, 1, 1, 2}),
               b = contiguous(values, DType::f32, {1, 1, 1, 4});
  const Tensor lse = contiguous(values, DType::f32, {1, 1, 1});
  try {
    merge_states({a, lse, b, lse, a, lse});
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "out_b: found [1, 1, 1, 4], expected [1, 1, 1, 2] (out_a's shape)");
  }
}

}  // namespace
}  // namespace attnspan
