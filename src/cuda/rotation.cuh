#pragma once
// tbq4's rotation of rows in shared memory, in f32 and in the order of docs/kv-formats.md, one warp a block
// of 64 or 128 values: y = H(s x) / sqrt(B), and back.

#include <cstdint>

#include "kv/tbq4_constants.hpp"

namespace attnspan::cuda {

// The signs of values 32 i to 32 i + 31 as an immediate: constant memory would have to be fetched first.
template <int kBlock>
__device__ __forceinline__ uint32_t sign_bits(int i) {
  constexpr auto bits = [](int word) {
    return kBlock == 128 ? tbq4::kSignBits128[word] : tbq4::kSignBits64[word];
  };
  constexpr uint64_t low = bits(0), high = bits(1);
  return static_cast<uint32_t>((i < 2 ? low : high) >> (32 * (i & 1)));
}
template <int kBlock>
__device__ __forceinline__ float signed_value(float x, int lane, int i) {
  return (sign_bits<kBlock>(i) >> lane & 1U) != 0 ? -x : x;
}

// A lane holds values lane + 32 i: butterflies of strides below 32 cross lanes, the others stay in one.
template <int kBlock>
__device__ __forceinline__ void rotate_values(float* x, bool inverse) {
  constexpr int kValues = kBlock / 32;
  const int lane = static_cast<int>(threadIdx.x) & 31;
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    if (!inverse) x[i] = signed_value<kBlock>(x[i], lane, i);
  }
#pragma unroll
  for (int h = 1; h < 32; h *= 2) {
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      const float other = __shfl_xor_sync(0xffffffffU, x[i], h);
      x[i] = (lane & h) == 0 ? __fadd_rn(x[i], other) : __fsub_rn(other, x[i]);
    }
  }
#pragma unroll
  for (int h = 1; h < kValues; h *= 2) {
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      if ((i & h) != 0) continue;
      const float a = x[i], b = x[i + h];
      x[i] = __fadd_rn(a, b);
      x[i + h] = __fsub_rn(a, b);
    }
  }
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    const float y = __fmul_rn(x[i], tbq4::inverse_sqrt(kBlock));
    x[i] = inverse ? signed_value<kBlock>(y, lane, i) : y;
  }
}

template <int kBlock>
__device__ __forceinline__ void rotate_block(float* values, bool inverse) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  float x[kBlock / 32];
#pragma unroll
  for (int i = 0; i < kBlock / 32; ++i) x[i] = values[lane + 32 * i];
  rotate_values<kBlock>(x, inverse);
#pragma unroll
  for (int i = 0; i < kBlock / 32; ++i) values[lane + 32 * i] = x[i];
  __syncwarp();
}

// In place. values: `block` floats in shared memory, 64 or 128, of which this warp is the only user.
__device__ inline void rotate_block(float* values, int block, bool inverse) {
  if (block == 128) {
    rotate_block<128>(values, inverse);
  } else {
    rotate_block<64>(values, inverse);
  }
}

}  // namespace attnspan::cuda
