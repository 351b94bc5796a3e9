#pragma once
// Query rows of the quantised decode kernel: in f16, rotated where keys are tbq4, as operands in registers.

#include "cuda/decode_codes.cuh"

namespace attnspan::cuda {

// A query row that a warp prepares: a lane has columns lane + 32 i. It is asked for early.
template <int kDim>
struct QueryRow {
  float x[kDim / 32];

  __device__ __forceinline__ void load(const Params& p, const DecodeUnit& u, int r) {
    const int64_t first = r < u.rows ? p.query.index(u.batch, head_of_row(p, u, r), query_row(p, u, r)) : 0;
#pragma unroll
    for (int i = 0; i < kDim / 32; ++i)
      x[i] = r < u.rows ? load_element(p.query.data, first + lane_index() + 32 * i, p.dtype) : 0.0F;
  }
};

// Distance of rows in the staging memory, in f16: 16 bytes more than a row.
template <int kDim>
inline constexpr int kQueryStride = kDim + 8;

// Rows warp, warp + warps, ...: rotated where keys are tbq4, in f16 with the sign of the softmax scale, each
// divided by its largest value, which `peaks` keeps. query: the row of the warp's own number.
template <typename Codes, int kDim, int kRows>
__device__ __forceinline__ void stage_queries(const Params& p, const DecodeUnit& u, QueryRow<kDim>& query,
                                              __half* staging, float (&peaks)[kRows]) {
  for (int r = team_warp(); r < kRows; r += team_warps()) {
    if (r != team_warp()) query.load(p, u, r);
    if constexpr (!is_q8<Codes>) {
#pragma unroll
      for (int block = 0; block < Codes::kBlocks; ++block)
        rotate_values<Codes::kBlock>(query.x + block * (Codes::kBlock / 32), false);
    }
    float largest = 0;
#pragma unroll
    for (float x : query.x) largest = fmaxf(largest, fabsf(x));
#pragma unroll
    for (int d = 1; d < 32; d *= 2) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffU, largest, d));
    largest = largest > 0 ? largest : 1.0F;
    const float inverse = __fdividef(copysignf(1.0F, p.softmax_scale), largest);
#pragma unroll
    for (int i = 0; i < kDim / 32; ++i)
      staging[r * kQueryStride<kDim> + lane_index() + 32 * i] = __float2half_rn(query.x[i] * inverse);
    if (lane_index() == 0) peaks[r] = largest;
  }
}

template <typename Codes, int kDim, int kTiles>
__device__ __forceinline__ void read_queries(const __half* staging, uint32_t (&q)[kDim / 16][kTiles][2]) {
  const int g = lane_index() / 4, t = lane_index() & 3;
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    const __half* row = staging + (g + 8 * n) * kQueryStride<kDim>;
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
      // four neighbouring columns: two of each side
      const uint2 four = *reinterpret_cast<const uint2*>(row + query_column<Codes>(k, t, 0, 0));
      q[k][n][0] = four.x;
      q[k][n][1] = four.y;
    }
  }
}

}  // namespace attnspan::cuda
