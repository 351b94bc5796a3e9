// The definition of tbq4's bits. This file is compiled without contraction into FMA, and every sum is a
// halving tree, so that CPU and CUDA encoders agree bit for bit.

#include "kv/tbq4.hpp"

#include <array>
#include <cmath>
#include <cstring>

#include "core/dtype.hpp"
#include "kv/formats.hpp"
#include "kv/tbq4_encode_simd.hpp"

namespace attnspan {
namespace tbq4 {
namespace {

constexpr int64_t kMaxBlock = 128;

// In place, in natural order: butterflies of h = 1, 2, 4, ..., block / 2.
void walsh_hadamard(float* values, int64_t block) {
  for (int64_t h = 1; h < block; h *= 2) {
    for (int64_t i = 0; i < block; i += 2 * h) {
      for (int64_t j = i; j < i + h; ++j) {
        const float a = values[j];
        const float b = values[j + h];
        values[j] = a + b;
        values[j + h] = a - b;
      }
    }
  }
}

// terms[i] += terms[i + n / 2], and so on with half the length. Overwrites the terms.
float tree_sum(float* terms, int64_t count) {
  for (int64_t half = count / 2; half > 0; half /= 2) {
    for (int64_t i = 0; i < half; ++i) terms[i] += terms[i + half];
  }
  return terms[0];
}

float tree_dot(const float* a, const float* b, int64_t count) {
  std::array<float, kMaxBlock> products;
  for (int64_t i = 0; i < count; ++i) products[i] = a[i] * b[i];
  return tree_sum(products.data(), count);
}

int code_of(float v) {
  int code = 0;
  for (const float threshold : kThresholds) code += threshold <= v ? 1 : 0;
  return code;
}

// One way to round a block: codes, and the sums that judge it.
struct Candidate {
  std::array<uint8_t, kMaxBlock> codes;
  float dot = 0;      // <y, c>
  float squares = 0;  // <c, c>
};

// Codes of y / (pre_scale * rms).
Candidate round_block(const float* y, int64_t block, float rms, float pre_scale) {
  Candidate candidate;
  std::array<float, kMaxBlock> centroids;
  const float inverse = 1.0F / (pre_scale * rms);
  for (int64_t i = 0; i < block; ++i) {
    candidate.codes[i] = static_cast<uint8_t>(code_of(y[i] * inverse));
    centroids[i] = kCentroids[candidate.codes[i]];
  }
  candidate.dot = tree_dot(y, centroids.data(), block);
  candidate.squares = tree_dot(centroids.data(), centroids.data(), block);
  return candidate;
}

// The pre-scale whose codes point most nearly along y; the smaller one on a tie. Where squares overflow the
// scores are no numbers and the first pre-scale stays.
Candidate best_candidate(const float* y, int64_t block, float rms, float energy) {
  Candidate best;
  float best_score = 0;
  for (size_t i = 0; i < kPreScales.size(); ++i) {
    const Candidate candidate = round_block(y, block, rms, kPreScales[i]);
    const float score = (candidate.dot * candidate.dot) / (candidate.squares * energy);
    if (i == 0 || score > best_score) {
      best = candidate;
      best_score = score;
    }
  }
  return best;
}

void store_block(const Candidate& candidate, int64_t block, uint8_t* codes) {
  for (int64_t j = 0; j < block / 2; ++j) {
    codes[j] = static_cast<uint8_t>(candidate.codes[2 * j] | (candidate.codes[2 * j + 1] << 4));
  }
}

}  // namespace

int64_t encode_rotated_block(const float* y, int64_t block, EncodeMode mode, uint8_t* codes, uint16_t* norm) {
  const float energy = tree_dot(y, y, block);
  const float rms = std::sqrt(energy / static_cast<float>(block));
  int64_t saturated = 0;
  *norm = 0;
  if (rms != 0) {
    const bool quality = mode == EncodeMode::quality;
    const Candidate chosen =
        quality ? best_candidate(y, block, rms, energy) : round_block(y, block, rms, 1.0F);
    *norm = scale_to_f16(quality ? energy / chosen.dot : std::sqrt(energy) / std::sqrt(chosen.squares),
                         saturated);
    store_block(chosen, block, codes);
  }
  // Zeroed memory is a block of zeros, and so is every block too small for an f16 norm.
  if (*norm == 0) std::memset(codes, 0, static_cast<size_t>(block / 2));
  return saturated;
}

void rotate_row(const float* values, int64_t dim, float* stored) {
  const int64_t block = block_size(dim);
  for (int64_t start = 0; start < dim; start += block) {
    for (int64_t i = 0; i < block; ++i) {
      const float x = start + i < dim ? values[start + i] : 0.0F;
      stored[start + i] = is_negated(block, i) ? -x : x;
    }
    walsh_hadamard(stored + start, block);
    for (int64_t i = 0; i < block; ++i) stored[start + i] *= inverse_sqrt(block);
  }
}

void unrotate_row(const float* stored, int64_t dim, float* values) {
  const int64_t block = block_size(dim);
  std::array<float, kMaxBlock> y;
  for (int64_t start = 0; start < dim; start += block) {
    std::memcpy(y.data(), stored + start, static_cast<size_t>(block) * sizeof(float));
    walsh_hadamard(y.data(), block);
    for (int64_t i = 0; i < block && start + i < dim; ++i) {
      const float x = y[i] * inverse_sqrt(block);
      values[start + i] = is_negated(block, i) ? -x : x;
    }
  }
}

int64_t encode_row(const float* values, int64_t dim, EncodeMode mode, uint8_t* codes, uint16_t* scales) {
  std::array<float, kMaxStoredDim> y;
  rotate_row(values, dim, y.data());
  const int64_t block = block_size(dim);
  int64_t saturated = 0;
  for (int64_t b = 0; b < blocks(dim); ++b) {
    saturated += encode_rotated_block(y.data() + b * block, block, mode, codes + b * block / 2, scales + b);
  }
  return saturated;
}

int64_t export_interleaved(const uint8_t* codes, const uint16_t* norms, int64_t dim, uint8_t* interleaved) {
  const int64_t block = block_size(dim);
  int64_t saturated = 0;
  for (int64_t b = 0; b < blocks(dim); ++b) {
    uint8_t* to = interleaved + b * interleaved_block_bytes(block);
    const uint16_t scale = scale_to_f16(f32_from_f16(norms[b]) / inverse_sqrt(block), saturated);
    std::memcpy(to, &scale, 2);
    std::memcpy(to + 2, codes + b * block / 2, static_cast<size_t>(block / 2));
  }
  return saturated;
}

int64_t import_interleaved(const uint8_t* interleaved, int64_t dim, uint8_t* codes, uint16_t* norms) {
  const int64_t block = block_size(dim);
  int64_t saturated = 0;
  for (int64_t b = 0; b < blocks(dim); ++b) {
    const uint8_t* from = interleaved + b * interleaved_block_bytes(block);
    uint16_t scale = 0;
    std::memcpy(&scale, from, 2);
    norms[b] = scale_to_f16(f32_from_f16(scale) * inverse_sqrt(block), saturated);
    std::memcpy(codes + b * block / 2, from + 2, static_cast<size_t>(block / 2));
  }
  return saturated;
}

}  // namespace tbq4

namespace {

int64_t row_code_bytes(int64_t dim) { return tbq4::padded_dim(dim) / 2; }

void decode_stored_row(const uint8_t* codes, const uint16_t* scales, int64_t dim, float* values) {
  const int64_t block = tbq4::block_size(dim);
  for (int64_t b = 0; b < tbq4::blocks(dim); ++b) {
    const float norm = f32_from_f16(scales[b]);
    for (int64_t j = b * block / 2; j < (b + 1) * block / 2; ++j) {
      values[2 * j] = norm * tbq4::kCentroids[codes[j] & 15];
      values[2 * j + 1] = norm * tbq4::kCentroids[codes[j] >> 4];
    }
  }
}

}  // namespace

const KvFormatOps kTbq4Ops = {KvFormat::tbq4,
                              "tbq4",
                              true,
                              row_code_bytes,
                              tbq4::blocks,
                              tbq4::padded_dim,
                              tbq4::encode_row_simd,
                              decode_stored_row,
                              tbq4::rotate_row,
                              tbq4::unrotate_row};

}  // namespace attnspan
