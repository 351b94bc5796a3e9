// Lane arithmetic of the decode kernels: sums of many vectors at once, squares of words turned around, and
// int16 products summed in pairs. Not for one-lane targets.

#if defined(ATTNSPAN_CPU_DECODE_VECTORS_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef ATTNSPAN_CPU_DECODE_VECTORS_INL_HPP
#undef ATTNSPAN_CPU_DECODE_VECTORS_INL_HPP
#else
#define ATTNSPAN_CPU_DECODE_VECTORS_INL_HPP
#endif

#include "cpu/simd-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace attnspan::cpu {
namespace HWY_NAMESPACE {

#if HWY_TARGET != HWY_SCALAR

using U64 = hn::Repartition<uint64_t, F32>;
using I16 = hn::Repartition<int16_t, F32>;
using U16 = hn::Repartition<uint16_t, F32>;
using U8 = hn::Repartition<uint8_t, F32>;
using VecU = hn::Vec<U32>;
using VecI16 = hn::Vec<I16>;

inline constexpr size_t kBlocks = kLanes / 4;  // blocks of 128 bits in a vector

// In every block of 128 bits: {sum of a's four lanes, of b's, of c's, of d's}.
HWY_INLINE VecF sum_in_blocks(VecF a, VecF b, VecF c, VecF d) {
  const F32 f;
  const U64 u;
  const auto ab = hn::BitCast(u, hn::Add(hn::InterleaveLower(f, a, b), hn::InterleaveUpper(f, a, b)));
  const auto cd = hn::BitCast(u, hn::Add(hn::InterleaveLower(f, c, d), hn::InterleaveUpper(f, c, d)));
  return hn::Add(hn::BitCast(f, hn::InterleaveLower(u, ab, cd)),
                 hn::BitCast(f, hn::InterleaveUpper(u, ab, cd)));
}

// {sum over the blocks of x[0], of x[1], ...}: one block each.
HWY_INLINE VecF sum_across_blocks(const VecF* x) {
  [[maybe_unused]] const F32 f;
#if HWY_TARGET == HWY_AVX3
  const VecF low = hn::Add(hn::ConcatLowerLower(f, x[1], x[0]), hn::ConcatUpperUpper(f, x[1], x[0]));
  const VecF high = hn::Add(hn::ConcatLowerLower(f, x[3], x[2]), hn::ConcatUpperUpper(f, x[3], x[2]));
  return VecF{_mm512_add_ps(_mm512_shuffle_f32x4(low.raw, high.raw, 0x88),
                            _mm512_shuffle_f32x4(low.raw, high.raw, 0xdd))};
#elif HWY_TARGET == HWY_AVX2
  return hn::Add(hn::ConcatLowerLower(f, x[1], x[0]), hn::ConcatUpperUpper(f, x[1], x[0]));
#else
  return x[0];
#endif
}

// The square of words whose rows are z[0], z[1], ...: z[j] becomes word j of every row.
HWY_INLINE void transpose_square(VecU* z) {
  const U32 d;
  const U64 u;
  for (size_t row = 0; row < kLanes; row += 4) {  // squares of 4 x 4 within blocks
    const auto ab0 = hn::BitCast(u, hn::InterleaveLower(d, z[row], z[row + 1]));
    const auto ab1 = hn::BitCast(u, hn::InterleaveUpper(d, z[row], z[row + 1]));
    const auto cd0 = hn::BitCast(u, hn::InterleaveLower(d, z[row + 2], z[row + 3]));
    const auto cd1 = hn::BitCast(u, hn::InterleaveUpper(d, z[row + 2], z[row + 3]));
    z[row] = hn::BitCast(d, hn::InterleaveLower(u, ab0, cd0));
    z[row + 1] = hn::BitCast(d, hn::InterleaveUpper(u, ab0, cd0));
    z[row + 2] = hn::BitCast(d, hn::InterleaveLower(u, ab1, cd1));
    z[row + 3] = hn::BitCast(d, hn::InterleaveUpper(u, ab1, cd1));
  }
#if HWY_TARGET == HWY_AVX3
#pragma GCC unroll 4
  for (size_t j = 0; j < 4; ++j) {  // block b of z[j + 4 g] becomes block g of z[j + 4 b]
    const VecU low0 = hn::ConcatLowerLower(d, z[j + 4], z[j]);
    const VecU low1 = hn::ConcatLowerLower(d, z[j + 12], z[j + 8]);
    const VecU high0 = hn::ConcatUpperUpper(d, z[j + 4], z[j]);
    const VecU high1 = hn::ConcatUpperUpper(d, z[j + 12], z[j + 8]);
    z[j] = VecU{_mm512_shuffle_i32x4(low0.raw, low1.raw, 0x88)};
    z[j + 4] = VecU{_mm512_shuffle_i32x4(low0.raw, low1.raw, 0xdd)};
    z[j + 8] = VecU{_mm512_shuffle_i32x4(high0.raw, high1.raw, 0x88)};
    z[j + 12] = VecU{_mm512_shuffle_i32x4(high0.raw, high1.raw, 0xdd)};
  }
#elif HWY_TARGET == HWY_AVX2
#pragma GCC unroll 4
  for (size_t j = 0; j < 4; ++j) {
    const VecU low = hn::ConcatLowerLower(d, z[j + 4], z[j]);
    z[j + 4] = hn::ConcatUpperUpper(d, z[j + 4], z[j]);
    z[j] = low;
  }
#endif
}

// Running sums of products of int16 pairs, one int32 lane a pair. (Some targets keep them in two vectors.)
struct PairSum {
  VecI a, b;

  HWY_INLINE PairSum() : a(hn::Zero(I32())), b(hn::Zero(I32())) {}
  HWY_INLINE VecI total() const { return hn::RearrangeToOddPlusEven(a, b); }
};

// AVX512-VNNI multiplies and adds in one instruction. It is not part of the AVX3 target, so the kernels that
// use it are compiled twice and chosen at run time.
template <bool kVnni>
HWY_INLINE void add_pairs(VecI16 x, VecI16 y, PairSum& sum) {
#if HWY_TARGET == HWY_AVX3
  if constexpr (kVnni) {
    asm("vpdpwssd %2, %1, %0" : "+v"(sum.a.raw) : "v"(x.raw), "v"(y.raw));
    return;
  }
#endif
  sum.a = hn::ReorderWidenMulAccumulate(I32(), x, y, sum.a, sum.b);
  // Integers may be added in any order, and the compiler would rather keep all products of a loop on the
  // stack.
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3
  asm("" : "+v"(sum.a.raw));
#endif
}

// One pair in every lane.
HWY_INLINE VecI16 broadcast_pair(int32_t pair) { return hn::BitCast(I16(), hn::Set(I32(), pair)); }

#endif  // not scalar

}  // namespace HWY_NAMESPACE
}  // namespace attnspan::cpu
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
