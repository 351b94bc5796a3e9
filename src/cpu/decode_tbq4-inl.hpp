// Decode over tbq4 rows in int16: a code becomes a centroid in steps of 1 / kCentroidUnit, and products are
// summed in pairs in int32. The table is off the f32 one by 1.2e-4 (RMS, relative), the query by 3e-5 and the
// weights by 2e-5: decode stays within 1e-3 of attention over the decoded f32 values (tests/cpu measures it).
//
// A vector holds kLanes words of 32 bits: four bytes, eight codes. Parity p is the low (0) or the high half
// (1) of every byte, and look_up<p> turns all codes of a parity into two vectors of centroids, c[0] and c[1].
// Which byte an int16 lane of c[i] comes from is the target's choice (class Centroids); pairs are two lanes
// in a row.
//
//   scores: kLanes rows are turned around, so that lanes are keys, and a pair is two values of one key.
//   values: two rows are interleaved, and a pair is one value of two keys.
//
// Instructions for 256 values (a key and its value), four query heads, AVX2: 64 multiplications of pairs, 64
// additions, 54 for centroids (5 for 32 codes, a shift for every other 32), 6 to turn rows around, 16 loads
// and 8 interleavings: 200 of which four start in a cycle, with 50 broadcasts on the load ports beside them.

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

// Query rows that take a looked-up centroid together, at most, and the parities that they take in one pass
// over the values: rows x parities x 2 sums. 16 of 32 registers; of 16 (and where a sum takes two
// registers) 8.
inline constexpr size_t kMaxTbq4Rows = 4;
template <size_t kRows>
inline constexpr size_t kParitiesAtOnce = HWY_TARGET == HWY_AVX3 || kRows <= 2 ? 2 : 1;

// Words of a row that are scored between two changes of norm, at most: a block of 64 values.
inline constexpr size_t kUnitWords = std::min<size_t>(8, kLanes);

#if HWY_TARGET == HWY_AVX3
// One look-up of half words: half word h of c[i] is byte 2 h + i, and both halves of a word are lanes of one
// pair.
class Centroids {
 public:
  // A look-up uses five bits of its index: the table stands twice, whatever the fifth bit is.
  HWY_INLINE Centroids() {
    const hn::Full256<int16_t> half;
    table_ = hn::Combine(I16(), hn::LoadU(half, kCentroids16), hn::LoadU(half, kCentroids16));
  }
  template <int kParity>
  HWY_INLINE void look_up(VecU words, VecI16 (&c)[2]) const {
    c[0] = VecI16{_mm512_permutexvar_epi16(hn::ShiftRight<4 * kParity>(words).raw, table_.raw)};
    c[1] = VecI16{_mm512_permutexvar_epi16(hn::ShiftRight<4 * kParity + 8>(words).raw, table_.raw)};
  }

  // Byte of a word whose value is element `half` of query pair i, and the vector of c[i]'s pairs.
  static constexpr size_t query_byte(size_t i, size_t half) { return 2 * half + i; }
  static HWY_INLINE VecI16 query(const int32_t* pairs, size_t i) { return broadcast_pair(pairs[i]); }
  static HWY_INLINE VecI key_sums(VecI first, VecI second) { return hn::Add(first, second); }
  static constexpr size_t key_of_lane(size_t lane) { return lane; }

  // Rows a and b so that codes of one value are neighbours, and where byte b of a block of 128 bits then
  // lies.
  template <int kHalf>
  static HWY_INLINE VecU interleaved(VecU a, VecU b) {
    const U16 d;
    const auto x = hn::BitCast(d, a), y = hn::BitCast(d, b);
    return hn::BitCast(U32(), kHalf == 0 ? hn::InterleaveLower(d, x, y) : hn::InterleaveUpper(d, x, y));
  }
  static constexpr size_t vector_of_byte(size_t byte) { return byte % 2; }
  static constexpr size_t lane_of_byte(size_t byte) { return byte / 2 % 4; }

 private:
  VecI16 table_;
};
#else
// Two look-ups of bytes, whose results are interleaved: bytes 0..7 of every block of 128 bits become c[0],
// bytes 8..15 c[1]. A word is two pairs in a row.
class Centroids {
 public:
  HWY_INLINE Centroids() {
    HWY_ALIGN uint8_t low[16], high[16];
    for (size_t i = 0; i < 16; ++i) {
      low[i] = static_cast<uint8_t>(kCentroids16[i] & 0xff);
      high[i] = static_cast<uint8_t>((kCentroids16[i] >> 8) & 0xff);
    }
    low_ = hn::LoadDup128(U8(), low);
    high_ = hn::LoadDup128(U8(), high);
  }
  template <int kParity>
  HWY_INLINE void look_up(VecU words, VecI16 (&c)[2]) const {
    const U8 d;
    const auto codes = hn::And(hn::BitCast(d, hn::ShiftRight<4 * kParity>(words)), hn::Set(d, 15));
    const auto low = hn::TableLookupBytes(low_, codes), high = hn::TableLookupBytes(high_, codes);
    c[0] = hn::BitCast(I16(), hn::InterleaveLower(d, low, high));
    c[1] = hn::BitCast(I16(), hn::InterleaveUpper(d, low, high));
  }

  // Both pairs of a word meet both vectors: c[0] has the words of the first two keys of a block, c[1] the
  // others.
  static constexpr size_t query_byte(size_t i, size_t half) { return 2 * i + half; }
  static HWY_INLINE VecI16 query(const int32_t* pairs, size_t) {
    int64_t both;
    std::memcpy(&both, pairs, sizeof(both));
    return hn::BitCast(I16(), hn::Set(hn::Repartition<int64_t, F32>(), both));
  }
  // Sums of the first and the second pair of four keys: interleaving leaves keys 1 and 2 exchanged, so lanes
  // are filled in that order.
  static HWY_INLINE VecI key_sums(VecI first, VecI second) {
    const I32 d;
    const U64 u;
    const auto even = hn::BitCast(u, hn::InterleaveLower(d, first, second));
    const auto odd = hn::BitCast(u, hn::InterleaveUpper(d, first, second));
    return hn::Add(hn::BitCast(d, hn::InterleaveLower(u, even, odd)),
                   hn::BitCast(d, hn::InterleaveUpper(u, even, odd)));
  }
  static constexpr size_t key_of_lane(size_t lane) {
    return lane / 4 * 4 + (lane % 4 == 1 ? 2 : lane % 4 == 2 ? 1 : lane % 4);
  }

  template <int kHalf>
  static HWY_INLINE VecU interleaved(VecU a, VecU b) {
    const U8 d;
    const auto x = hn::BitCast(d, a), y = hn::BitCast(d, b);
    return hn::BitCast(U32(), kHalf == 0 ? hn::InterleaveLower(d, x, y) : hn::InterleaveUpper(d, x, y));
  }
  static constexpr size_t vector_of_byte(size_t byte) { return byte / 4 % 2; }
  static constexpr size_t lane_of_byte(size_t byte) { return byte % 4; }

 private:
  hn::Vec<U8> low_, high_;
};
#endif

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

// Query rows in int16: row r has its pairs[word][parity][2] at pairs + r * stride and its units[block], what
// one step of the products is worth, at units + r * stride.
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
      for (size_t i = 0; i < 4; ++i) {
        const size_t parity = i / 2;
        const auto value = [&](size_t half) {
          return 8 * word + 2 * Centroids::query_byte(i % 2, half) + parity;
        };
        const uint32_t low = rounded(value(0)), high = rounded(value(1));
        pairs[4 * word + i] = static_cast<int32_t>(low | (high << 16));
      }
    }
  }
}

// The two sums of a row, once for each parity where one row alone would leave the multiplier waiting for its
// own result.
template <size_t kRows>
inline constexpr size_t kChains = kRows == 1 ? 2 : 1;

// sum[row][chain][i] += query . key for the codes of one parity of a word of the keys.
template <bool kVnni, int kParity, size_t kRows>
HWY_INLINE void score_word(const Centroids& centroids, VecU word, const int32_t* pairs, size_t pairs_stride,
                           PairSum (&sum)[kRows][kChains<kRows>][2]) {
  VecI16 c[2];
  centroids.look_up<kParity>(word, c);
#pragma GCC unroll 4
  for (size_t r = 0; r < kRows; ++r) {
    PairSum(&to)[2] = sum[r][kParity % kChains<kRows>];
    for (size_t i = 0; i < 2; ++i) {
      add_pairs<kVnni>(c[i], Centroids::query(pairs + r * pairs_stride + 2 * kParity, i), to[i]);
    }
  }
}

// sum += query . key over kUnitWords words; z[j] is word j of the keys.
template <bool kVnni, size_t kRows>
HWY_INLINE void score_unit_words(const Centroids& centroids, const VecU* z, const int32_t* pairs,
                                 size_t pairs_stride, PairSum (&sum)[kRows][kChains<kRows>][2]) {
#pragma GCC unroll 8
  for (size_t j = 0; j < kUnitWords; ++j) {
    score_word<kVnni, 0, kRows>(centroids, z[j], pairs + 4 * j, pairs_stride, sum);
    score_word<kVnni, 1, kRows>(centroids, z[j], pairs + 4 * j, pairs_stride, sum);
  }
}

// What a row's sums come to, by key; they start anew.
template <size_t kChainsOfRow>
HWY_INLINE VecI take_key_sums(PairSum (&sum)[kChainsOfRow][2]) {
  VecI total[2];
  for (size_t i = 0; i < 2; ++i) {
    total[i] = sum[0][i].total();
    for (size_t c = 1; c < kChainsOfRow; ++c) total[i] = hn::Add(total[i], sum[c][i].total());
    for (size_t c = 0; c < kChainsOfRow; ++c) sum[c][i] = PairSum();
  }
  return Centroids::key_sums(total[0], total[1]);
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
    PairSum sum[kRows][kChains<kRows>][2];
    for (size_t r = 0; r < kRows; ++r) score[r] = hn::Zero(d);
    for (size_t from = 0; from < query.words; from += kLanes) {
      VecU z[kLanes];
#pragma GCC unroll 16
      for (size_t k = 0; k < kLanes; ++k) {
        z[k] = load_words(tile.rows[first + Centroids::key_of_lane(k)], from, query.words);
      }
      transpose_square(z);
      for (size_t word = 0; word < kLanes && from + word < query.words; word += kUnitWords) {
        score_unit_words<kVnni, kRows>(centroids, z + word, query.pairs + (from + word) * 4, query.stride,
                                       sum);
        const size_t end = from + word + kUnitWords;
        if (end % query.block_words != 0) continue;
        const size_t block = end / query.block_words - 1;
        const VecF norm = hn::Load(d, tile.scales + block * kTileKeys + first);
        for (size_t r = 0; r < kRows; ++r) {
          const VecF products = hn::ConvertTo(d, take_key_sums(sum[r]));
          const VecF unit = hn::Set(d, query.units[r * query.stride + block]);
          score[r] = hn::MulAdd(products, hn::Mul(unit, norm), score[r]);
        }
      }
    }
    for (size_t r = 0; r < kRows; ++r) hn::Store(score[r], d, scores + r * kTileKeys + first);
  }
}

// The weights p * norm of a tile in int16, by block and row, and what one step of them is worth.
struct Tbq4Weights {
  int16_t* weights = nullptr;  // [block][row][kTileKeys], 0 beyond the tile's count
  float* units = nullptr;      // [row][block]
  size_t rows = 0;
  size_t words = 0;
  size_t block_words = 0;
  size_t blocks = 0;

  int16_t* at(size_t row, size_t block) const { return weights + (block * rows + row) * kTileKeys; }
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
    weights.units[row * weights.blocks + block] = most / (kLargestWeight * kCentroidUnit);
    int16_t* to = weights.at(row, block);
    for (size_t key = 0; key < tile.count; key += kLanes) {
      const VecF weight = hn::Mul(hn::Load(d, p + key), hn::Load(d, norms + key));
      hn::StoreU(hn::DemoteTo(d16, hn::NearestInt(hn::Mul(weight, scale))), d16, to + key);
    }
  }
}

// A pair of a row's weights in all lanes; where a vector spans two blocks (AVX3 with blocks of 64), each half
// has its block's.
template <bool kTwoBlocks>
HWY_INLINE VecI16 broadcast_weights(const int16_t* weights, [[maybe_unused]] size_t block_stride) {
  const auto pair = [&](const int16_t* from) HWY_ATTR {
    int32_t bits;
    std::memcpy(&bits, from, sizeof(bits));
    return broadcast_pair(bits);
  };
  if constexpr (kTwoBlocks) {
    return hn::ConcatUpperLower(I16(), pair(weights + block_stride), pair(weights));
  }
  return pair(weights);
}

// What a pass over the values of a tile takes: vectors of words from `from` on, one half of them (as rows are
// interleaved), and the parities from kParity on.
template <size_t kRowsOfPass, bool kTwo, int kHalfOfWords, int kFirstParity>
struct ValuePass {
  static constexpr size_t kRows = kRowsOfPass;
  static constexpr bool kTwoBlocks = kTwo;
  static constexpr int kHalf = kHalfOfWords, kParity = kFirstParity;
  static constexpr size_t kParities = kParitiesAtOnce<kRows>;
};

// sum[row][i] += weights . centroids for the codes of one parity of two keys.
template <bool kVnni, int kParity, bool kTwoBlocks, size_t kRows>
HWY_INLINE void add_parity(const Centroids& centroids, VecU words, const int16_t* weights,
                           size_t block_stride, PairSum (&sum)[kRows][2]) {
  VecI16 c[2];
  centroids.look_up<kParity>(words, c);
#pragma GCC unroll 4
  for (size_t r = 0; r < kRows; ++r) {
    const VecI16 w = broadcast_weights<kTwoBlocks>(weights + r * kTileKeys, block_stride);
    for (size_t i = 0; i < 2; ++i) add_pairs<kVnni>(c[i], w, sum[r][i]);
  }
}

// out[row] = factor[row] out[row] + weights . centroids. See tbq4_lane for the order of out.
template <bool kVnni, typename Pass>
HWY_INLINE void add_tbq4_pass(const KeyTile& tile, RowsAhead& ahead, const Centroids& centroids,
                              const Tbq4Weights& weights, size_t row, size_t from, const float* factor,
                              float* HWY_RESTRICT out, size_t out_stride) {
  constexpr size_t kRows = Pass::kRows;
  const F32 d;
  const size_t block = from / weights.block_words, block_stride = weights.rows * kTileKeys;
  const int16_t* pairs = weights.at(row, block);
  PairSum sum[Pass::kParities][kRows][2];
  for (size_t first = 0; first < tile.count; first += kLanes) {
    ahead.step();
#pragma GCC unroll 8
    for (size_t key = first; key < first + kLanes; key += 2) {
      const VecU words =
          Centroids::interleaved<Pass::kHalf>(load_words(tile.rows[key], from, weights.words),
                                              load_words(tile.rows[key + 1], from, weights.words));
      add_parity<kVnni, Pass::kParity, Pass::kTwoBlocks>(centroids, words, pairs + key, block_stride, sum[0]);
      if constexpr (Pass::kParities == 2) {
        add_parity<kVnni, 1, Pass::kTwoBlocks>(centroids, words, pairs + key, block_stride, sum[1]);
      }
    }
  }
#pragma GCC unroll 4
  for (size_t r = 0; r < kRows; ++r) {
    const float* units = weights.units + (row + r) * weights.blocks + block;
    VecF unit = hn::Set(d, units[0]);
    if constexpr (Pass::kTwoBlocks) {
      unit = hn::ConcatUpperLower(d, hn::Set(d, block + 1 < weights.blocks ? units[1] : 0.0F), unit);
    }
    const VecF f = hn::Set(d, factor[r]);
    float* to = out + r * out_stride + from * 8 + (Pass::kHalf * 4 + Pass::kParity * 2) * kLanes;
#pragma GCC unroll 4
    for (size_t s = 0; s < 2 * Pass::kParities; ++s) {
      const VecF before = hn::Mul(f, hn::Load(d, to + s * kLanes));
      const VecF products = hn::ConvertTo(d, sum[s / 2][r][s % 2].total());
      hn::Store(hn::MulAdd(products, unit, before), d, to + s * kLanes);
    }
  }
}

// out[row] = factor[row] out[row] + sum_key p norm centroids, for the rows from `row` on. out is in the order
// of tbq4_lane and has room for whole vectors of words.
template <bool kVnni, size_t kRows, bool kTwoBlocks>
HWY_INLINE void add_tbq4_passes(const KeyTile& tile, RowsAhead ahead, const Tbq4Weights& weights, size_t row,
                                const float* factor, float* HWY_RESTRICT out, size_t out_stride) {
  const Centroids centroids;
  constexpr size_t kPasses = 2 * (2 / kParitiesAtOnce<kRows>);
  ahead.spread((weights.words + kLanes - 1) / kLanes * kPasses * ((tile.count + kLanes - 1) / kLanes));
  const auto pass = [&]<int kHalf, int kParity>(size_t from) HWY_ATTR {
    add_tbq4_pass<kVnni, ValuePass<kRows, kTwoBlocks, kHalf, kParity>>(tile, ahead, centroids, weights, row,
                                                                       from, factor, out, out_stride);
  };
  for (size_t from = 0; from < weights.words; from += kLanes) {
    pass.template operator()<0, 0>(from);
    if constexpr (kParitiesAtOnce<kRows> == 1) pass.template operator()<0, 1>(from);
    pass.template operator()<1, 0>(from);
    if constexpr (kParitiesAtOnce<kRows> == 1) pass.template operator()<1, 1>(from);
  }
}

template <bool kVnni, size_t kRows>
HWY_NOINLINE void add_tbq4(const KeyTile& tile, RowsAhead ahead, const Tbq4Weights& weights, size_t row,
                           const float* factor, float* HWY_RESTRICT out, size_t out_stride) {
  if constexpr (kLanes > 8) {  // wider than the smaller block
    if (kLanes > weights.block_words) {
      return add_tbq4_passes<kVnni, kRows, true>(tile, ahead, weights, row, factor, out, out_stride);
    }
  }
  add_tbq4_passes<kVnni, kRows, false>(tile, ahead, weights, row, factor, out, out_stride);
}

// Where value i of the rotated row lies in out: vectors of words, then halves of their blocks of 128 bits
// (interleaving works within those), then parities and their two vectors, then lanes.
HWY_INLINE size_t tbq4_lane(size_t i) {
  const size_t vector = i / (kLanes * 8), parity = i % 2, byte = i / 2 % 16, block = i / 32 % (kLanes / 4);
  const size_t s = byte / 8 * 4 + parity * 2 + Centroids::vector_of_byte(byte);
  return vector * kLanes * 8 + s * kLanes + block * 4 + Centroids::lane_of_byte(byte);
}

#endif  // not scalar

}  // namespace HWY_NAMESPACE
}  // namespace attnspan::cpu
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
