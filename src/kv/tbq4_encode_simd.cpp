// The same operations on the same numbers in the same order as tbq4.cpp, a vector of a row's values at a
// time, so that every byte is the same. Compiled without contraction into FMA.

#include "core/simd_targets.hpp"

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

// tree_sum of tbq4.cpp over term(0), ..., term(kVectors - 1) without keeping the terms: the sum of every
// kStep-th from kFirst on is that of every 2 kStep-th from kFirst plus that from kFirst + kStep.
template <size_t kVectors, size_t kFirst = 0, size_t kStep = 1, typename Term>
HWY_INLINE auto tree_of(const Term& term) {
  if constexpr (kStep == kVectors) {
    return term(kFirst);
  } else {
    const auto a = tree_of<kVectors, kFirst, 2 * kStep>(term);
    return a + tree_of<kVectors, kFirst + kStep, 2 * kStep>(term);
  }
}

struct Sum {
  VecF total;
  HWY_INLINE Sum operator+(const Sum& other) const { return {hn::Add(total, other.total)}; }
};
struct TwoSums {
  VecF dot, squares;
  HWY_INLINE TwoSums operator+(const TwoSums& other) const {
    return {hn::Add(dot, other.dot), hn::Add(squares, other.squares)};
  }
};

// The codebook is symmetric, so magnitudes are rounded: `level` counts the positive thresholds at or below a
// value, 0..7. A value on a threshold belongs to the code above it, so a negative one on a threshold has the
// lower magnitude: its magnitude is made one ulp smaller, and then the same comparison serves both signs.
class Levels {
 public:
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3
  // A search in three steps; the last threshold and the centroid come from tables of eight.
  HWY_INLINE Levels() {
    HWY_ALIGN float last[kLanes], centroids[kLanes];
    for (size_t i = 0; i < kLanes; ++i) {
      last[i] = threshold(i % 8 / 2 * 2);
      centroids[i] = kPositiveCentroids[i % 8];
    }
    last_ = hn::Load(F32(), last);
    centroids_ = hn::Load(F32(), centroids);
  }
  HWY_INLINE VecI level(VecF v) const {
    const F32 d;
    const I32 di;
    const auto upper = hn::Le(hn::Set(d, threshold(3)), v);
    const auto middle = hn::Le(hn::IfThenElse(upper, hn::Set(d, threshold(5)), hn::Set(d, threshold(1))), v);
    const VecI level = hn::Or(hn::IfThenElseZero(hn::RebindMask(di, upper), hn::Set(di, 4)),
                              hn::IfThenElseZero(hn::RebindMask(di, middle), hn::Set(di, 2)));
    const auto odd = hn::Le(looked_up(last_, level), v);
    return hn::Sub(level, hn::VecFromMask(di, hn::RebindMask(di, odd)));
  }
  HWY_INLINE VecF centroid_of(VecI level) const { return looked_up(centroids_, level); }
  HWY_INLINE VecF centroid(VecF v) const { return centroid_of(level(v)); }

 private:
  static HWY_INLINE VecF looked_up(VecF table, VecI index) {
    return hn::TableLookupLanes(table, hn::IndicesFromVec(F32(), index));
  }
  VecF last_, centroids_;
#else
  HWY_INLINE VecI level(VecF v) const {
    const I32 di;
    VecI level = hn::Zero(di);
    for (size_t i = 0; i < 7; ++i) {  // a mask is -1 where it holds
      level =
          hn::Sub(level, hn::VecFromMask(di, hn::RebindMask(di, hn::Le(hn::Set(F32(), threshold(i)), v))));
    }
    return level;
  }
  HWY_INLINE VecF centroid_of(VecI level) const {
    const I32 di;
    VecF centroid = hn::Set(F32(), kPositiveCentroids[0]);
    for (int32_t i = 1; i < 8; ++i) {
      const auto here = hn::RebindMask(F32(), hn::Eq(level, hn::Set(di, i)));
      centroid = hn::IfThenElse(here, hn::Set(F32(), kPositiveCentroids[static_cast<size_t>(i)]), centroid);
    }
    return centroid;
  }
  HWY_INLINE VecF centroid(VecF v) const {  // centroid_of(level(v))
    const F32 d;
    VecF centroid = hn::Set(d, kPositiveCentroids[0]);
    for (size_t i = 0; i < 7; ++i) {
      const auto above = hn::Le(hn::Set(d, threshold(i)), v);
      centroid = hn::IfThenElse(above, hn::Set(d, kPositiveCentroids[i + 1]), centroid);
    }
    return centroid;
  }

 private:
#endif
  static constexpr float threshold(size_t i) { return kThresholds[8 + i]; }  // the positive ones
};

// A rotated block of finite values, as magnitudes and signs.
template <size_t kVectors>
struct Magnitudes {
  VecF y[kVectors];
  VecI below[kVectors];  // -1 where the value is negative, else 0

  HWY_INLINE explicit Magnitudes(const VecF (&values)[kVectors]) {
    for (size_t v = 0; v < kVectors; ++v) {
      y[v] = hn::Abs(values[v]);
      below[v] = hn::BroadcastSignBit(hn::BitCast(I32(), values[v]));
    }
  }
  // What Levels compares. (A negative zero becomes a NaN and so falls to level 0, where it belongs.)
  HWY_INLINE VecF scaled(size_t v, VecF inverse) const {
    return hn::BitCast(F32(), hn::Add(hn::BitCast(I32(), hn::Mul(y[v], inverse)), below[v]));
  }
};

struct Rounded {
  float dot = 0, squares = 0;
};

// <y, c> and <c, c> of round_block in tbq4.cpp: value and centroid have the same sign, so that the product of
// the magnitudes is theirs to the bit.
template <size_t kVectors>
HWY_INLINE Rounded round_block(const Levels& levels, const Magnitudes<kVectors>& block, VecF inverse) {
  const TwoSums sums = tree_of<kVectors>([&](size_t v) HWY_ATTR {
    const VecF centroid = levels.centroid(block.scaled(v, inverse));
    return TwoSums{hn::Mul(block.y[v], centroid), hn::Mul(centroid, centroid)};
  });
  return {lane_tree(sums.dot), lane_tree(sums.squares)};
}

HWY_INLINE float inverse_scale(float pre_scale, float rms) { return 1.0F / (pre_scale * rms); }

// best_candidate of tbq4.cpp. Returns the inverse that makes its codes.
template <size_t kVectors>
HWY_INLINE float best_inverse(const Levels& levels, const Magnitudes<kVectors>& block, float rms,
                              float energy, Rounded& best) {
  float best_score = 0, best_inverse = 0;
  for (size_t i = 0; i < kPreScales.size(); ++i) {
    const float inverse = inverse_scale(kPreScales[i], rms);
    const Rounded rounded = round_block(levels, block, hn::Set(F32(), inverse));
    const float score = (rounded.dot * rounded.dot) / (rounded.squares * energy);
    if (i == 0 || score > best_score) {
      best = rounded;
      best_score = score;
      best_inverse = inverse;
    }
  }
  return best_inverse;
}

// Codes, two a byte, the first in the low half: 8 + level, or 7 - level of a negative value. Returns <c, c>
// of their centroids.
template <size_t kVectors>
HWY_INLINE VecF store_codes(const Levels& levels, const Magnitudes<kVectors>& block, VecF inverse,
                            uint8_t* codes) {
  const I32 di;
  const hn::Rebind<uint8_t, I32> bytes_of_lanes;
  HWY_ALIGN uint8_t bytes[kVectors * kLanes];
  VecF centroids[kVectors];
  for (size_t v = 0; v < kVectors; ++v) {
    // A zero counts as positive, and so does a product that became one.
    const VecF magnitude = hn::Mul(block.y[v], inverse);
    const auto positive =
        hn::Or(hn::Eq(block.below[v], hn::Zero(di)), hn::RebindMask(di, hn::Eq(magnitude, hn::Zero(F32()))));
    const VecI level = levels.level(block.scaled(v, inverse));
    const VecI code =
        hn::IfThenElse(positive, hn::Add(hn::Set(di, 8), level), hn::Sub(hn::Set(di, 7), level));
    hn::StoreU(hn::DemoteTo(bytes_of_lanes, code), bytes_of_lanes, bytes + v * kLanes);
    centroids[v] = levels.centroid_of(level);
  }
  const hn::Repartition<int16_t, F32> pairs;
  const hn::Rebind<uint8_t, decltype(pairs)> halves;
  for (size_t i = 0; i < sizeof(bytes); i += 2 * hn::Lanes(pairs)) {
    const auto pair = hn::LoadU(pairs, reinterpret_cast<const int16_t*>(bytes + i));
    const auto packed = hn::And(hn::Or(pair, hn::ShiftRight<4>(pair)), hn::Set(pairs, 255));
    hn::StoreU(hn::DemoteTo(halves, packed), halves, codes + i / 2);
  }
  return tree_of<kVectors>([&](size_t v) HWY_ATTR { return Sum{hn::Mul(centroids[v], centroids[v])}; }).total;
}

// One block of x[kBlock]. Returns 1 where the norm saturated, else 0.
template <size_t kBlock>
HWY_NOINLINE int64_t encode_block(const float* x, EncodeMode mode, uint8_t* codes, uint16_t* norm) {
  constexpr size_t kVectors = kBlock / kLanes;
  VecF y[kVectors];
  rotate(x, y);
  const float energy =
      lane_tree(tree_of<kVectors>([&](size_t v) HWY_ATTR { return Sum{hn::Mul(y[v], y[v])}; }).total);
  if (!std::isfinite(energy)) {  // infinite or no numbers: the definition decides
    HWY_ALIGN float rotated[kBlock];
    for (size_t v = 0; v < kVectors; ++v) hn::Store(y[v], F32(), rotated + v * kLanes);
    return encode_rotated_block(rotated, kBlock, mode, codes, norm);
  }
  const float rms = std::sqrt(energy / static_cast<float>(kBlock));
  int64_t saturated = 0;
  *norm = 0;
  if (rms != 0) {
    const Levels levels;
    const Magnitudes<kVectors> block(y);
    if (mode == EncodeMode::quality) {
      Rounded rounded;
      const float inverse = best_inverse(levels, block, rms, energy, rounded);
      store_codes(levels, block, hn::Set(F32(), inverse), codes);
      *norm = scale_to_f16(energy / rounded.dot, saturated);
    } else {
      const VecF squares = store_codes(levels, block, hn::Set(F32(), inverse_scale(1.0F, rms)), codes);
      *norm = scale_to_f16(std::sqrt(energy) / std::sqrt(lane_tree(squares)), saturated);
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
