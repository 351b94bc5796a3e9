// Decode over tbq4 rows in int16: a code becomes a centroid in steps of 1 / kCentroidUnit, and products are
// summed in pairs in int32. The table is off the f32 one by 1.2e-4 (RMS, relative), the query by 3e-5 and the
// weights by 2e-5: decode stays within 1e-3 of attention over the decoded f32 values (tests/cpu measures it).
//
// A vector holds kLanes words of 32 bits, eight codes each. A shift by 4 s brings code s of every half word
// to the bottom, and one look-up turns all half words into centroids: no code is ever unpacked.
//
//   scores: kLanes rows are turned around, so that lanes are keys; a pair is (value 8j + s, value 8j + 4 + s)
//           of one key, and the query pair is the same in all lanes: no sums across lanes.
//   values: two rows are interleaved by half words; a pair is one value of two keys.

#if defined(ATTNSPAN_CPU_DECODE_TBQ4_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef ATTNSPAN_CPU_DECODE_TBQ4_INL_HPP
#undef ATTNSPAN_CPU_DECODE_TBQ4_INL_HPP
#else
#define ATTNSPAN_CPU_DECODE_TBQ4_INL_HPP
#endif

#include <algorithm>
#include <cmath>

#include "cpu/decode_rows-inl.hpp"
#include "kv/tbq4_constants.hpp"

HWY_BEFORE_NAMESPACE();
namespace attnspan::cpu {
namespace HWY_NAMESPACE {

#if HWY_TARGET != HWY_SCALAR

// The unit up to 2047 / 2.73 with the least weighted error: the eight positive centroids fall within 0.25 of
// an integer. 64 keys x weights of 14 bits x 1873 stay below 2^31.
inline constexpr float kCentroidUnit = 685.3908917F;
inline constexpr int16_t kCentroids16[16] = {-1873, -1418, -1109, -861, -646, -450, -266, -88,
                                             88,    266,   450,   646,  861,  1109, 1418, 1873};
inline constexpr float kLargestCentroid = 1873.0F;
inline constexpr float kLargestWeight = 16383.0F;

// Query rows that take a looked-up centroid together, at most: four sums each.
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_EMU128
inline constexpr size_t kMaxTbq4Rows = 2;
#else
inline constexpr size_t kMaxTbq4Rows = 4;
#endif

// Keys between two steps ahead: their rows are small.
inline constexpr size_t kTbq4KeysPerStep = 8;

// Words of a row that are scored between two changes of norm, at most: a block of 64 values.
inline constexpr size_t kUnitWords = std::min<size_t>(8, kLanes);

// The centroids of the codes s = 0..3 of every half word.
class Centroids {
 public:
#if HWY_TARGET == HWY_AVX3
  // A look-up of half words uses five bits of its index: the table stands twice, whatever the fifth bit is.
  HWY_INLINE Centroids() {
    const hn::Full256<int16_t> half;
    table_ = hn::Combine(I16(), hn::LoadU(half, kCentroids16), hn::LoadU(half, kCentroids16));
  }
  HWY_INLINE void look_up(VecU words, VecI16 (&c)[4]) const {
    c[0] = VecI16{_mm512_permutexvar_epi16(words.raw, table_.raw)};
    c[1] = VecI16{_mm512_permutexvar_epi16(_mm512_srli_epi16(words.raw, 4), table_.raw)};
    c[2] = VecI16{_mm512_permutexvar_epi16(_mm512_srli_epi16(words.raw, 8), table_.raw)};
    c[3] = VecI16{_mm512_permutexvar_epi16(_mm512_srli_epi16(words.raw, 12), table_.raw)};
  }

 private:
  VecI16 table_;
#else
  // Two byte look-ups: codes 0 and 2 of a half word lie in its two bytes, then codes 1 and 3.
  HWY_INLINE Centroids() {
    HWY_ALIGN uint8_t low[16], high[16];
    for (size_t i = 0; i < 16; ++i) {
      low[i] = static_cast<uint8_t>(kCentroids16[i] & 0xff);
      high[i] = static_cast<uint8_t>((kCentroids16[i] >> 8) & 0xff);
    }
    low_ = hn::LoadDup128(U8(), low);
    high_ = hn::LoadDup128(U8(), high);
  }
  HWY_INLINE void look_up(VecU words, VecI16 (&c)[4]) const {
    look_up_bytes(words, c[0], c[2]);
    look_up_bytes(hn::ShiftRight<4>(words), c[1], c[3]);
  }

 private:
  HWY_INLINE void look_up_bytes(VecU words, VecI16& even, VecI16& odd) const {
    const U8 d8;
    const U16 d16;
    const auto codes = hn::And(hn::BitCast(d8, words), hn::Set(d8, 15));
    const auto low = hn::TableLookupBytes(low_, codes), high = hn::TableLookupBytes(high_, codes);
    even = hn::BitCast(I16(), hn::OddEven(hn::BitCast(d8, hn::ShiftLeft<8>(hn::BitCast(d16, high))), low));
    odd = hn::BitCast(I16(), hn::OddEven(high, hn::BitCast(d8, hn::ShiftRight<8>(hn::BitCast(d16, low)))));
  }

  hn::Vec<U8> low_, high_;
#endif
};

// Words [from, from + kLanes) of a row of `words`; zeros beyond its end.
HWY_INLINE VecU load_words(const char* row, size_t from, size_t words) {
  const U32 d;
  const uint32_t* data = reinterpret_cast<const uint32_t*>(row) + from;
#if HWY_TARGET == HWY_AVX3
  if (from + kLanes > words) return hn::MaskedLoad(hn::FirstN(d, words - from), d, data);
#else
  (void)words;  // a row is whole vectors: blocks of 64 values are eight words
#endif
  return hn::LoadU(d, data);
}

// Query rows in int16: row r has its pairs[word][s] at pairs + r * stride and its units[block], what one step
// of the products is worth, at units + r * stride.
struct Tbq4Query {
  int32_t* pairs = nullptr;
  float* units = nullptr;
  size_t stride = 0;
  size_t words = 0;  // of a row
  size_t block_words = 0;
  size_t blocks = 0;
};

// rotated[words * 8] to pairs. The largest sum of products, |q|_1 * 1873, stays below 2^31: each rounding
// adds at most half a step to |q|_1.
HWY_INLINE void quantise_query(const float* rotated, const Tbq4Query& query) {
  const size_t block_values = query.block_words * 8;
  for (size_t block = 0; block < query.blocks; ++block) {
    const float* q = rotated + block * block_values;
    float largest = 0, sum = 0;
    for (size_t i = 0; i < block_values; ++i) {
      largest = std::max(largest, std::abs(q[i]));
      sum += std::abs(q[i]);
    }
    const float most = (2147483648.0F / kLargestCentroid - static_cast<float>(block_values)) * 0.999F;
    const float scale = largest > 0 ? std::min(32767.0F / largest, most / sum) : 0.0F;
    // Integers cannot say that a query is no number, so its unit does.
    query.units[block] = !std::isfinite(sum) ? sum - sum
                         : largest > 0       ? 1.0F / (scale * kCentroidUnit)
                                             : 0.0F;
    int32_t* pairs = query.pairs + block * query.block_words * 4;
    const auto rounded = [&](size_t i) { return static_cast<uint16_t>(std::lrintf(q[i] * scale)); };
    for (size_t word = 0; word < query.block_words; ++word) {
      for (size_t s = 0; s < 4; ++s) {
        const uint32_t low = rounded(8 * word + s), high = rounded(8 * word + 4 + s);
        pairs[4 * word + s] = static_cast<int32_t>(low | (high << 16));
      }
    }
  }
}

// Sums of a row are kept apart by s where few rows would leave the multiplier waiting for its own result.
template <size_t kRows>
inline constexpr size_t kChains = kRows == 1 ? 4 : 2;

// sum[row] += query . key over kUnitWords words; z[j] is word j of the keys.
template <bool kVnni, size_t kRows>
HWY_INLINE void score_unit_words(const Centroids& centroids, const VecU* z, const int32_t* pairs,
                                 size_t pairs_stride, PairSum (&sum)[kRows][kChains<kRows>]) {
#pragma GCC unroll 8
  for (size_t j = 0; j < kUnitWords; ++j) {
    VecI16 c[4];
    centroids.look_up(z[j], c);
#pragma GCC unroll 4
    for (size_t r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (size_t s = 0; s < 4; ++s) {
        const VecI16 q = broadcast_pair(pairs[r * pairs_stride + 4 * j + s]);
        add_pairs<kVnni>(c[s], q, sum[r][s % kChains<kRows>]);
      }
    }
  }
}

// scores[row][key] for the keys of a tile, to whole vectors of keys.
template <bool kVnni, size_t kRows>
HWY_NOINLINE void score_tbq4(const KeyTile& tile, RowsAhead ahead, const Tbq4Query& query,
                             float* HWY_RESTRICT scores) {
  const F32 d;
  const Centroids centroids;
  ahead.spread((tile.count + kLanes - 1) / kLanes);
  for (size_t first = 0; first < tile.count; first += kLanes) {
    ahead.step();
    VecF score[kRows];
    PairSum sum[kRows][kChains<kRows>];
    for (size_t r = 0; r < kRows; ++r) score[r] = hn::Zero(d);
    for (size_t from = 0; from < query.words; from += kLanes) {
      VecU z[kLanes];
#pragma GCC unroll 16
      for (size_t k = 0; k < kLanes; ++k) z[k] = load_words(tile.rows[first + k], from, query.words);
      transpose_square(z);
      for (size_t word = 0; word < kLanes && from + word < query.words; word += kUnitWords) {
        score_unit_words<kVnni, kRows>(centroids, z + word, query.pairs + (from + word) * 4, query.stride,
                                       sum);
        const size_t end = from + word + kUnitWords;
        if (end % query.block_words != 0) continue;
        const size_t block = end / query.block_words - 1;
        const VecF norm = hn::Load(d, tile.scales + block * kTileKeys + first);
        for (size_t r = 0; r < kRows; ++r) {
          VecI total = sum[r][0].total();
          for (size_t c = 1; c < kChains<kRows>; ++c) total = hn::Add(total, sum[r][c].total());
          const VecF unit = hn::Set(d, query.units[r * query.stride + block]);
          score[r] = hn::MulAdd(hn::ConvertTo(d, total), hn::Mul(unit, norm), score[r]);
          for (size_t c = 0; c < kChains<kRows>; ++c) sum[r][c] = PairSum();
        }
      }
    }
    for (size_t r = 0; r < kRows; ++r) hn::Store(score[r], d, scores + r * kTileKeys + first);
  }
}

// The weights p * norm of a tile in int16, by row and block, and what one step of them is worth.
struct Tbq4Weights {
  int16_t* weights = nullptr;  // [row][block][kTileKeys], 0 beyond the tile's count
  float* units = nullptr;      // [row][block]
  size_t words = 0;
  size_t block_words = 0;
  size_t blocks = 0;
};

// p[kTileKeys] of one row, 0 beyond the tile's count. The largest weight of the tile becomes 14 bits.
HWY_INLINE void quantise_weights(const KeyTile& tile, const float* HWY_RESTRICT p, const Tbq4Weights& weights,
                                 size_t row) {
  const F32 d;
  const hn::Rebind<int16_t, F32> d16;
  for (size_t block = 0; block < weights.blocks; ++block) {
    const float* norms = tile.scales + block * kTileKeys;
    VecF largest = hn::Zero(d);
    for (size_t key = 0; key < tile.count; key += kLanes) {
      largest = hn::Max(largest, hn::Mul(hn::Load(d, p + key), hn::Load(d, norms + key)));
    }
    const float most = hn::GetLane(hn::MaxOfLanes(d, largest));
    const VecF scale = hn::Set(d, most > 0 ? kLargestWeight / most : 0.0F);
    const size_t index = row * weights.blocks + block;
    weights.units[index] = most / (kLargestWeight * kCentroidUnit);
    int16_t* to = weights.weights + index * kTileKeys;
    for (size_t key = 0; key < tile.count; key += kLanes) {
      const VecF weight = hn::Mul(hn::Load(d, p + key), hn::Load(d, norms + key));
      hn::StoreU(hn::DemoteTo(d16, hn::NearestInt(hn::Mul(weight, scale))), d16, to + key);
    }
  }
}

// Pair (2 i, 2 i + 1) of a row's weights in all lanes; where a vector spans two blocks (AVX3 with blocks of
// 64), each half has its block's.
template <bool kTwoBlocks>
HWY_INLINE VecI16 broadcast_weights(const int16_t* weights, size_t key) {
  const auto pair = [&](const int16_t* from) HWY_ATTR {
    int32_t bits;
    std::memcpy(&bits, from + key, sizeof(bits));
    return broadcast_pair(bits);
  };
  if constexpr (kTwoBlocks) {
    return hn::ConcatUpperLower(I16(), pair(weights + kTileKeys), pair(weights));
  }
  return pair(weights);
}

// out[row][from word on, half] += weights . centroids. Sums of one half of a vector's words: see tbq4_lane.
template <bool kVnni, size_t kRows, bool kTwoBlocks>
HWY_INLINE void add_tbq4_half(const KeyTile& tile, RowsAhead& ahead, const Centroids& centroids,
                              const Tbq4Weights& weights, size_t row, size_t from, size_t half,
                              const float* factor, float* HWY_RESTRICT out, size_t out_stride) {
  const F32 d;
  const U32 du;
  const U16 d16;
  const size_t block = from / weights.block_words;
  const int16_t* pairs = weights.weights + (row * weights.blocks + block) * kTileKeys;
  const size_t pairs_stride = weights.blocks * kTileKeys;
  PairSum sum[kRows][4];
  for (size_t key = 0; key < tile.count; key += 2) {
    if (key % kTbq4KeysPerStep == 0) ahead.step();
    const auto a = hn::BitCast(d16, load_words(tile.rows[key], from, weights.words));
    const auto b = hn::BitCast(d16, load_words(tile.rows[key + 1], from, weights.words));
    const auto words = half == 0 ? hn::InterleaveLower(d16, a, b) : hn::InterleaveUpper(d16, a, b);
    VecI16 c[4];
    centroids.look_up(hn::BitCast(du, words), c);
#pragma GCC unroll 4
    for (size_t r = 0; r < kRows; ++r) {
      const VecI16 w = broadcast_weights<kTwoBlocks>(pairs + r * pairs_stride, key);
#pragma GCC unroll 4
      for (size_t s = 0; s < 4; ++s) add_pairs<kVnni>(c[s], w, sum[r][s]);
    }
  }
#pragma GCC unroll 4
  for (size_t r = 0; r < kRows; ++r) {
    const float* units = weights.units + (row + r) * weights.blocks + block;
    VecF unit = hn::Set(d, units[0]);
    if constexpr (kTwoBlocks) {
      unit = hn::ConcatUpperLower(d, hn::Set(d, block + 1 < weights.blocks ? units[1] : 0.0F), unit);
    }
    const VecF f = hn::Set(d, factor[r]);
    float* to = out + r * out_stride + from * 8 + half * 4 * kLanes;
#pragma GCC unroll 4
    for (size_t s = 0; s < 4; ++s) {
      const VecF before = hn::Mul(f, hn::Load(d, to + s * kLanes));
      hn::Store(hn::MulAdd(hn::ConvertTo(d, sum[r][s].total()), unit, before), d, to + s * kLanes);
    }
  }
}

// out[row] = factor[row] out[row] + sum_key p norm centroids, for the rows from `row` on. out is in the order
// of tbq4_lane and has room for whole vectors of words.
template <bool kVnni, size_t kRows>
HWY_NOINLINE void add_tbq4(const KeyTile& tile, RowsAhead ahead, const Tbq4Weights& weights, size_t row,
                           const float* factor, float* HWY_RESTRICT out, size_t out_stride) {
  const Centroids centroids;
  ahead.spread((weights.words + kLanes - 1) / kLanes * 2 *
               ((tile.count + kTbq4KeysPerStep - 1) / kTbq4KeysPerStep));
  for (size_t from = 0; from < weights.words; from += kLanes) {
    for (size_t half = 0; half < 2; ++half) {
      if (kLanes > weights.block_words) {
        add_tbq4_half<kVnni, kRows, true>(tile, ahead, centroids, weights, row, from, half, factor, out,
                                          out_stride);
      } else {
        add_tbq4_half<kVnni, kRows, false>(tile, ahead, centroids, weights, row, from, half, factor, out,
                                           out_stride);
      }
    }
  }
}

// Where value i of the rotated row lies in out: vectors of words, then halves of their blocks of 128 bits
// (interleaving works within those), then code s, then lanes.
HWY_INLINE size_t tbq4_lane(size_t i) {
  const size_t vector = i / (kLanes * 8), half_word = i / 4 % (kLanes * 2), s = i % 4;
  const size_t block = half_word / 8, half = half_word / 4 % 2;
  return vector * kLanes * 8 + (half * 4 + s) * kLanes + block * 4 + half_word % 4;
}

#endif  // not scalar

}  // namespace HWY_NAMESPACE
}  // namespace attnspan::cpu
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
