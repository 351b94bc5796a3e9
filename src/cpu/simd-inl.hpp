// Vectors, the elementary functions and row conversions that every kernel uses. Included once per target.

#if defined(ATTNSPAN_CPU_SIMD_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef ATTNSPAN_CPU_SIMD_INL_HPP
#undef ATTNSPAN_CPU_SIMD_INL_HPP
#else
#define ATTNSPAN_CPU_SIMD_INL_HPP
#endif

#include <hwy/highway.h>

#include <cstdint>
#include <limits>

#include "core/dtype.hpp"

HWY_BEFORE_NAMESPACE();
namespace attnspan::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using F32 = hn::ScalableTag<float>;
using I32 = hn::RebindToSigned<F32>;
using U32 = hn::RebindToUnsigned<F32>;
using VecF = hn::Vec<F32>;
using VecI = hn::Vec<I32>;
inline constexpr size_t kLanes = HWY_LANES(float);

inline constexpr float kLog2E = 1.44269504088896341F;
inline constexpr float kLn2 = 0.69314718055994531F;

// exp2(x * scale) for x <= 0 and scale > 0; `floor` is -126 / scale, below which the result is exactly 0 (so
// no denormals arise). Error against the exact power of the product x * scale: at most 2 ulp (tests/cpu
// measures it). A NaN stays one (unless it carries data in its nine lowest bits).
//   n = round(x * scale), r = x * scale - n in [-1/2, 1/2], 2^(n + r) = 2^n * p(r)
// p is the polynomial of degree 5 with p(0) = 1 whose largest error in ulp of the result is least (1.08: a
// result below 1 has half the ulp). Adding 1.5 * 2^23 rounds to an integer
// and leaves n in the low mantissa bits, so shifting them by 23 adds n to the exponent of p.
HWY_INLINE VecF exp2_scaled(VecF x, VecF scale, VecF floor) {
  const F32 d;
  const U32 du;
  const VecF magic = hn::Set(d, 12582912.0F);
  const VecF shifted = hn::MulAdd(x, scale, magic);
  const VecF r = hn::MulSub(x, scale, hn::Sub(shifted, magic));
  VecF p = hn::MulAdd(hn::Set(d, 0.00132257072255F), r, hn::Set(d, 0.00967176258564F));
  p = hn::MulAdd(p, r, hn::Set(d, 0.0555089153349F));
  p = hn::MulAdd(p, r, hn::Set(d, 0.240222364664F));
  p = hn::MulAdd(p, r, hn::Set(d, 0.693146824837F));
  p = hn::MulAdd(p, r, hn::Set(d, 1.0F));
  const auto exponent = hn::ShiftLeft<23>(hn::BitCast(du, shifted));
  const VecF power = hn::BitCast(d, hn::Add(hn::BitCast(du, p), exponent));
  return hn::IfThenZeroElse(hn::Le(x, floor), power);
}

// tanh to 3 ulp: an odd minimax polynomial below 0.625, (1 - e) / (1 + e) with e = exp(-2 |y|) above.
HWY_INLINE VecF tanh(VecF y) {
  const F32 d;
  const VecF magnitude = hn::Abs(y);
  const VecF scale = hn::Set(d, -2.0F * kLog2E);
  const VecF e = exp2_scaled(hn::Neg(magnitude), hn::Neg(scale), hn::Div(hn::Set(d, 126.0F), scale));
  const VecF one = hn::Set(d, 1.0F);
  const VecF large = hn::CopySign(hn::Div(hn::Sub(one, e), hn::Add(one, e)), y);
  const VecF z = hn::Mul(y, y);
  VecF p = hn::MulAdd(hn::Set(d, -0.00570499334958F), z, hn::Set(d, 0.0206390937224F));
  p = hn::MulAdd(p, z, hn::Set(d, -0.0537397173758F));
  p = hn::MulAdd(p, z, hn::Set(d, 0.133314422298F));
  p = hn::MulAdd(p, z, hn::Set(d, -0.333332819434F));
  const VecF small = hn::MulAdd(hn::Mul(p, z), y, y);
  return hn::IfThenElse(hn::Lt(magnitude, hn::Set(d, 0.625F)), small, large);
}

// One vector of stored values as f32.
HWY_INLINE VecF load_f32_vector(const float* from) { return hn::LoadU(F32(), from); }
HWY_INLINE VecF load_f16_vector(const uint16_t* from) {
  const hn::Rebind<hwy::float16_t, F32> dh;
  return hn::PromoteTo(F32(), hn::LoadU(dh, reinterpret_cast<const hwy::float16_t*>(from)));
}
HWY_INLINE VecF load_bf16_vector(const uint16_t* from) {
  const hn::Rebind<uint16_t, F32> dh;
  return hn::BitCast(F32(), hn::ShiftLeft<16>(hn::PromoteTo(U32(), hn::LoadU(dh, from))));
}

// to[0, n) = from[0, n) as f32. `to` is aligned and has room for whole vectors; reads never pass from + n.
HWY_INLINE void row_to_f32(const void* from, DType dtype, size_t n, float* HWY_RESTRICT to) {
  const F32 d;
  const size_t whole = n / kLanes * kLanes;
  size_t i = 0;
  if (dtype == DType::f32) {
    const float* row = static_cast<const float*>(from);
    for (; i < whole; i += kLanes) hn::Store(load_f32_vector(row + i), d, to + i);
  } else if (dtype == DType::f16) {
    const uint16_t* row = static_cast<const uint16_t*>(from);
    for (; i < whole; i += kLanes) hn::Store(load_f16_vector(row + i), d, to + i);
  } else {
    const uint16_t* row = static_cast<const uint16_t*>(from);
    for (; i < whole; i += kLanes) hn::Store(load_bf16_vector(row + i), d, to + i);
  }
  for (; i < n; ++i) to[i] = load_f32(from, static_cast<int64_t>(i), dtype);
}

// to[0, n) = from[0, n), rounded to nearest even. `from` is aligned; writes never pass to + n.
HWY_INLINE void row_from_f32(const float* HWY_RESTRICT from, DType dtype, size_t n, void* to) {
  const F32 d;
  size_t i = 0;
  if (dtype == DType::f32) {
    float* row = static_cast<float*>(to);
    for (; i + kLanes <= n; i += kLanes) hn::StoreU(hn::Load(d, from + i), d, row + i);
#if HWY_TARGET != HWY_EMU128 && HWY_TARGET != HWY_SCALAR
  } else if (dtype == DType::f16) {
    const hn::Rebind<hwy::float16_t, F32> dh;
    hwy::float16_t* row = static_cast<hwy::float16_t*>(to);
    for (; i + kLanes <= n; i += kLanes) hn::StoreU(hn::DemoteTo(dh, hn::Load(d, from + i)), dh, row + i);
#endif
  }
  for (; i < n; ++i) store_f32(to, static_cast<int64_t>(i), dtype, from[i]);
}

// to[column * to_stride + row] = from[row * from_stride + column]: 4 x 4 values at a time, 8 shuffles for 16.
inline HWY_NOINLINE void transpose(const float* HWY_RESTRICT from, size_t from_stride, size_t rows,
                                   size_t columns, float* HWY_RESTRICT to, size_t to_stride) {
  size_t whole_rows = 0, whole_columns = 0;
#if HWY_TARGET != HWY_SCALAR
  const hn::Full128<float> d;
  const hn::Repartition<uint64_t, decltype(d)> pairs;
  const auto low = [&](auto a, auto b) {
    return hn::BitCast(d, hn::InterleaveLower(pairs, hn::BitCast(pairs, a), hn::BitCast(pairs, b)));
  };
  const auto high = [&](auto a, auto b) {
    return hn::BitCast(d, hn::InterleaveUpper(pairs, hn::BitCast(pairs, a), hn::BitCast(pairs, b)));
  };
  whole_rows = rows / 4 * 4;
  whole_columns = columns / 4 * 4;
  for (size_t row = 0; row < whole_rows; row += 4) {
    const float* a = from + row * from_stride;
    for (size_t column = 0; column < whole_columns; column += 4) {
      const auto r0 = hn::LoadU(d, a + column);
      const auto r1 = hn::LoadU(d, a + column + from_stride);
      const auto r2 = hn::LoadU(d, a + column + 2 * from_stride);
      const auto r3 = hn::LoadU(d, a + column + 3 * from_stride);
      const auto r01 = hn::InterleaveLower(d, r0, r1), s01 = hn::InterleaveUpper(d, r0, r1);
      const auto r23 = hn::InterleaveLower(d, r2, r3), s23 = hn::InterleaveUpper(d, r2, r3);
      float* b = to + column * to_stride + row;
      hn::StoreU(low(r01, r23), d, b);
      hn::StoreU(high(r01, r23), d, b + to_stride);
      hn::StoreU(low(s01, s23), d, b + 2 * to_stride);
      hn::StoreU(high(s01, s23), d, b + 3 * to_stride);
    }
  }
#endif
  for (size_t row = 0; row < rows; ++row) {
    for (size_t column = row < whole_rows ? whole_columns : 0; column < columns; ++column) {
      to[column * to_stride + row] = from[row * from_stride + column];
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace attnspan::cpu
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
