// The matrix product of every kernel: C (+)= A * B with A broadcast from memory and B, C read along lanes.
//
//   QK^T   scores^T[key][row]  = sum_d   key[key][d]      * query^T[d][row]      A by rows
//   PV     out^T[d][row]      += sum_key value[key][d]    * p^T[key][row]        A by columns
//   and the five of the backward pass.
// Rows of queries lie along lanes, so the softmax needs no horizontal step, keys and values are used in the
// order in which they are stored (nothing is transposed per tile), and the edge of a mask costs at the grain
// of one key.

#if defined(ATTNSPAN_CPU_GEMM_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef ATTNSPAN_CPU_GEMM_INL_HPP
#undef ATTNSPAN_CPU_GEMM_INL_HPP
#else
#define ATTNSPAN_CPU_GEMM_INL_HPP
#endif

#include "cpu/tiles-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace attnspan::cpu {
namespace HWY_NAMESPACE {

// How element (i, t) of A is addressed: a[i * lda + t] or a[t * lda + i].
enum class Order { by_row, by_column };

struct Operand {
  const float* data;
  size_t stride;
};

// One block of registers: c[kRows][kVectors] = (accumulate ? c : 0) + sum over t of A(i, t) * b[t].
template <size_t kRows, size_t kVectors, Order kOrder>
HWY_INLINE void micro_kernel(size_t depth, Operand a, Operand b, float* HWY_RESTRICT c, size_t ldc,
                             bool accumulate) {
  const F32 d;
  VecF sum[kRows][kVectors];
  if (accumulate) {
#pragma GCC unroll 16
    for (size_t i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
      for (size_t v = 0; v < kVectors; ++v) sum[i][v] = hn::Load(d, c + i * ldc + v * kLanes);
    }
  } else {
#pragma GCC unroll 16
    for (size_t i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
      for (size_t v = 0; v < kVectors; ++v) sum[i][v] = hn::Zero(d);
    }
  }
#pragma GCC unroll 4
  for (size_t t = 0; t < depth; ++t) {
    VecF along[kVectors];
#pragma GCC unroll 4
    for (size_t v = 0; v < kVectors; ++v) along[v] = hn::Load(d, b.data + t * b.stride + v * kLanes);
#pragma GCC unroll 16
    for (size_t i = 0; i < kRows; ++i) {
      const VecF scalar =
          hn::Set(d, kOrder == Order::by_row ? a.data[i * a.stride + t] : a.data[t * a.stride + i]);
#pragma GCC unroll 4
      for (size_t v = 0; v < kVectors; ++v) sum[i][v] = hn::MulAdd(scalar, along[v], sum[i][v]);
    }
  }
#pragma GCC unroll 16
  for (size_t i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (size_t v = 0; v < kVectors; ++v) hn::Store(sum[i][v], d, c + i * ldc + v * kLanes);
  }
}

// Calls the block of `rows` rows, 1 <= rows <= kRows.
template <size_t kRows, size_t kVectors, Order kOrder>
HWY_INLINE void micro_kernel_of(size_t rows, size_t depth, Operand a, Operand b, float* c, size_t ldc,
                                bool accumulate) {
  if constexpr (kRows > 1) {
    if (rows < kRows) {
      return micro_kernel_of<kRows - 1, kVectors, kOrder>(rows, depth, a, b, c, ldc, accumulate);
    }
  }
  micro_kernel<kRows, kVectors, kOrder>(depth, a, b, c, ldc, accumulate);
}

// C[m][kVectors * lanes] (+)= A[m][depth] * B[depth][kVectors * lanes]. The last m < 2 * kMicroRows rows are
// cut in halves: a block of few rows has too few independent sums to hide the latency of the FMA.
template <size_t kVectors, Order kOrder>
HWY_NOINLINE void multiply(size_t m, size_t depth, Operand a, Operand b, float* HWY_RESTRICT c, size_t ldc,
                           bool accumulate) {
  while (m > 0) {
    const size_t rows = m <= kMicroRows ? m : m < 2 * kMicroRows ? (m + 1) / 2 : kMicroRows;
    micro_kernel_of<kMicroRows, kVectors, kOrder>(rows, depth, a, b, c, ldc, accumulate);
    a.data += kOrder == Order::by_row ? rows * a.stride : rows;
    c += rows * ldc;
    m -= rows;
  }
}

// C[m][columns] += A[m][depth] * B[depth][columns], both A and C by rows. B and C are padded to whole
// vectors.
HWY_INLINE void multiply_columns(size_t m, size_t depth, Operand a, Operand b, size_t columns,
                                 float* HWY_RESTRICT c, size_t ldc) {
  constexpr size_t kWidth = kPanelVectors * kLanes;
  size_t column = 0;
  for (; column + kWidth <= columns; column += kWidth) {
    multiply<kPanelVectors, Order::by_row>(m, depth, a, {b.data + column, b.stride}, c + column, ldc, true);
  }
  for (; column < columns; column += kLanes) {
    multiply<1, Order::by_row>(m, depth, a, {b.data + column, b.stride}, c + column, ldc, true);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace attnspan::cpu
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
