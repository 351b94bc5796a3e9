#pragma once
// Logits from products, and the online softmax on accumulator fragments (16 rows x 8 columns an mma tile:
// lane l holds rows l / 4 and l / 4 + 8, columns 2 (l % 4) and the next).
//
//   s = softcap(softmax_scale * qk) + bias - slope |i + diagonal - j|,  -inf for keys outside the row's span
//
// The state keeps m in natural units of s. p = exp2((s - m) log2 e): s - m is exact near the maximum, so
// logits of 1e6 lose nothing.

#include "cuda/sequence.cuh"

namespace attnspan::cuda {

inline constexpr float kLog2e = 1.4426950408889634F;
inline constexpr float kMaskingBiasValue = -1e30F;

// What one query row needs to turn products into logits.
struct RowScore {
  KeySpan span;
  float slope = 0;
  float position = 0;  // i + diagonal, exact below 2^24; alibi alone reads it
  const float* bias = nullptr;
};

__device__ inline RowScore row_score(const Params& p, const DeviceSequence& s, int32_t head, int32_t row) {
  RowScore r;
  r.span = s.rule.span(row);
  if (p.alibi_slopes.data != nullptr) {
    r.slope = p.alibi_slopes.data[s.batch * p.alibi_slopes.batch_stride + head];
  }
  if (p.bias.data != nullptr) {
    r.bias =
        p.bias.data + s.batch * p.bias.batch_stride + head * p.bias.head_stride + row * p.bias.row_stride;
  }
  r.position = static_cast<float>(row + s.rule.diagonal);
  return r;
}

__host__ __device__ __forceinline__ bool is_transformed(const Params& p) {
  return p.softcap != 0 || p.bias.data != nullptr || p.alibi_slopes.data != nullptr;
}

// softcap, bias and alibi; a masking bias gives -inf. `exists` guards the read of the bias.
__device__ __forceinline__ float transform(const Params& p, const RowScore& r, float x, int64_t key,
                                           bool exists) {
  if (p.softcap != 0) x = p.softcap * tanhf(x / p.softcap);
  if (r.bias != nullptr && exists) {
    const float bias = r.bias[key * p.bias.key_stride];
    x = bias <= kMaskingBiasValue ? -INFINITY : x + bias;
  }
  if (p.alibi_slopes.data != nullptr) x -= r.slope * fabsf(r.position - static_cast<float>(key));
  return x;
}

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffU, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffU, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffU, x, 1);
  return x + __shfl_xor_sync(0xffffffffU, x, 2);
}

// Products of a tile become logits in place. `masked`: the tile is on an edge of some row's span.
template <int kTiles>
__device__ __forceinline__ void score_tile(const Params& p, const RowScore (&rows)[2], float (&s)[kTiles][4],
                                           int64_t key0, bool masked, bool transformed) {
  const int column = 2 * (static_cast<int>(threadIdx.x) & 3);
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const RowScore& r = rows[e / 2];
      const int64_t key = key0 + t * 8 + column + (e & 1);
      float x = s[t][e] * p.softmax_scale;
      const bool visible = !masked || r.span.contains(key);
      if (transformed) x = transform(p, r, x, key, visible);
      s[t][e] = visible ? x : -INFINITY;
    }
  }
}

// One step of the online softmax for rows l / 4 and l / 4 + 8: s becomes p, m and this lane's share of l move
// on, and `rescale` is what older outputs are multiplied by. A row that has met no key keeps m = -inf.
template <int kTiles>
__device__ __forceinline__ void softmax_step(float (&s)[kTiles][4], float (&m)[2], float (&l)[2],
                                             float (&rescale)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float top = m[half];
#pragma unroll
    for (int t = 0; t < kTiles; ++t) top = fmaxf(top, fmaxf(s[t][2 * half], s[t][2 * half + 1]));
    top = quad_max(top);
    const float base = top == -INFINITY ? 0.0F : top;  // every s is -inf then, and every p is 0
    rescale[half] = exp2f((m[half] - base) * kLog2e);
    m[half] = top;
    float sum = 0;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int e = 2 * half; e < 2 * half + 2; ++e) {
        s[t][e] = exp2f((s[t][e] - base) * kLog2e);
        sum += s[t][e];
      }
    }
    l[half] = l[half] * rescale[half] + sum;
  }
}

}  // namespace attnspan::cuda
