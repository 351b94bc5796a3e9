// The same operations on the same numbers in the same order as tbq4.cpp, a vector of a row's values at a
// time, so that every byte is the same. Compiled without contraction into FMA.

#include "cpu/targets.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kv/tbq4_encode_simd.cpp"
#include <hwy/foreach_target.h>
// After foreach_target.h:
#include <hwy/highway.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "kv/formats.hpp"
#include "kv/tbq4.hpp"

HWY_BEFORE_NAMESPACE();
namespace attnspan::tbq4 {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

#if HWY_TARGET == HWY_SCALAR

int64_t encode_row_of_target(const float* values, int64_t dim, EncodeMode mode, uint8_t* codes,
                             uint16_t* norms) {
  return encode_row(values, dim, mode, codes, norms);
}

#else

using F32 = hn::ScalableTag<float>;
using I32 = hn::RebindToSigned<F32>;
using U32 = hn::RebindToUnsigned<F32>;
using VecF = hn::Vec<F32>;
using VecI = hn::Vec<I32>;
constexpr size_t kLanes = HWY_LANES(float);

// Bit 31 where value i of a block is negated.
template <size_t kBlock>
constexpr std::array<uint32_t, kBlock> make_sign_masks() {
  std::array<uint32_t, kBlock> masks{};
  for (size_t i = 0; i < kBlock; ++i)
    masks[i] = is_negated(kBlock, static_cast<int64_t>(i)) ? 0x80000000U : 0;
  return masks;
}
template <size_t kBlock>
inline constexpr std::array<uint32_t, kBlock> kSignMasks = make_sign_masks<kBlock>();

// Lanes i and i + h of every 2 h lanes, exchanged.
template <size_t kStep>
HWY_INLINE VecF exchanged(VecF v) {
  if constexpr (kStep == 1) return hn::Shuffle2301(v);
  if constexpr (kStep == 2) return hn::Shuffle1032(v);
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3
  if constexpr (kStep == 4) return hn::SwapAdjacentBlocks(v);
  return hn::ConcatLowerUpper(F32(), v, v);
#else
  return v;
#endif
}

// Butterflies of h = kStep within each vector: a + b, then a - b, which is a + (-b) to the bit.
template <size_t kStep, size_t kVectors>
HWY_INLINE void butterflies_in_vectors(VecF (&y)[kVectors]) {
  if constexpr (kStep < kLanes) {
    const U32 du;
    const auto odd = hn::Ne(hn::And(hn::Iota(du, 0), hn::Set(du, kStep)), hn::Zero(du));
    const VecF negate = hn::BitCast(F32(), hn::IfThenElseZero(odd, hn::Set(du, 0x80000000U)));
    for (VecF& v : y) v = hn::Add(exchanged<kStep>(v), hn::Xor(v, negate));
    butterflies_in_vectors<kStep * 2>(y);
  }
}

// y = H(s * x) / sqrt(B): rotate_row for one block. `x` has kBlock values.
template <size_t kVectors>
HWY_INLINE void rotate(const float* x, VecF (&y)[kVectors]) {
  constexpr size_t kBlock = kVectors * kLanes;
  const F32 d;
  for (size_t v = 0; v < kVectors; ++v) {
    const VecF sign = hn::BitCast(d, hn::LoadU(U32(), kSignMasks<kBlock>.data() + v * kLanes));
    y[v] = hn::Xor(hn::LoadU(d, x + v * kLanes), sign);
  }
  butterflies_in_vectors<1>(y);
  for (size_t h = 1; h < kVectors; h *= 2) {
    for (size_t v = 0; v < kVectors; ++v) {
      if ((v & h) != 0) continue;
      const VecF a = y[v], b = y[v + h];
      y[v] = hn::Add(a, b);
      y[v + h] = hn::Sub(a, b);
    }
  }
  for (VecF& v : y) v = hn::Mul(v, hn::Set(d, inverse_sqrt(kBlock)));
}

// The halving tree over the lanes of one vector.
HWY_INLINE float lane_tree(VecF v) {
  if constexpr (kLanes >= 16) v = hn::Add(v, exchanged<8>(v));
  if constexpr (kLanes >= 8) v = hn::Add(v, exchanged<4>(v));
  v = hn::Add(v, exchanged<2>(v));
  return hn::GetLane(hn::Add(v, exchanged<1>(v)));
}

// terms[i] with terms[i + n / 2], and so on with half the length. Overwrites the terms.
template <size_t kVectors>
HWY_INLINE float tree_sum(VecF (&terms)[kVectors]) {
  for (size_t half = kVectors / 2; half > 0; half /= 2) {
    for (size_t v = 0; v < half; ++v) terms[v] = hn::Add(terms[v], terms[v + half]);
  }
  return lane_tree(terms[0]);
}

// How many thresholds are <= v (none where v is not a number), and the centroid of that code.
class Codebook {
 public:
#if HWY_TARGET == HWY_AVX3
  // A search in four steps; the middle threshold is 0.
  HWY_INLINE Codebook() {
    const F32 d;
    HWY_ALIGN float two[16] = {}, one[16] = {};
    for (size_t i = 0; i < 15; ++i) one[i] = kThresholds[i];
    for (size_t i = 0; i < 14; ++i) two[i] = kThresholds[i + 1];
    centroids_ = hn::LoadU(d, kCentroids.data());
    two_ = hn::Load(d, two);
    one_ = hn::Load(d, one);
  }
  HWY_INLINE VecI code(VecF v) const {
    const F32 d;
    const I32 di;
    const auto at_least = [&](VecF threshold) HWY_ATTR { return hn::RebindMask(di, hn::Le(threshold, v)); };
    const auto upper = at_least(hn::Set(d, kThresholds[7]));
    VecI code = hn::IfThenElseZero(upper, hn::Set(di, 8));
    const VecF quarter =
        hn::IfThenElse(hn::RebindMask(d, upper), hn::Set(d, kThresholds[11]), hn::Set(d, kThresholds[3]));
    code = hn::Add(code, hn::IfThenElseZero(at_least(quarter), hn::Set(di, 4)));
    code = hn::Add(code, hn::IfThenElseZero(at_least(looked_up(two_, code)), hn::Set(di, 2)));
    return hn::Add(code, hn::IfThenElseZero(at_least(looked_up(one_, code)), hn::Set(di, 1)));
  }
  HWY_INLINE VecF centroid(VecI code) const { return looked_up(centroids_, code); }

 private:
  static HWY_INLINE VecF looked_up(VecF table, VecI code) {
    return hn::TableLookupLanes(table, hn::IndicesFromVec(F32(), code));
  }
  VecF centroids_, two_, one_;
#else
  HWY_INLINE VecI code(VecF v) const {
    const F32 d;
    const I32 di;
    VecI code = hn::Zero(di);
    for (const float threshold : kThresholds) {  // a mask is -1 where it holds
      code = hn::Sub(code, hn::VecFromMask(di, hn::RebindMask(di, hn::Le(hn::Set(d, threshold), v))));
    }
    return code;
  }
  HWY_INLINE VecF centroid(VecI code) const {
    HWY_ALIGN int32_t index[kLanes];
    HWY_ALIGN float value[kLanes];
    hn::Store(code, I32(), index);
    for (size_t i = 0; i < kLanes; ++i) value[i] = kCentroids[static_cast<size_t>(index[i])];
    return hn::Load(F32(), value);
  }
#endif
};

struct Candidate {
  HWY_ALIGN int32_t codes[128];
  float dot = 0, squares = 0;
};

template <size_t kVectors>
HWY_INLINE void round_block(const Codebook& book, const VecF (&y)[kVectors], float rms, float pre_scale,
                            Candidate& candidate) {
  const VecF inverse = hn::Set(F32(), 1.0F / (pre_scale * rms));
  VecF dot[kVectors], squares[kVectors];
  for (size_t v = 0; v < kVectors; ++v) {
    const VecI code = book.code(hn::Mul(y[v], inverse));
    hn::Store(code, I32(), candidate.codes + v * kLanes);
    const VecF centroid = book.centroid(code);
    dot[v] = hn::Mul(y[v], centroid);
    squares[v] = hn::Mul(centroid, centroid);
  }
  candidate.dot = tree_sum(dot);
  candidate.squares = tree_sum(squares);
}

// best_candidate of tbq4.cpp, between two buffers. Returns the chosen one.
template <size_t kVectors>
HWY_INLINE const Candidate& best_candidate(const Codebook& book, const VecF (&y)[kVectors], float rms,
                                           float energy, Candidate (&buffers)[2]) {
  size_t best = 0;
  float best_score = 0;
  for (size_t i = 0; i < kPreScales.size(); ++i) {
    Candidate& candidate = buffers[i == 0 ? 0 : 1 - best];
    round_block(book, y, rms, kPreScales[i], candidate);
    const float score = (candidate.dot * candidate.dot) / (candidate.squares * energy);
    if (i == 0 || score > best_score) {
      best = static_cast<size_t>(&candidate - buffers);
      best_score = score;
    }
  }
  return buffers[best];
}

// One block of x[kBlock]. Returns 1 where the norm saturated, else 0.
template <size_t kBlock>
HWY_NOINLINE int64_t encode_block(const float* x, EncodeMode mode, uint8_t* codes, uint16_t* norm) {
  constexpr size_t kVectors = kBlock / kLanes;
  const Codebook book;
  VecF y[kVectors], squares[kVectors];
  rotate(x, y);
  for (size_t v = 0; v < kVectors; ++v) squares[v] = hn::Mul(y[v], y[v]);
  const float energy = tree_sum(squares);
  const float rms = std::sqrt(energy / static_cast<float>(kBlock));
  int64_t saturated = 0;
  *norm = 0;
  if (rms != 0) {
    Candidate buffers[2];
    const bool quality = mode == EncodeMode::quality;
    if (!quality) round_block(book, y, rms, 1.0F, buffers[0]);
    const Candidate& chosen = quality ? best_candidate(book, y, rms, energy, buffers) : buffers[0];
    *norm = scale_to_f16(quality ? energy / chosen.dot : std::sqrt(energy) / std::sqrt(chosen.squares),
                         saturated);
    for (size_t j = 0; j < kBlock / 2; ++j) {
      codes[j] = static_cast<uint8_t>(chosen.codes[2 * j] | (chosen.codes[2 * j + 1] << 4));
    }
  }
  if (*norm == 0) std::memset(codes, 0, kBlock / 2);
  return saturated;
}

int64_t encode_row_of_target(const float* values, int64_t dim, EncodeMode mode, uint8_t* codes,
                             uint16_t* norms) {
  const int64_t block = block_size(dim);
  int64_t saturated = 0;
  for (int64_t start = 0; start < dim; start += block, codes += block / 2, ++norms) {
    const float* x = values + start;
    HWY_ALIGN float padded[64] = {};
    if (start + block > dim) {  // only blocks of 64 are ever padded
      std::copy(x, values + dim, padded);
      x = padded;
    }
    saturated +=
        block == 128 ? encode_block<128>(x, mode, codes, norms) : encode_block<64>(x, mode, codes, norms);
  }
  return saturated;
}

#endif  // not scalar

}  // namespace HWY_NAMESPACE
}  // namespace attnspan::tbq4
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

#include "kv/tbq4_encode_simd.hpp"

namespace attnspan::tbq4 {

HWY_EXPORT(encode_row_of_target);

int64_t encode_row_simd(const float* values, int64_t dim, EncodeMode mode, uint8_t* codes, uint16_t* norms) {
  return HWY_DYNAMIC_DISPATCH(encode_row_of_target)(values, dim, mode, codes, norms);
}

}  // namespace attnspan::tbq4

#endif  // HWY_ONCE
