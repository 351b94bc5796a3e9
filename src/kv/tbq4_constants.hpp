#pragma once
// The constants of the tbq4 format (docs/kv-formats.md), and nothing else: plain constexpr data for the host
// code of every backend. Device code gets them as constant memory (CUDA) or generated text (WGSL, MSL).

#include <array>
#include <cstdint>

namespace attnspan::tbq4 {

// Values per block: 128 where the row is a whole number of such blocks, else 64.
constexpr int64_t block_size(int64_t dim) { return dim % 128 == 0 ? 128 : 64; }
constexpr int64_t blocks(int64_t dim) { return (dim + block_size(dim) - 1) / block_size(dim); }
// The row's width in the rotated domain: zeros fill the last block before it is rotated.
constexpr int64_t padded_dim(int64_t dim) { return blocks(dim) * block_size(dim); }

// 1 / sqrt(block), in f32; the rotation multiplies by it.
constexpr float inverse_sqrt(int64_t block) { return block == 128 ? 0.08838834764831845F : 0.125F; }

// Lloyd-Max for N(0, 1). Codes ascend with the centroid: code 0 is the most negative, 8 the smallest
// positive.
inline constexpr std::array<float, 8> kPositiveCentroids = {
    0.12839503F, 0.38804830F, 0.65675912F, 0.94234046F, 1.25623120F, 1.61804639F, 2.06901723F, 2.73258957F};

constexpr std::array<float, 16> make_centroids() {
  std::array<float, 16> centroids{};
  for (int i = 0; i < 8; ++i) {
    centroids[8 + i] = kPositiveCentroids[i];
    centroids[7 - i] = -kPositiveCentroids[i];
  }
  return centroids;
}
inline constexpr std::array<float, 16> kCentroids = make_centroids();

// code(v) = how many of these are <= v. Midpoints, summed and halved in f32; the middle one is exactly 0.
constexpr std::array<float, 15> make_thresholds() {
  std::array<float, 15> thresholds{};
  for (int i = 0; i < 15; ++i) thresholds[i] = 0.5F * (kCentroids[i] + kCentroids[i + 1]);
  return thresholds;
}
inline constexpr std::array<float, 15> kThresholds = make_thresholds();

// The codebook in steps of kInt8Step, for int8 dot products: 0.05% more error than the f32 table.
inline constexpr std::array<int8_t, 8> kPositiveInt8 = {5, 15, 25, 36, 48, 62, 79, 104};
inline constexpr float kInt8Step = 0.02588279F;

// Factors of the RMS that the quality encoder tries, ascending.
inline constexpr std::array<float, 9> kPreScales = {0.84F, 0.88F, 0.92F, 0.96F, 1.00F,
                                                    1.04F, 1.08F, 1.12F, 1.16F};

inline constexpr float kMaxNorm = 65504.0F;  // the largest finite f16

// Bit i of word i / 64 is set where value i of a block is negated: the top bit of the (i + 1)-th output of
// SplitMix64 seeded with the block size. One vector per block size, shared by all heads and layers.
constexpr std::array<uint64_t, 2> make_sign_bits(int64_t block) {
  std::array<uint64_t, 2> bits{};
  uint64_t state = static_cast<uint64_t>(block);
  for (int64_t i = 0; i < block; ++i) {
    state += 0x9e3779b97f4a7c15ULL;
    uint64_t z = state;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
    z ^= z >> 31;
    bits[i / 64] |= (z >> 63) << (i % 64);
  }
  return bits;
}
inline constexpr std::array<uint64_t, 2> kSignBits128 = make_sign_bits(128);
inline constexpr std::array<uint64_t, 2> kSignBits64 = make_sign_bits(64);

constexpr bool is_negated(int64_t block, int64_t i) {
  const auto& bits = block == 128 ? kSignBits128 : kSignBits64;
  return ((bits[i / 64] >> (i % 64)) & 1U) != 0;
}

}  // namespace attnspan::tbq4
