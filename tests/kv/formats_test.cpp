// The bits and the errors of the KV formats (docs/kv-formats.md).

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <vector>

#include "attnspan/error.hpp"
#include "core/dtype.hpp"
#include "kv/format.hpp"
#include "kv/tbq4.hpp"

namespace attnspan {
namespace {

using Row = std::vector<float>;

constexpr KvFormat kAllFormats[] = {KvFormat::f32, KvFormat::f16, KvFormat::bf16, KvFormat::q8,
                                    KvFormat::tbq4};

struct Encoded {
  std::vector<uint8_t> codes;
  std::vector<uint16_t> scales;
  int64_t saturated = 0;
};

Encoded encode(KvFormat format, const Row& values, EncodeMode mode = EncodeMode::quality) {
  const KvFormatOps& ops = ops_of(format);
  const auto dim = static_cast<int64_t>(values.size());
  Encoded encoded;
  encoded.codes.assign(ops.row_code_bytes(dim), 0xee);
  encoded.scales.assign(ops.row_scales(dim), 0xeeee);
  encoded.saturated = ops.encode_row(values.data(), dim, mode, encoded.codes.data(), encoded.scales.data());
  return encoded;
}

Row decode(KvFormat format, const Encoded& encoded, int64_t dim) {
  Row values(dim);
  decode_row(ops_of(format), encoded.codes.data(), encoded.scales.data(), dim, values.data());
  return values;
}

Row random_row(std::mt19937_64& random, int64_t dim) {
  std::normal_distribution<float> normal;
  Row row(dim);
  for (float& x : row) x = normal(random);
  return row;
}

double dot(const Row& a, const Row& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += static_cast<double>(a[i]) * b[i];
  return sum;
}

// Sum of squared errors over the sum of squares, over `count` rows of 128.
double normalised_mse(KvFormat format, EncodeMode mode, int count, const std::function<void(Row&)>& shape) {
  std::mt19937_64 random(20261129);
  double error = 0;
  double energy = 0;
  for (int i = 0; i < count; ++i) {
    Row row = random_row(random, 128);
    shape(row);
    const Row back = decode(format, encode(format, row, mode), 128);
    for (int d = 0; d < 128; ++d) {
      error += std::pow(static_cast<double>(row[d]) - back[d], 2);
      energy += std::pow(static_cast<double>(row[d]), 2);
    }
  }
  return error / energy;
}

void keep(Row&) {}

std::function<void(Row&)> outliers(int channels, float factor) {
  return [=](Row& row) {
    for (int c = 0; c < channels; ++c) row[(7 + 31 * c) % 128] *= factor;
  };
}

constexpr int kVectors = 40000;

TEST(FormatError, GaussianVectors) {
  EXPECT_LE(normalised_mse(KvFormat::tbq4, EncodeMode::quality, kVectors, keep), 8.2e-3);
  EXPECT_LE(normalised_mse(KvFormat::tbq4, EncodeMode::fast, kVectors, keep), 9.3e-3);
  EXPECT_LE(normalised_mse(KvFormat::q8, EncodeMode::quality, kVectors, keep), 3.2e-5);
  // The bound of rate-distortion theory at 4 bits: less would mean that the measurement is wrong.
  EXPECT_GE(normalised_mse(KvFormat::tbq4, EncodeMode::quality, 4000, keep), 3.9e-3);
}

TEST(FormatError, OutlierChannels) {
  const auto fast = [](const std::function<void(Row&)>& shape) {
    return normalised_mse(KvFormat::tbq4, EncodeMode::fast, kVectors / 4, shape);
  };
  EXPECT_NEAR(fast(outliers(4, 10)), 8.26e-3, 0.05 * 8.26e-3);
  EXPECT_NEAR(fast(outliers(4, 50)), 7.96e-3, 0.05 * 7.96e-3);
  EXPECT_NEAR(fast(outliers(1, 50)), 7.44e-3, 0.05 * 7.44e-3);
  EXPECT_NEAR(normalised_mse(KvFormat::tbq4, EncodeMode::quality, kVectors / 4, outliers(4, 10)), 6.97e-3,
              0.05 * 6.97e-3);
  EXPECT_NEAR(normalised_mse(KvFormat::q8, EncodeMode::quality, kVectors / 4, outliers(4, 10)), 1.23e-4,
              0.05 * 1.23e-4);
}

TEST(FormatError, ConstantOffsetDoesNotCollapse) {
  // Without the signs this is 0.57: the offset would be one coefficient of the rotated block.
  EXPECT_LE(normalised_mse(KvFormat::tbq4, EncodeMode::quality, 2000,
                           [](Row& row) {
                             for (float& x : row) x = 3 + 0.5F * x;
                           }),
            9.5e-3);
}

TEST(Tbq4, TheSignVectorItselfIsTheWorstCase) {
  Row row(128);
  for (int i = 0; i < 128; ++i) row[i] = tbq4::is_negated(128, i) ? -2.5F : 2.5F;
  Row rotated(128);
  tbq4::rotate_row(row.data(), 128, rotated.data());
  EXPECT_NEAR(rotated[0], 2.5 * std::sqrt(128.0), 1e-5);
  for (int i = 1; i < 128; ++i) EXPECT_EQ(rotated[i], 0);
  const Row back = decode(KvFormat::tbq4, encode(KvFormat::tbq4, row, EncodeMode::fast), 128);
  double error = 0;
  for (int i = 0; i < 128; ++i) error += std::pow(row[i] - back[i], 2) / (128 * 2.5 * 2.5);
  // One coefficient of sqrt(128) and 127 zeros, stored as 127 smallest centroids: 0.2324 on paper.
  EXPECT_NEAR(error, 0.2324, 1e-3);
}

TEST(Tbq4, SignsFollowSplitMix64) {
  // First outputs of SplitMix64 seeded with 128 and 64, computed apart (Python integers): their top bits.
  const char* expected128 = "11111100111101001100000001101101";
  const char* expected64 = "10011100000000000011110010110100";
  for (int i = 0; i < 32; ++i) {
    EXPECT_EQ(tbq4::is_negated(128, i), expected128[i] == '1') << i;
    EXPECT_EQ(tbq4::is_negated(64, i), expected64[i] == '1') << i;
  }
}

TEST(Tbq4, GoldenBlock) {
  // Bytes of a fixed block, as an independent program computed them in f32 (tests/kv/golden_tbq4.py).
  Row row(128);
  uint32_t state = 12345;
  for (float& x : row) {
    state = state * 1664525U + 1013904223U;
    x = static_cast<float>(static_cast<int32_t>(state) >> 16) / 8192.0F;
  }
  const auto hex = [](const Encoded& e) {
    std::string text;
    char digits[8];
    std::snprintf(digits, sizeof digits, "%04x:", e.scales[0]);
    text += digits;
    for (const uint8_t byte : e.codes) {
      std::snprintf(digits, sizeof digits, "%02x", byte);
      text += digits;
    }
    return text;
  };
  EXPECT_EQ(hex(encode(KvFormat::tbq4, row, EncodeMode::fast)),
            "409e:8c519f2b5a4725778b727a77e9488c8897a88187a9775c566a7bfc89977746c8"
            "6c558cc7b3644475865c0755d51744b1dca155959822765956ee3ac84ab9bbd4");
  EXPECT_EQ(hex(encode(KvFormat::tbq4, row, EncodeMode::quality)),
            "4045:8d519f2c5a3725778b717b77f9488c8996a88187a9775c466a7cfd89976745d8"
            "6c558cc7c3644375855c0755d41634b0eca15595a822765946ee2ad84ab9cbd4");
}

TEST(Tbq4, RotationKeepsInnerProductsAndInverts) {
  std::mt19937_64 random(3);
  for (const int64_t dim : {1, 3, 40, 64, 72, 80, 96, 100, 128, 192, 256, 512, 576}) {
    const Row a = random_row(random, dim);
    const Row b = random_row(random, dim);
    const int64_t width = tbq4::padded_dim(dim);
    EXPECT_EQ(width % tbq4::block_size(dim), 0);
    EXPECT_LT(width - dim, tbq4::block_size(dim));
    Row rotated_a(width);
    Row rotated_b(width);
    tbq4::rotate_row(a.data(), dim, rotated_a.data());
    tbq4::rotate_row(b.data(), dim, rotated_b.data());
    const double scale = std::sqrt(dot(a, a) * dot(b, b));
    EXPECT_NEAR(dot(rotated_a, rotated_b), dot(a, b), 1e-6 * scale) << dim;
    Row back(dim);
    tbq4::unrotate_row(rotated_a.data(), dim, back.data());
    for (int64_t i = 0; i < dim; ++i) EXPECT_NEAR(back[i], a[i], 2e-6 * std::sqrt(dot(a, a))) << dim;
  }
}

TEST(Tbq4, QualityKeepsTheScaleUnbiased) {
  // <y, decoded> / |y|^2 is 1 by construction, up to the rounding of the f16 norm.
  std::mt19937_64 random(4);
  for (int i = 0; i < 100; ++i) {
    const Row row = random_row(random, 128);
    const Row back = decode(KvFormat::tbq4, encode(KvFormat::tbq4, row), 128);
    EXPECT_NEAR(dot(row, back) / dot(row, row), 1.0, 1e-3);
    const Row fast = decode(KvFormat::tbq4, encode(KvFormat::tbq4, row, EncodeMode::fast), 128);
    EXPECT_NEAR(dot(fast, fast) / dot(row, row), 1.0, 2e-3);
  }
}

TEST(Tbq4, InterleavedBlocksRoundTrip) {
  std::mt19937_64 random(5);
  for (const int64_t dim : {64, 128, 192, 256}) {
    const Row row = random_row(random, dim);
    const Encoded encoded = encode(KvFormat::tbq4, row);
    const int64_t block = tbq4::block_size(dim);
    ASSERT_EQ(tbq4::interleaved_block_bytes(block), block == 128 ? 66 : 34);
    std::vector<uint8_t> blocks(tbq4::blocks(dim) * tbq4::interleaved_block_bytes(block));
    EXPECT_EQ(tbq4::export_interleaved(encoded.codes.data(), encoded.scales.data(), dim, blocks.data()), 0);
    uint16_t first = 0;
    std::memcpy(&first, blocks.data(), 2);
    EXPECT_NEAR(f32_from_f16(first), f32_from_f16(encoded.scales[0]) * std::sqrt(static_cast<double>(block)),
                1e-3 * f32_from_f16(first));
    EXPECT_EQ(std::memcmp(blocks.data() + 2, encoded.codes.data(), block / 2), 0);
    Encoded back = encoded;
    std::fill(back.codes.begin(), back.codes.end(), 0);
    EXPECT_EQ(tbq4::import_interleaved(blocks.data(), dim, back.codes.data(), back.scales.data()), 0);
    EXPECT_EQ(back.codes, encoded.codes);
    for (size_t b = 0; b < back.scales.size(); ++b) {
      EXPECT_NEAR(f32_from_f16(back.scales[b]), f32_from_f16(encoded.scales[b]),
                  1e-3 * f32_from_f16(encoded.scales[b]));
    }
  }
}

TEST(Tbq4, InterleavedScalesSaturateAndAreCounted) {
  const std::vector<uint8_t> codes(64, 0x9a);
  const uint16_t norm = f16_from_f32(60000);
  std::vector<uint8_t> block(66);
  EXPECT_EQ(tbq4::export_interleaved(codes.data(), &norm, 128, block.data()), 1);
  uint16_t stored = 0;
  std::memcpy(&stored, block.data(), 2);
  EXPECT_EQ(f32_from_f16(stored), 65504);
}

TEST(Formats, ZeroRowsDecodeToExactZeros) {
  for (const KvFormat format : kAllFormats) {
    for (const int64_t dim : {1, 40, 64, 100, 128, 576}) {
      for (const EncodeMode mode : {EncodeMode::quality, EncodeMode::fast}) {
        const Encoded encoded = encode(format, Row(dim, 0.0F), mode);
        EXPECT_EQ(encoded.saturated, 0);
        for (const float x : decode(format, encoded, dim)) EXPECT_EQ(x, 0);
        for (const uint16_t scale : encoded.scales) EXPECT_EQ(scale, 0);
        for (const uint8_t code : encoded.codes) EXPECT_EQ(code, 0);
      }
    }
  }
}

TEST(Formats, ScalesBeyondF16SaturateAndAreCounted) {
  std::mt19937_64 random(6);
  Row row = random_row(random, 256);
  for (int i = 0; i < 128; ++i) row[i] *= 1e6F;  // the first block only
  for (const EncodeMode mode : {EncodeMode::quality, EncodeMode::fast}) {
    const Encoded tbq4 = encode(KvFormat::tbq4, row, mode);
    EXPECT_EQ(tbq4.saturated, 1);
    EXPECT_EQ(f32_from_f16(tbq4.scales[0]), 65504);
    EXPECT_NEAR(f32_from_f16(tbq4.scales[1]), 1, 0.2);
  }
  for (int i = 0; i < 128; ++i) row[i] *= 100;
  const Encoded q8 = encode(KvFormat::q8, row);
  EXPECT_EQ(q8.saturated, 4);
  EXPECT_EQ(f32_from_f16(q8.scales[0]), 65504);
  // Also where squares and sums overflow f32.
  for (const float huge : {1e19F, 1e30F, 3e38F, std::numeric_limits<float>::infinity()}) {
    const Row extreme(128, huge);
    for (const EncodeMode mode : {EncodeMode::quality, EncodeMode::fast}) {
      EXPECT_EQ(encode(KvFormat::tbq4, extreme, mode).saturated, 1) << huge;
      for (const float x : decode(KvFormat::tbq4, encode(KvFormat::tbq4, extreme, mode), 128)) {
        EXPECT_TRUE(std::isfinite(x));
      }
    }
    EXPECT_EQ(encode(KvFormat::q8, extreme).saturated, 4) << huge;
  }
}

TEST(Formats, TinyRowsBecomeZerosWithoutGarbage) {
  std::mt19937_64 random(7);
  for (const float factor : {1e-9F, 1e-20F, 1e-30F, 1e-42F}) {
    Row row = random_row(random, 128);
    for (float& x : row) x *= factor;
    for (const KvFormat format : {KvFormat::q8, KvFormat::tbq4}) {
      const Encoded encoded = encode(format, row);
      EXPECT_EQ(encoded.saturated, 0);
      for (const uint8_t code : encoded.codes) EXPECT_EQ(code, 0);
      for (const float x : decode(format, encoded, 128)) EXPECT_EQ(x, 0);
    }
  }
}

TEST(Formats, DecodingWithinTheErrorOfTheFormatForEveryDim) {
  std::mt19937_64 random(8);
  for (const KvFormat format : kAllFormats) {
    const double bound = format == KvFormat::f32    ? 0
                         : format == KvFormat::f16  ? 1e-7
                         : format == KvFormat::bf16 ? 1e-5
                         : format == KvFormat::q8   ? 6e-5
                                                    : 1.4e-2;
    for (int64_t dim = 1; dim <= 576; dim += dim < 140 ? 1 : 23) {
      const Row row = random_row(random, dim);
      const Row back = decode(format, encode(format, row), dim);
      double error = 0;
      for (int64_t i = 0; i < dim; ++i) error += std::pow(static_cast<double>(row[i]) - back[i], 2);
      // A short tail in a padded block is stored like any block: the error is relative to its energy, but
      // it also falls on the padding, so only the mean over the row is bounded.
      EXPECT_LE(error, bound * 2 * dot(row, row)) << name_of(format) << " dim " << dim;
    }
  }
}

TEST(Formats, StoredDomainAgreesWithDecodedValues) {
  std::mt19937_64 random(9);
  for (const KvFormat format : kAllFormats) {
    const KvFormatOps& ops = ops_of(format);
    for (const int64_t dim : {1, 40, 64, 80, 128, 192, 256, 576}) {
      const Row key = random_row(random, dim);
      const Row query = random_row(random, dim);
      const Encoded encoded = encode(format, key);
      Row stored(ops.stored_dim(dim));
      Row inside(ops.stored_dim(dim));
      ops.decode_stored_row(encoded.codes.data(), encoded.scales.data(), dim, stored.data());
      ops.enter_domain(query.data(), dim, inside.data());
      const Row decoded = decode(format, encoded, dim);
      EXPECT_NEAR(dot(inside, stored), dot(query, decoded),
                  2e-6 * std::sqrt(dot(query, query) * dot(key, key)))
          << name_of(format) << " dim " << dim;
    }
  }
}

TEST(Formats, NamesRoundTrip) {
  for (const KvFormat format : kAllFormats) EXPECT_EQ(parse_kv_format(name_of(format)), format);
  EXPECT_FALSE(parse_kv_format("q4").has_value());
  EXPECT_THROW(ops_of(static_cast<KvFormat>(17)), Error);
}

}  // namespace
}  // namespace attnspan
