#pragma once
// tbq4's rotation of rows in shared memory, in f32 and in the order of docs/kv-formats.md, one warp a block
// of 64 or 128 values: y = H(s x) / sqrt(B), and back.

#include <cstdint>

#include "kv/tbq4_constants.hpp"

namespace attnspan::cuda {

static __constant__ uint64_t kDeviceSigns[2][2] = {{tbq4::kSignBits64[0], tbq4::kSignBits64[1]},
                                                   {tbq4::kSignBits128[0], tbq4::kSignBits128[1]}};

__device__ __forceinline__ float signed_value(float x, int block, int i) {
  const uint64_t bits = kDeviceSigns[block == 128 ? 1 : 0][i / 64];
  return ((bits >> (i % 64)) & 1U) != 0 ? -x : x;
}

// In place. values: `block` floats in shared memory of which this warp is the only user.
__device__ inline void rotate_block(float* values, int block, bool inverse) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  if (!inverse) {
    for (int i = lane; i < block; i += 32) values[i] = signed_value(values[i], block, i);
    __syncwarp();
  }
  for (int h = 1; h < block; h *= 2) {
    for (int pair = lane; pair < block / 2; pair += 32) {
      const int j = pair / h * 2 * h + pair % h;
      const float a = values[j], b = values[j + h];
      values[j] = __fadd_rn(a, b);
      values[j + h] = __fsub_rn(a, b);
    }
    __syncwarp();
  }
  for (int i = lane; i < block; i += 32) {
    const float y = __fmul_rn(values[i], block == 128 ? tbq4::inverse_sqrt(128) : tbq4::inverse_sqrt(64));
    values[i] = inverse ? signed_value(y, block, i) : y;
  }
  __syncwarp();
}

}  // namespace attnspan::cuda
