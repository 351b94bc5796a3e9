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

// Query rows that share a value in registers. Scores: 4 keys x rows sums + 4 keys + 1 query; values: vectors
// x rows sums + vectors + 1 weight. With 16 registers 2 rows fit, with 32 registers 4.
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_EMU128
inline constexpr size_t kMaxRows = 2;
inline constexpr size_t kValueSums = 8;
#else
inline constexpr size_t kMaxRows = 4;
inline constexpr size_t kValueSums = 16;
#endif

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

// Keys [first, first + 4) against kRows queries: {q . key 0, .. 1, .. 2, .. 3} in parts, one part a block.
template <KvFormat kFormat, size_t kRows>
HWY_INLINE void score_four(const KeyTile& tile, size_t first, size_t dim, const float* HWY_RESTRICT query,
                           size_t query_stride, VecF (&parts)[kRows][kBlocks], size_t part) {
  const F32 d;
  const RowReader<kFormat> key[4] = {{tile, first}, {tile, first + 1}, {tile, first + 2}, {tile, first + 3}};
  VecF sum[kRows][4];
#pragma GCC unroll 4
  for (size_t r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (size_t k = 0; k < 4; ++k) sum[r][k] = hn::Zero(d);
  }
  const auto add = [&](size_t i, VecF k0, VecF k1, VecF k2, VecF k3) HWY_ATTR {
#pragma GCC unroll 4
    for (size_t r = 0; r < kRows; ++r) {
      const VecF q = hn::Load(d, query + r * query_stride + i);
      sum[r][0] = hn::MulAdd(q, k0, sum[r][0]);
      sum[r][1] = hn::MulAdd(q, k1, sum[r][1]);
      sum[r][2] = hn::MulAdd(q, k2, sum[r][2]);
      sum[r][3] = hn::MulAdd(q, k3, sum[r][3]);
    }
  };
  size_t i = 0;
  for (; i + kLanes <= dim; i += kLanes) add(i, key[0].at(i), key[1].at(i), key[2].at(i), key[3].at(i));
  if (const size_t n = dim - i; n > 0) {
    add(i, key[0].tail(i, n), key[1].tail(i, n), key[2].tail(i, n), key[3].tail(i, n));
  }
#pragma GCC unroll 4
  for (size_t r = 0; r < kRows; ++r) {
    parts[r][part] = sum_in_blocks(sum[r][0], sum[r][1], sum[r][2], sum[r][3]);
  }
}

// scores[row][key] for the keys of a tile, to whole vectors of keys. Queries are zero from dim to a whole
// vector.
template <KvFormat kFormat, size_t kRows>
HWY_NOINLINE void score_rows(const KeyTile& tile, RowsAhead ahead, size_t dim, const float* query,
                             size_t query_stride, float* HWY_RESTRICT scores) {
  for (size_t first = 0; first < tile.count; first += kLanes) {
    VecF parts[kRows][kBlocks];
    for (size_t part = 0; part < kBlocks; ++part) {
      ahead.fetch(first + 4 * part, 4);
      score_four<kFormat, kRows>(tile, first + 4 * part, dim, query, query_stride, parts, part);
    }
    for (size_t r = 0; r < kRows; ++r) {
      hn::Store(sum_across_blocks(parts[r]), F32(), scores + r * kTileKeys + first);
    }
  }
}

// The vectors of out from i on: kVectors whole ones, or one whose values end after n lanes.
template <KvFormat kFormat, size_t kRows, size_t kVectors, bool kTail>
HWY_INLINE void add_values_at(const KeyTile& tile, RowsAhead ahead, size_t i, size_t n,
                              const float* HWY_RESTRICT p, const float* HWY_RESTRICT factor,
                              float* HWY_RESTRICT out, size_t out_stride) {
  const F32 d;
  VecF sum[kRows][kVectors];
#pragma GCC unroll 4
  for (size_t r = 0; r < kRows; ++r) {
    const VecF f = hn::Set(d, factor[r]);
#pragma GCC unroll 8
    for (size_t v = 0; v < kVectors; ++v) {
      sum[r][v] = hn::Mul(f, hn::Load(d, out + r * out_stride + i + v * kLanes));
    }
  }
  for (size_t key = 0; key < tile.count; ++key) {
    ahead.fetch(key, 1);
    const RowReader<kFormat> row(tile, key);
    VecF value[kVectors];
#pragma GCC unroll 8
    for (size_t v = 0; v < kVectors; ++v) value[v] = kTail ? row.tail(i, n) : row.at(i + v * kLanes);
#pragma GCC unroll 4
    for (size_t r = 0; r < kRows; ++r) {
      const VecF weight = hn::Set(d, p[r * kTileKeys + key]);
#pragma GCC unroll 8
      for (size_t v = 0; v < kVectors; ++v) sum[r][v] = hn::MulAdd(weight, value[v], sum[r][v]);
    }
  }
#pragma GCC unroll 4
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
    ahead = RowsAhead();  // fetched by now
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
  const size_t i =
      add_whole_values<kFormat, kRows, kVectors>(tile, ahead, 0, dim, p, factor, out, out_stride);
  if (i < dim) add_values_at<kFormat, kRows, 1, true>(tile, ahead, i, dim - i, p, factor, out, out_stride);
}

#endif  // not scalar

}  // namespace HWY_NAMESPACE
}  // namespace attnspan::cpu
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
