// Decode over rows of f32, f16, bf16 and q8: values become f32 in registers as they are loaded.
//   scores[row][key] = query[row] . key          keys in fours, one register sum for each (row, key)
//   out[row] = factor[row] out[row] + sum_key p[row][key] value[key]

#if defined(ATTNSPAN_CPU_DECODE_ROWS_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef ATTNSPAN_CPU_DECODE_ROWS_INL_HPP
#undef ATTNSPAN_CPU_DECODE_ROWS_INL_HPP
#else
#define ATTNSPAN_CPU_DECODE_ROWS_INL_HPP
#endif

#include <algorithm>
#include <bit>
#include <cstring>

#include "cpu/decode_vectors-inl.hpp"
#include "cpu/key_tile.hpp"

HWY_BEFORE_NAMESPACE();
namespace attnspan::cpu {
namespace HWY_NAMESPACE {

#if HWY_TARGET != HWY_SCALAR

// Query rows that take a loaded value together, at most, and the sums that they keep in registers:
//   scores: rows x keys sums; up to kFewRows rows meet four keys at a time, more rows two
//   values: rows x vectors sums
// and beside them the smaller side of the two, with one vector of the larger side at a time. Every f16 is
// converted once for up to kMaxRows rows: 7 query heads of a KV head take one pass (32 registers) or two.
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_EMU128
inline constexpr size_t kMaxRows = 6, kFewRows = 3, kValueSums = 12;  // 12 + 3 + 1 of 16 registers
#else
inline constexpr size_t kMaxRows = 8, kFewRows = 4, kValueSums = 16;  // 16 + 4 + 1 of 32 registers
#endif

// Loaded once and kept: the compiler would rather load a value again for every multiply-add that takes it,
// and loads would bind (10 for 8 multiply-adds of four rows and two keys, where 6 are needed).
HWY_INLINE VecF in_register(VecF v) {
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3
  asm("" : "+v"(v.raw));
#endif
  return v;
}

// The first n elements of `from`, n < a vector's worth, and zeros: for rows whose end may be the end of
// memory.
template <typename D>
HWY_INLINE hn::Vec<D> load_first(D d, const hn::TFromD<D>* from, size_t n) {
#if HWY_TARGET == HWY_AVX3
  return hn::MaskedLoad(hn::FirstN(d, n), d, from);
#else
  HWY_ALIGN hn::TFromD<D> copy[kLanes] = {};
  std::memcpy(copy, from, n * sizeof(hn::TFromD<D>));
  return hn::Load(d, copy);
#endif
}

// Row `key` of a tile: whole vectors, and the last n values of a row that ends within a vector.
template <KvFormat kFormat>
class RowReader;

template <>
class RowReader<KvFormat::f32> {
 public:
  HWY_INLINE RowReader(const KeyTile& tile, size_t key)
      : row_(reinterpret_cast<const float*>(tile.rows[key])) {}
  HWY_INLINE VecF at(size_t i) const { return hn::LoadU(F32(), row_ + i); }
  HWY_INLINE VecF tail(size_t i, size_t n) const { return load_first(F32(), row_ + i, n); }

 private:
  const float* row_;
};

template <>
class RowReader<KvFormat::f16> {
 public:
  HWY_INLINE RowReader(const KeyTile& tile, size_t key)
      : row_(reinterpret_cast<const uint16_t*>(tile.rows[key])) {}
  HWY_INLINE VecF at(size_t i) const { return load_f16_vector(row_ + i); }
  HWY_INLINE VecF tail(size_t i, size_t n) const {
    const hn::Rebind<uint16_t, F32> d16;
    const hn::Rebind<hwy::float16_t, F32> dh;
    return hn::PromoteTo(F32(), hn::BitCast(dh, load_first(d16, row_ + i, n)));
  }

 private:
  const uint16_t* row_;
};

template <>
class RowReader<KvFormat::bf16> {
 public:
  HWY_INLINE RowReader(const KeyTile& tile, size_t key)
      : row_(reinterpret_cast<const uint16_t*>(tile.rows[key])) {}
  HWY_INLINE VecF at(size_t i) const { return load_bf16_vector(row_ + i); }
  HWY_INLINE VecF tail(size_t i, size_t n) const {
    const hn::Rebind<uint16_t, F32> d16;
    return hn::BitCast(F32(), hn::ShiftLeft<16>(hn::PromoteTo(U32(), load_first(d16, row_ + i, n))));
  }

 private:
  const uint16_t* row_;
};

// Blocks of 32 codes with one scale: a vector never spans two, and the last block is stored whole.
template <>
class RowReader<KvFormat::q8> {
 public:
  HWY_INLINE RowReader(const KeyTile& tile, size_t key)
      : row_(reinterpret_cast<const int8_t*>(tile.rows[key])), scales_(tile.scales + key) {}
  HWY_INLINE VecF at(size_t i) const {
    const hn::Rebind<int8_t, F32> d8;
    const VecF code = hn::ConvertTo(F32(), hn::PromoteTo(I32(), hn::LoadU(d8, row_ + i)));
    return hn::Mul(hn::Set(F32(), scales_[i / 32 * kTileKeys]), code);
  }
  HWY_INLINE VecF tail(size_t i, size_t) const { return at(i); }

 private:
  const int8_t* row_;
  const float* scales_;
};

// sum[row][first_sum + k] = query[row] . key[first + k] for kKeys keys, to be summed over lanes.
template <KvFormat kFormat, size_t kRows, size_t kKeys>
HWY_INLINE void multiply_keys(const KeyTile& tile, size_t first, size_t dim, const float* HWY_RESTRICT query,
                              size_t query_stride, VecF (&sum)[kRows][4], size_t first_sum) {
  const F32 d;
  using Reader = RowReader<kFormat>;
  const Reader key[4] = {
      {tile, first}, {tile, first + 1}, {tile, first + kKeys / 2}, {tile, first + kKeys - 1}};
  VecF s[kRows][kKeys];
#pragma GCC unroll 8
  for (size_t r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (size_t k = 0; k < kKeys; ++k) s[r][k] = hn::Zero(d);
  }
  const auto add = [&](size_t i, const auto& value_of) HWY_ATTR {
    if constexpr (kRows < kKeys) {  // all queries, one key at a time
      VecF q[kRows];
#pragma GCC unroll 8
      for (size_t r = 0; r < kRows; ++r) q[r] = in_register(hn::Load(d, query + r * query_stride + i));
#pragma GCC unroll 4
      for (size_t k = 0; k < kKeys; ++k) {
        const VecF value = in_register(value_of(key[k]));
#pragma GCC unroll 8
        for (size_t r = 0; r < kRows; ++r) s[r][k] = hn::MulAdd(q[r], value, s[r][k]);
      }
    } else {  // all keys, one query at a time
      VecF value[kKeys];
#pragma GCC unroll 4
      for (size_t k = 0; k < kKeys; ++k) value[k] = in_register(value_of(key[k]));
#pragma GCC unroll 8
      for (size_t r = 0; r < kRows; ++r) {
        const VecF q = in_register(hn::Load(d, query + r * query_stride + i));
#pragma GCC unroll 4
        for (size_t k = 0; k < kKeys; ++k) s[r][k] = hn::MulAdd(q, value[k], s[r][k]);
      }
    }
  };
  size_t i = 0;
  for (; i + kLanes <= dim; i += kLanes) add(i, [&](const Reader& row) HWY_ATTR { return row.at(i); });
  if (const size_t n = dim - i; n > 0) {
    add(i, [&](const Reader& row) HWY_ATTR { return row.tail(i, n); });
  }
#pragma GCC unroll 8
  for (size_t r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (size_t k = 0; k < kKeys; ++k) sum[r][first_sum + k] = s[r][k];
  }
}

// scores[row][key] for the keys of a tile, to whole vectors of keys. Queries are zero from dim to a whole
// vector.
template <KvFormat kFormat, size_t kRows>
HWY_NOINLINE void score_rows(const KeyTile& tile, RowsAhead ahead, size_t dim, const float* query,
                             size_t query_stride, float* HWY_RESTRICT scores) {
  constexpr size_t kKeys = kRows <= kFewRows ? 4 : 2;
  ahead.spread((tile.count + kKeys - 1) / kKeys);
  for (size_t first = 0; first < tile.count; first += kLanes) {
    VecF parts[kRows][kBlocks];
    for (size_t part = 0; part < kBlocks; ++part) {
      VecF sum[kRows][4];
#pragma GCC unroll 2
      for (size_t k = 0; k < 4; k += kKeys) {
        ahead.step();
        multiply_keys<kFormat, kRows, kKeys>(tile, first + 4 * part + k, dim, query, query_stride, sum, k);
      }
#pragma GCC unroll 8
      for (size_t r = 0; r < kRows; ++r) {
        parts[r][part] = sum_in_blocks(sum[r][0], sum[r][1], sum[r][2], sum[r][3]);
      }
    }
    for (size_t r = 0; r < kRows; ++r) {
      hn::Store(sum_across_blocks(parts[r]), F32(), scores + r * kTileKeys + first);
    }
  }
}

// sum[row][v] += p[row][key] * (vector v of the key's values): kVectors whole ones from i on, or one whose
// values end after n lanes.
template <KvFormat kFormat, size_t kRows, size_t kVectors, bool kTail>
HWY_INLINE void add_value(const KeyTile& tile, size_t key, size_t i, size_t n, const float* HWY_RESTRICT p,
                          VecF (&sum)[kRows][kVectors]) {
  const RowReader<kFormat> row(tile, key);
  const auto value_of = [&](size_t v) HWY_ATTR { return kTail ? row.tail(i, n) : row.at(i + v * kLanes); };
  const auto weight_of = [&](size_t r) HWY_ATTR { return hn::Set(F32(), p[r * kTileKeys + key]); };
  if constexpr (kRows < kVectors) {  // all rows, one vector of values at a time
    VecF weight[kRows];
#pragma GCC unroll 8
    for (size_t r = 0; r < kRows; ++r) weight[r] = weight_of(r);
#pragma GCC unroll 8
    for (size_t v = 0; v < kVectors; ++v) {
      const VecF value = in_register(value_of(v));
#pragma GCC unroll 8
      for (size_t r = 0; r < kRows; ++r) sum[r][v] = hn::MulAdd(weight[r], value, sum[r][v]);
    }
  } else {  // all values, one row at a time
    VecF value[kVectors];
#pragma GCC unroll 8
    for (size_t v = 0; v < kVectors; ++v) value[v] = in_register(value_of(v));
#pragma GCC unroll 8
    for (size_t r = 0; r < kRows; ++r) {
      const VecF weight = weight_of(r);
#pragma GCC unroll 8
      for (size_t v = 0; v < kVectors; ++v) sum[r][v] = hn::MulAdd(weight, value[v], sum[r][v]);
    }
  }
}

// Keys between two steps ahead.
inline constexpr size_t kKeysPerStep = 4;

// The vectors of out from i on, over all keys.
template <KvFormat kFormat, size_t kRows, size_t kVectors, bool kTail>
HWY_INLINE void add_values_at(const KeyTile& tile, RowsAhead& ahead, size_t i, size_t n,
                              const float* HWY_RESTRICT p, const float* HWY_RESTRICT factor,
                              float* HWY_RESTRICT out, size_t out_stride) {
  const F32 d;
  VecF sum[kRows][kVectors];
#pragma GCC unroll 8
  for (size_t r = 0; r < kRows; ++r) {
    const VecF f = hn::Set(d, factor[r]);
#pragma GCC unroll 8
    for (size_t v = 0; v < kVectors; ++v) {
      sum[r][v] = hn::Mul(f, hn::Load(d, out + r * out_stride + i + v * kLanes));
    }
  }
  size_t key = 0;
  for (; key + kKeysPerStep <= tile.count; key += kKeysPerStep) {
    ahead.step();
#pragma GCC unroll 4
    for (size_t k = 0; k < kKeysPerStep; ++k) {
      add_value<kFormat, kRows, kVectors, kTail>(tile, key + k, i, n, p, sum);
    }
  }
  for (; key < tile.count; ++key) add_value<kFormat, kRows, kVectors, kTail>(tile, key, i, n, p, sum);
#pragma GCC unroll 8
  for (size_t r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (size_t v = 0; v < kVectors; ++v) hn::Store(sum[r][v], d, out + r * out_stride + i + v * kLanes);
  }
}

// All whole vectors from i on, kVectors at a time and then fewer. Returns where they end.
template <KvFormat kFormat, size_t kRows, size_t kVectors>
HWY_INLINE size_t add_whole_values(const KeyTile& tile, RowsAhead& ahead, size_t i, size_t dim,
                                   const float* p, const float* factor, float* out, size_t out_stride) {
  for (; i + kVectors * kLanes <= dim; i += kVectors * kLanes) {
    add_values_at<kFormat, kRows, kVectors, false>(tile, ahead, i, 0, p, factor, out, out_stride);
  }
  if constexpr (kVectors > 1) {
    i = add_whole_values<kFormat, kRows, kVectors / 2>(tile, ahead, i, dim, p, factor, out, out_stride);
  }
  return i;
}

// out has room for whole vectors.
template <KvFormat kFormat, size_t kRows>
HWY_NOINLINE void add_values(const KeyTile& tile, RowsAhead ahead, size_t dim, const float* p,
                             const float* factor, float* out, size_t out_stride) {
  constexpr size_t kVectors = std::min<size_t>(8, std::bit_floor(kValueSums / kRows));
  ahead.spread(dim / (kVectors * kLanes) * (tile.count / kKeysPerStep));
  const size_t i =
      add_whole_values<kFormat, kRows, kVectors>(tile, ahead, 0, dim, p, factor, out, out_stride);
  if (i < dim) add_values_at<kFormat, kRows, 1, true>(tile, ahead, i, dim - i, p, factor, out, out_stride);
}

#endif  // not scalar

}  // namespace HWY_NAMESPACE
}  // namespace attnspan::cpu
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
