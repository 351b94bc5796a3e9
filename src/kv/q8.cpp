// q8: blocks of 32 values along the row, int8 codes and one f16 scale per block. The last block is filled
// with zeros. scale = max |x| / 127, rounded to f16 first and then used; code = x / scale to nearest even.

#include <algorithm>
#include <cmath>

#include "core/dtype.hpp"
#include "kv/formats.hpp"

namespace attnspan {
namespace {

constexpr int64_t kBlock = 32;

int64_t blocks(int64_t dim) { return (dim + kBlock - 1) / kBlock; }
int64_t row_code_bytes(int64_t dim) { return blocks(dim) * kBlock; }
int64_t same_dim(int64_t dim) { return dim; }

// To nearest even: at 1.5 * 2^23 the unit of an f32 is 1, so the addition itself rounds. |x| <= 127 here.
float round_to_even(float x) {
  constexpr float kMagic = 12582912.0F;
  return (x + kMagic) - kMagic;
}

int8_t code_of(float x, float scale) {
  const float quotient = x / scale;
  const float clamped = quotient > -127.0F ? std::min(quotient, 127.0F) : -127.0F;  // a NaN becomes -127
  return static_cast<int8_t>(round_to_even(clamped));
}

int64_t encode_row(const float* values, int64_t dim, EncodeMode, uint8_t* codes, uint16_t* scales) {
  int64_t saturated = 0;
  for (int64_t block = 0; block < blocks(dim); ++block) {
    const float* x = values + block * kBlock;
    const int64_t count = std::min(kBlock, dim - block * kBlock);
    float largest = 0;
    for (int64_t i = 0; i < count; ++i) largest = std::max(largest, std::abs(x[i]));
    scales[block] = scale_to_f16(largest / 127.0F, saturated);
    const float scale = f32_from_f16(scales[block]);
    auto* block_codes = reinterpret_cast<int8_t*>(codes + block * kBlock);
    std::fill_n(block_codes, kBlock, int8_t{0});
    if (scale == 0) continue;
    for (int64_t i = 0; i < count; ++i) block_codes[i] = code_of(x[i], scale);
  }
  return saturated;
}

void decode_row(const uint8_t* codes, const uint16_t* scales, int64_t dim, float* values) {
  for (int64_t block = 0; block < blocks(dim); ++block) {
    const auto* block_codes = reinterpret_cast<const int8_t*>(codes + block * kBlock);
    const float scale = f32_from_f16(scales[block]);
    const int64_t count = std::min(kBlock, dim - block * kBlock);
    for (int64_t i = 0; i < count; ++i) {
      values[block * kBlock + i] = static_cast<float>(block_codes[i]) * scale;
    }
  }
}

}  // namespace

const KvFormatOps kQ8Ops = {KvFormat::q8, "q8",       false,      row_code_bytes, blocks,
                            same_dim,     encode_row, decode_row, copy_row,       copy_row};

}  // namespace attnspan
