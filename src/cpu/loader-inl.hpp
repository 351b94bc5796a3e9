// Loads a tile of keys or values as f32 rows, whatever their format: decoded once per tile, then used by
// every query row and every head of the group. A new format is one more case here.

#if defined(ATTNSPAN_CPU_LOADER_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef ATTNSPAN_CPU_LOADER_INL_HPP
#undef ATTNSPAN_CPU_LOADER_INL_HPP
#else
#define ATTNSPAN_CPU_LOADER_INL_HPP
#endif

#include <cstring>

#include "cpu/kv_source.hpp"
#include "cpu/simd-inl.hpp"
#include "kv/tbq4_constants.hpp"

HWY_BEFORE_NAMESPACE();
namespace attnspan::cpu {
namespace HWY_NAMESPACE {

// A row of a tile: `dim` floats and then a cache line, so that the rows of a power-of-two dim do not all fall
// into the same few sets of the first cache when a column is read.
constexpr size_t tile_row(size_t dim) { return (dim + 15) / 16 * 16 + 16; }

// q8: 32 codes and one scale a block. Writes whole blocks: the padding of a row of a tile has room for the
// last.
HWY_INLINE void decode_q8(const uint8_t* codes, const uint16_t* scales, size_t dim, float* HWY_RESTRICT to) {
  const F32 d;
  const hn::Rebind<int8_t, F32> di8;
  constexpr size_t kBlock = 32;
  for (size_t i = 0; i < dim; i += kBlock) {
    const VecF scale = hn::Set(d, f32_from_f16(scales[i / kBlock]));
    for (size_t lane = 0; lane < kBlock; lane += kLanes) {
      const auto code = hn::LoadU(di8, reinterpret_cast<const int8_t*>(codes) + i + lane);
      hn::Store(hn::Mul(scale, hn::ConvertTo(d, hn::PromoteTo(I32(), code))), d, to + i + lane);
    }
  }
}

// tbq4 in its rotated domain: the row's `stored` values are whole blocks of norm * centroid, two codes a
// byte.
#if HWY_TARGET == HWY_SCALAR
HWY_INLINE void decode_tbq4(const uint8_t* codes, const uint16_t* norms, size_t encoded_dim, size_t,
                            float* HWY_RESTRICT to) {
  ops_of(KvFormat::tbq4).decode_stored_row(codes, norms, static_cast<int64_t>(encoded_dim), to);
}
#else
using Bytes = hn::Full128<uint8_t>;  // 16 codes, one a byte

// to[0, 16) = norm * centroid of 16 codes.
HWY_INLINE void decode_centroids(hn::Vec<Bytes> codes, VecF norm, float* HWY_RESTRICT to) {
  const F32 d;
#if HWY_TARGET == HWY_AVX3
  const VecF table = hn::LoadU(d, tbq4::kCentroids.data());
  const auto index = hn::IndicesFromVec(d, hn::PromoteTo(I32(), codes));
  hn::Store(hn::Mul(norm, hn::TableLookupLanes(table, index)), d, to);
#elif HWY_TARGET == HWY_AVX2
  // Half of the table fits a vector: bit 3 of the code, moved to the sign, chooses between two look-ups.
  const VecF negative = hn::LoadU(d, tbq4::kCentroids.data());
  const VecF positive = hn::LoadU(d, tbq4::kCentroids.data() + kLanes);
  const hn::Half<Bytes> half;
  for (size_t part = 0; part < 2; ++part) {
    const auto bytes = part == 0 ? hn::LowerHalf(half, codes) : hn::UpperHalf(half, codes);
    const VecI code = hn::PromoteTo(I32(), bytes);
    const auto index = hn::IndicesFromVec(d, hn::And(code, hn::Set(I32(), 7)));
    const auto is_positive = hn::MaskFromVec(hn::BitCast(d, hn::BroadcastSignBit(hn::ShiftLeft<28>(code))));
    const VecF centroid = hn::IfThenElse(is_positive, hn::TableLookupLanes(positive, index),
                                         hn::TableLookupLanes(negative, index));
    hn::Store(hn::Mul(norm, centroid), d, to + part * kLanes);
  }
#else
  // The four bytes of each centroid by four byte look-ups, then put together.
  HWY_ALIGN uint8_t planes[4][16];
  for (size_t i = 0; i < 16; ++i) {
    uint32_t bits;
    std::memcpy(&bits, &tbq4::kCentroids[i], sizeof(bits));
    for (size_t plane = 0; plane < 4; ++plane) planes[plane][i] = static_cast<uint8_t>(bits >> (8 * plane));
  }
  const Bytes d8;
  hn::Vec<Bytes> byte[4];
  for (size_t plane = 0; plane < 4; ++plane) {
    byte[plane] = hn::TableLookupBytes(hn::Load(d8, planes[plane]), codes);
  }
  const hn::Repartition<uint16_t, Bytes> d16;
  for (size_t part = 0; part < 2; ++part) {
    const auto low = hn::BitCast(d16, part == 0 ? hn::InterleaveLower(d8, byte[0], byte[1])
                                                : hn::InterleaveUpper(d8, byte[0], byte[1]));
    const auto high = hn::BitCast(d16, part == 0 ? hn::InterleaveLower(d8, byte[2], byte[3])
                                                 : hn::InterleaveUpper(d8, byte[2], byte[3]));
    float* half = to + part * 8;
    hn::Store(hn::Mul(norm, hn::BitCast(d, hn::InterleaveLower(d16, low, high))), d, half);
    hn::Store(hn::Mul(norm, hn::BitCast(d, hn::InterleaveUpper(d16, low, high))), d, half + 4);
  }
#endif
}

HWY_INLINE void decode_tbq4(const uint8_t* codes, const uint16_t* norms, size_t encoded_dim, size_t stored,
                            float* HWY_RESTRICT to) {
  const Bytes d8;
  const size_t block = static_cast<size_t>(tbq4::block_size(static_cast<int64_t>(encoded_dim)));
  for (size_t start = 0; start < stored; start += block) {
    const VecF norm = hn::Set(F32(), f32_from_f16(norms[start / block]));
    for (size_t i = start; i < start + block; i += 32) {
      const auto pairs = hn::LoadU(d8, codes + i / 2);
      const auto even = hn::And(pairs, hn::Set(d8, 15));
      const auto odd = hn::And(
          hn::BitCast(d8, hn::ShiftRight<4>(hn::BitCast(hn::Full128<uint16_t>(), pairs))), hn::Set(d8, 15));
      decode_centroids(hn::InterleaveLower(d8, even, odd), norm, to + i);
      decode_centroids(hn::InterleaveUpper(d8, even, odd), norm, to + i + 16);
    }
  }
}

#endif

// Row `i` of a run in the stored domain.
HWY_INLINE void decode_stored_row(const KvSource& source, const RowRun& run, int64_t i,
                                  float* HWY_RESTRICT to) {
  const char* codes = run.codes + i * run.code_stride;
  const uint16_t* scales = run.scales + i * run.scale_stride;
  switch (source.format()) {
    case KvFormat::f32:
      return row_to_f32(codes, DType::f32, source.dim(), to);
    case KvFormat::f16:
      return row_to_f32(codes, DType::f16, source.dim(), to);
    case KvFormat::bf16:
      return row_to_f32(codes, DType::bf16, source.dim(), to);
    case KvFormat::q8:
      return decode_q8(reinterpret_cast<const uint8_t*>(codes), scales, source.dim(), to);
    case KvFormat::tbq4:
      return decode_tbq4(reinterpret_cast<const uint8_t*>(codes), scales, source.encoded_dim(),
                         source.stored_dim(), to);
  }
}

// Rows of one head often lie a page apart, where no hardware prefetcher follows: ask for them this far ahead.
inline constexpr int64_t kRowsAhead = 8;

HWY_INLINE void fetch(const char* row, size_t bytes) {
  for (size_t byte = 0; byte < bytes; byte += 64) __builtin_prefetch(row + byte);
}

// Keys [key_begin, key_end) to rows of `stride` floats.
inline HWY_NOINLINE void load_tile(const KvSource& source, int64_t key_begin, int64_t key_end,
                                   float* HWY_RESTRICT to, size_t stride) {
  const size_t row_bytes = source.row_bytes();
  while (key_begin < key_end) {
    const RowRun run = source.run(key_begin, key_end);
    for (int64_t i = 0; i < run.count; ++i, to += stride) {
      if (i + kRowsAhead < run.count) fetch(run.codes + (i + kRowsAhead) * run.code_stride, row_bytes);
      decode_stored_row(source, run, i, to);
    }
    key_begin += run.count;
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace attnspan::cpu
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
