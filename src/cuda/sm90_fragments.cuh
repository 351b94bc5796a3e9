#pragma once
// What the kernels of Hopper share: rings of buffers, and the accumulators of a warpgroup (64 rows; lane l of
// warp w holds rows 16 w + l / 4 and 8 further, columns 8 t + 2 (l % 4) and the next, at 4 t + 2 half + e).

#include "cuda/params.hpp"
#include "cuda/ptx.cuh"

namespace attnspan::cuda {

// A value that all lanes of the warp share, told to the compiler: addresses made of it stay in uniform
// registers.
__device__ __forceinline__ int32_t uniform(int32_t x) { return __shfl_sync(0xffffffffU, x, 0); }

// Position in a ring of `kStages`: which slot, and the parity of its phase.
template <int kStages>
struct Ring {
  int slot = 0;
  uint32_t phase = 0;
  __device__ void advance() {
    if (++slot == kStages) {
      slot = 0;
      phase ^= 1;
    }
  }
};

// This thread's first row in the tile.
__device__ __forceinline__ int32_t row_in_tile(int group) {
  const int lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) / 32 % 4;
  return 64 * group + 16 * warp + lane / 4;
}

// Of a row's scores in this thread, those of keys below `keys` of the tile: columns are 8 t + 2 (lane % 4) +
// e, in the order of t and e.
__device__ __forceinline__ int scores_below(int keys) {
  const int column = keys - 2 * (static_cast<int>(threadIdx.x) & 3);
  return 2 * (column >> 3) + min(column & 7, 2);
}
// The lowest `count` bits, for any count.
__device__ __forceinline__ uint32_t low_bits(int count) {
  return count >= 32 ? 0xffffffffU : (1U << max(count, 0)) - 1;
}

// Keys outside a row's span get -inf.
template <int kKeys>
__device__ __forceinline__ void mask_scores(float (&s)[kKeys / 2], const int32_t (&begin)[2],
                                            const int32_t (&end)[2], int32_t key0) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int first = scores_below(begin[half] - key0);
    const int last = scores_below(end[half] - key0);
#pragma unroll
    for (int word = 0; word < kKeys / 4; word += 32) {
      const uint32_t visible = low_bits(last - word) & ~low_bits(first - word);
#pragma unroll
      for (int i = 0; i < 32 && word + i < kKeys / 4; ++i) {
        const int at = word + i;
        if ((visible >> i & 1) == 0) s[at / 2 * 4 + 2 * half + at % 2] = -INFINITY;
      }
    }
  }
}

template <typename T, int kKeys>
__device__ __forceinline__ void pack_weights(uint32_t (&w)[kKeys / 4], const float (&s)[kKeys / 2]) {
#pragma unroll
  for (int i = 0; i < kKeys / 4; ++i) w[i] = pack(s[2 * i], s[2 * i + 1], T{});
}

// Four lanes exchange 4 words each: word k of lane t becomes word t of lane k.
__device__ __forceinline__ void transpose_quad(uint32_t* w) {
  const bool odd = (threadIdx.x & 1) != 0, high = (threadIdx.x & 2) != 0;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t other = __shfl_xor_sync(0xffffffffU, odd ? w[i] : w[i + 1], 1);
    (odd ? w[i] : w[i + 1]) = other;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t other = __shfl_xor_sync(0xffffffffU, high ? w[i] : w[i + 2], 2);
    (high ? w[i] : w[i + 2]) = other;
  }
}

// nan_guard: of a row's columns from `column` on, what is not finite after rounding becomes 0, and is
// counted.
template <typename T>
__device__ inline void guard_words(const Params& p, uint32_t* w, int column, int dim) {
  int replaced = 0;
  T* values = reinterpret_cast<T*>(w);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (column + i / 2 * 8 >= dim || isfinite(to_float(values[i]))) continue;
    values[i] = from_float<T>(0.0F);
    ++replaced;
  }
  if (replaced > 0) atomicAdd(p.replaced, static_cast<unsigned long long>(replaced));
}

}  // namespace attnspan::cuda
