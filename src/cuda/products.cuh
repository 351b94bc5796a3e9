#pragma once
// The two matrix products of attention on tiles in shared memory, one warp 16 rows:
//   rows_times_keys:   s[16 x keys] += rows[16 x depth] keys[keys x depth]^T
//   weights_times_rows: o[16 x columns] += weights[16 x keys] values[keys x columns]
// 16-bit values go through mma m16n8k16; f32 through three tf32 products (hi hi + hi lo + lo hi), each 8-deep
// step summed from zero and then added in f32, because the tensor cores' own accumulation truncates.

#include "cuda/ptx.cuh"

namespace attnspan::cuda {

// Elements that a row of a tile is longer than its width, so that eight rows lie in different banks.
template <typename T>
inline constexpr int kRowPad = 16 / sizeof(T);

template <int kTiles, typename T>
__device__ __forceinline__ void rows_times_keys(float (&s)[kTiles][4], const T* rows, const T* keys,
                                                int stride, int depth) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const uint32_t row_address = shared_address(rows + (lane & 15) * stride + (lane >> 4) * 8);
  const uint32_t key_address =
      shared_address(keys + ((lane >> 4) * 8 + (lane & 7)) * stride + ((lane >> 3) & 1) * 8);
  for (int k = 0; k < depth; k += 16) {
    uint32_t a[4];
    ldmatrix(a, row_address + k * 2);
#pragma unroll
    for (int t = 0; t < kTiles; t += 2) {
      uint32_t b[4];
      ldmatrix(b, key_address + (t * 8 * stride + k) * 2);
      mma(s[t], a, b[0], b[1], T{});
      mma(s[t + 1], a, b[2], b[3], T{});
    }
  }
}

template <int kTiles, int kColumns, typename T>
__device__ __forceinline__ void weights_times_rows(float (&o)[kColumns][4], const float (&w)[kTiles][4],
                                                   const T* values, int stride) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const uint32_t address =
      shared_address(values + ((lane >> 3 & 1) * 8 + (lane & 7)) * stride + (lane >> 4) * 8);
#pragma unroll
  for (int t = 0; t < kTiles; t += 2) {
    const uint32_t a[4] = {pack(w[t][0], w[t][1], T{}), pack(w[t][2], w[t][3], T{}),
                           pack(w[t + 1][0], w[t + 1][1], T{}), pack(w[t + 1][2], w[t + 1][3], T{})};
#pragma unroll
    for (int c = 0; c < kColumns; c += 2) {
      uint32_t b[4];
      ldmatrix_transposed(b, address + (t * 8 * stride + c * 8) * 2);
      mma(o[c], a, b[0], b[1], T{});
      mma(o[c + 1], a, b[2], b[3], T{});
    }
  }
}

// x = high + low with 11 significant bits each, and a rest of 2^-23.
struct Tf32Pair {
  uint32_t high, low;
};
__device__ __forceinline__ Tf32Pair split_tf32(float x) {
  Tf32Pair p;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(p.high) : "f"(x));
  const float rest = x - __uint_as_float(p.high);
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(p.low) : "f"(rest));
  return p;
}

__device__ __forceinline__ void mma_3xtf32(float (&d)[4], const Tf32Pair (&a)[4], Tf32Pair b0, Tf32Pair b1) {
  const uint32_t high[4] = {a[0].high, a[1].high, a[2].high, a[3].high};
  const uint32_t low[4] = {a[0].low, a[1].low, a[2].low, a[3].low};
  float sum[4] = {0, 0, 0, 0};
  mma_tf32(sum, low, b0.high, b1.high);
  mma_tf32(sum, high, b0.low, b1.low);
  mma_tf32(sum, high, b0.high, b1.high);
#pragma unroll
  for (int e = 0; e < 4; ++e) d[e] += sum[e];
}

template <int kTiles>
__device__ __forceinline__ void rows_times_keys(float (&s)[kTiles][4], const float* rows, const float* keys,
                                                int stride, int depth) {
  const int g = (static_cast<int>(threadIdx.x) & 31) >> 2, t = static_cast<int>(threadIdx.x) & 3;
  for (int k = 0; k < depth; k += 8) {
    const float* low_rows = rows + g * stride + k + t;
    const Tf32Pair a[4] = {split_tf32(low_rows[0]), split_tf32(low_rows[8 * stride]), split_tf32(low_rows[4]),
                           split_tf32(low_rows[8 * stride + 4])};
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const float* key = keys + (n * 8 + g) * stride + k + t;
      mma_3xtf32(s[n], a, split_tf32(key[0]), split_tf32(key[4]));
    }
  }
}

// Slot t of the depth is key 2t of the tile and slot t + 4 key 2t + 1: accumulators are operands as they lie.
template <int kTiles, int kColumns>
__device__ __forceinline__ void weights_times_rows(float (&o)[kColumns][4], const float (&w)[kTiles][4],
                                                   const float* values, int stride) {
  const int g = (static_cast<int>(threadIdx.x) & 31) >> 2, t = static_cast<int>(threadIdx.x) & 3;
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    const Tf32Pair a[4] = {split_tf32(w[n][0]), split_tf32(w[n][2]), split_tf32(w[n][1]),
                           split_tf32(w[n][3])};
    const float* value = values + (n * 8 + 2 * t) * stride + g;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      mma_3xtf32(o[c], a, split_tf32(value[c * 8]), split_tf32(value[stride + c * 8]));
    }
  }
}

}  // namespace attnspan::cuda
