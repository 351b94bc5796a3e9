// The vector encoder of tbq4 writes the bytes of the scalar definition, on every instruction set of this
// machine.

#include "core/simd_targets.hpp"

#include <gtest/gtest.h>
#include <hwy/highway.h>

#include <cmath>
#include <limits>
#include <random>

#include "kv/tbq4.hpp"
#include "kv/tbq4_encode_simd.hpp"

namespace attnspan {
namespace {

class Tbq4Simd : public testing::TestWithParam<int64_t> {
 protected:
  void SetUp() override { hwy::GetChosenTarget().Update(GetParam()); }
  void TearDown() override { hwy::GetChosenTarget().DeInit(); }
};

struct Encoded {
  std::vector<uint8_t> codes;
  std::vector<uint16_t> norms;
  int64_t saturated = 0;

  bool operator==(const Encoded&) const = default;
};

template <typename EncodeRow>
Encoded encode(const EncodeRow& encode_row, const std::vector<float>& row, EncodeMode mode) {
  const auto dim = static_cast<int64_t>(row.size());
  Encoded encoded;
  encoded.codes.assign(static_cast<size_t>(tbq4::padded_dim(dim) / 2), 0xaa);
  encoded.norms.assign(static_cast<size_t>(tbq4::blocks(dim)), 0xaaaa);
  encoded.saturated = encode_row(row.data(), dim, mode, encoded.codes.data(), encoded.norms.data());
  return encoded;
}

// Gaussian rows of every magnitude, and rows with outliers, constants, zeros and values that are no numbers.
std::vector<float> row_of(int64_t dim, int kind, std::mt19937_64& random) {
  std::normal_distribution<float> normal;
  const float scale = std::pow(10.0F, static_cast<float>(kind % 9 * 5 - 20));
  std::vector<float> row(static_cast<size_t>(dim));
  for (float& value : row) value = scale * normal(random);
  if (kind % 11 == 0) row[static_cast<size_t>(kind % dim)] *= 50;
  if (kind % 13 == 0) std::fill(row.begin(), row.end(), scale);
  if (kind % 17 == 0) std::fill(row.begin(), row.end(), 0.0F);
  if (kind % 19 == 0) row[0] = std::numeric_limits<float>::quiet_NaN();
  if (kind % 23 == 0) row.back() = std::numeric_limits<float>::infinity();
  return row;
}

TEST_P(Tbq4Simd, WritesTheBytesOfTheDefinition) {
  std::mt19937_64 random(1);
  for (const int64_t dim : {1, 3, 40, 64, 72, 80, 96, 100, 128, 192, 256, 512, 576}) {
    for (int kind = 1; kind <= 300; ++kind) {
      const std::vector<float> row = row_of(dim, kind, random);
      for (const EncodeMode mode : {EncodeMode::quality, EncodeMode::fast}) {
        ASSERT_EQ(encode(tbq4::encode_row_simd, row, mode), encode(tbq4::encode_row, row, mode))
            << "dim " << dim << ", row " << kind << ", " << (mode == EncodeMode::fast ? "fast" : "quality");
      }
    }
  }
}

// A value on a threshold belongs to the code above it. Rows of blocks whose rotation is exact: one value
// alone gives 64 equal magnitudes.
TEST_P(Tbq4Simd, AgreesWhereAllMagnitudesAreEqual) {
  for (size_t at = 0; at < 64; ++at) {
    std::vector<float> row(64, 0.0F);
    row[at] = at % 2 == 0 ? 3.0F : -3.0F;
    for (const EncodeMode mode : {EncodeMode::quality, EncodeMode::fast}) {
      ASSERT_EQ(encode(tbq4::encode_row_simd, row, mode), encode(tbq4::encode_row, row, mode)) << at;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Kv, Tbq4Simd, testing::ValuesIn(hwy::SupportedAndGeneratedTargets()),
                         [](const auto& info) { return std::string(hwy::TargetName(info.param)); });

}  // namespace
}  // namespace attnspan
