#pragma once
// Decode where a value is the first 512 of its key's 576 columns (MLA): a row is read once and takes part in
// both products. A block owns one split; its four warps share each step of 64 keys in shared memory. Each
// scores 16 of the keys, the weights pass through shared memory, and each sums 128 columns of all 64 values.
//
// A step is 74 KB, at a multiprocessor's share of the bandwidth 2.2 us; its products (72 + 64 a warp) take
// half of that.

#include "attnspan/tensor.hpp"
#include "cuda/decode_dense.cuh"

namespace attnspan::cuda {

struct MlaShape {
  static constexpr int kDim = 576, kColumns = 512;
  static constexpr int kRows = 16, kTiles = 2, kWarps = kTeamWarps;
  static constexpr int kStep = 16 * kWarps;  // keys
  static constexpr int kRowBytes = kDim * 2;
  static constexpr int kStageBytes = kStep * kRowBytes;
  static constexpr int kStages = 2;
  static constexpr int kOutputs = kColumns / kWarps / 16;  // tiles of a warp
};

// What the warps of a block exchange.
struct MlaShared {
  DecodeTeam<MlaShape::kRows> team;
  float tops[MlaShape::kWarps][MlaShape::kRows];                // of a step's scores
  uint32_t weights[MlaShape::kWarps][MlaShape::kTiles][2][32];  // second operands, by lane
  uint2 queries[MlaShape::kDim / 16][MlaShape::kTiles][32];     // second operands, by lane
};

__device__ __forceinline__ uint32_t mla_chunk(uint32_t stage, int row, int chunk) {
  return stage + row * MlaShape::kRowBytes + (chunk ^ (row & 7)) * 16;
}

// Copies the warp's 16 rows of a step, keys from `at` on: 8 lanes a row, 4 rows at once.
__device__ __forceinline__ void copy_mla_rows(const Params& p, const DecodeUnit& u, const SplitSteps& split,
                                              int32_t at, uint32_t stage) {
  const int32_t mine = at + 16 * team_warp();
  if (mine < split.end) {
    uint32_t page = 0, token = static_cast<uint32_t>(mine);
    if (p.block_table != nullptr) {
      const int32_t number = p.page_shift >= 0 ? mine >> p.page_shift : mine / p.page_size;
      token = static_cast<uint32_t>(mine - number * p.page_size);
      page = static_cast<uint32_t>(
          p.block_table[u.batch * p.block_table_stride + number * p.block_table_page_stride]);
    } else {
      page = static_cast<uint32_t>(u.batch);
    }
    const uint8_t* head =
        p.key.codes + u.kv_head * p.key.head_stride + page * p.key.page_stride + lane_index() % 8 * 16;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = 4 * i + lane_index() / 8;
      const bool exists = mine + row >= split.begin && mine + row < split.end;
      const uint8_t* from = exists ? head + (token + row) * p.key.token_stride : head;
      const uint32_t to = mla_chunk(stage, 16 * team_warp() + row, lane_index() % 8);
#pragma unroll
      for (int c = 0; c < MlaShape::kRowBytes / 128; ++c)
        copy_async_16(to + 128 * c, from + (exists ? 128 * c : 0), exists);
    }
  }
  copy_async_commit();
}

// Query rows as second operands, each warp a quarter of the depth.
template <typename T>
__device__ inline void load_mla_queries(const Params& p, const DecodeUnit& u, MlaShared& shared) {
  using S = MlaShape;
  const int lane = lane_index();
  for (int n = 0; n < S::kTiles; ++n) {
    const int r = lane / 4 + 8 * n;
    const bool exists = r < u.rows;
    const uint16_t* row = static_cast<const uint16_t*>(p.query.data) +
                          (exists ? p.query.index(u.batch, head_of_row(p, u, r), query_row(p, u, r)) : 0);
    for (int k = team_warp(); k < S::kDim / 16; k += S::kWarps) {
      uint32_t side[2];
      for (int h = 0; h < 2; ++h) {
        const uint16_t* values = row + k * 16 + h * 8 + 2 * (lane & 3);
        side[h] = exists ? values[0] | static_cast<uint32_t>(values[1]) << 16 : 0U;
      }
      shared.queries[k][n][lane] = make_uint2(side[0], side[1]);
    }
  }
}

// Scores of the warp's 16 keys.
template <typename T>
__device__ __forceinline__ void mla_scores(float (&s)[2][4], const MlaShared& shared, uint32_t stage) {
  const int lane = lane_index();
#pragma unroll 6
  for (int k = 0; k < MlaShape::kDim / 16; ++k) {
    uint32_t a[4];
    ldmatrix(a, mla_chunk(stage, 16 * team_warp() + (lane & 15), 2 * k + (lane >> 4)));
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const uint2 q = shared.queries[k][n][lane];
      mma(s[n], a, q.x, q.y, T{});
    }
  }
}

// The state of all warps moves on together: rows' maxima are those of the whole step. Scores become weights,
// as operands in shared memory.
template <typename T>
__device__ __forceinline__ void mla_weigh(float (&s)[2][4], WarpState<MlaShape::kOutputs, 2>& state,
                                          MlaShared& shared) {
  const int lane = lane_index(), warp = team_warp();
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float top = column_max(fmaxf(s[n][e], s[n][e + 2]));
      if (lane < 4) shared.tops[warp][row_of(n, e)] = top;
    }
  }
  team_sync();
  float rescale[2][2];
  bool grows = false;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float top = shared.tops[0][row_of(n, e)];
#pragma unroll
      for (int w = 1; w < MlaShape::kWarps; ++w) top = fmaxf(top, shared.tops[w][row_of(n, e)]);
      const float m = top - kLogitLag > state.m[n][e] ? top : state.m[n][e];
      grows = grows || m > state.m[n][e];
      rescale[n][e] = m == -INFINITY ? 1.0F : exp2_approx((state.m[n][e] - m) * kLog2e);
      state.m[n][e] = m;
      state.l[n][e] *= rescale[n][e];
      const float base = m == -INFINITY ? 0.0F : m * kLog2e;
#pragma unroll
      for (int k = e; k < 4; k += 2) {
        s[n][k] = exp2_approx(fmaf(s[n][k], kLog2e, -base));
        state.l[n][e] += s[n][k];
      }
    }
    shared.weights[warp][n][0][lane] = transpose_matrix(pack(s[n][0], s[n][1], T{}));
    shared.weights[warp][n][1][lane] = transpose_matrix(pack(s[n][2], s[n][3], T{}));
  }
  if (__any_sync(0xffffffffU, grows)) state.scale(rescale);
  team_sync();
}

// Adds the values of a step, of which `keys` exist, in the warp's 128 columns.
template <typename T>
__device__ __forceinline__ void mla_sum(WarpState<MlaShape::kOutputs, 2>& state, const MlaShared& shared,
                                        uint32_t stage, int32_t keys) {
  const int lane = lane_index();
#pragma unroll
  for (int g = 0; g < MlaShape::kWarps; ++g) {
    if (16 * g >= keys) break;  // nothing was copied
    uint32_t w[2][2];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      w[n][0] = shared.weights[g][n][0][lane];
      w[n][1] = shared.weights[g][n][1][lane];
    }
#pragma unroll
    for (int c = 0; c < MlaShape::kOutputs; ++c) {
      uint32_t a[4];
      ldmatrix_transposed(a, mla_chunk(stage, 16 * g + (lane >> 4) * 8 + (lane & 7),
                                       2 * (team_warp() * MlaShape::kOutputs + c) + ((lane >> 3) & 1)));
#pragma unroll
      for (int n = 0; n < 2; ++n) mma(state.o[c][n], a, w[n][0], w[n][1], T{});
    }
  }
}

// The warp's columns of the split's partial result; sums of weights are added over warps in order.
__device__ inline void store_mla(const Params& p, const DecodeUnit& u,
                                 const WarpState<MlaShape::kOutputs, 2>& state, MlaShared& shared) {
  const int lane = lane_index(), warp = team_warp();
  float(&sums)[MlaShape::kWarps][MlaShape::kRows] = shared.tops;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float l = column_sum(state.l[n][e]);
      if (lane < 4) sums[warp][row_of(n, e)] = l;
    }
  }
  team_sync();
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int r = row_of(n, e);
      if (r >= u.rows) continue;
      float sum = 0;
      for (int w = 0; w < MlaShape::kWarps; ++w) sum += sums[w][r];
      const float inverse = sum > 0 ? 1.0F / sum : 0.0F;
      const int64_t to = partial_row(p, u, 0, r);
      float* row = p.partial_out + to * MlaShape::kColumns + warp * MlaShape::kOutputs * 16 + lane / 4;
#pragma unroll
      for (int c = 0; c < MlaShape::kOutputs; ++c) {
        row[16 * c] = state.o[c][n][e] * inverse;
        row[16 * c + 8] = state.o[c][n][e + 2] * inverse;
      }
      if (warp == 0 && lane < 4) p.partial_lse[to] = sum > 0 ? state.m[n][e] + logf(sum) : -INFINITY;
    }
  }
}

template <typename T>
__device__ __forceinline__ void decode_mla(const Params& p, const DecodeGrid& grid) {
  using S = MlaShape;
  extern __shared__ __align__(128) unsigned char memory[];
  auto& shared = *reinterpret_cast<MlaShared*>(memory + S::kStages * S::kStageBytes);
  const uint32_t ring = shared_address(memory);
  const DecodeUnit u = find_unit(p, grid, S::kRows, blockIdx.x);
  const SplitSteps split = SplitSteps::of<0>(u, 0, S::kStep);
  if (split.begin == split.end) {
    store_empty(p, u, 0, 1);
    return;
  }
  copy_mla_rows(p, u, split, split.start, ring);
  find_rows(p, u, shared.team.rows, static_cast<int>(threadIdx.x));
  load_mla_queries<T>(p, u, shared);
  const int32_t inside = max(u.core_begin, split.begin), inside_end = min(u.core_end, split.end);
  WarpState<S::kOutputs, S::kTiles> state;
  for (int32_t i = 0, at = split.start; i < split.count; ++i, at += S::kStep) {
    copy_async_wait<0>();
    team_sync();  // the step is there, and nobody reads the one before it any more
    const uint32_t stage = ring + (i & 1) * S::kStageBytes;
    copy_mla_rows(p, u, split, at + S::kStep, ring + (~i & 1) * S::kStageBytes);
    const int32_t mine = at + 16 * team_warp();
    float s[S::kTiles][4] = {};
    if (mine < split.end) mla_scores<T>(s, shared, stage);
    score_step(p, shared.team, split, u.base, mine < inside || mine + 16 > inside_end, mine, s);
    mla_weigh<T>(s, state, shared);
    mla_sum<T>(state, shared, stage, split.end - at);
  }
  team_sync();
  store_mla(p, u, state, shared);
}

__global__ void __launch_bounds__(32 * kTeamWarps, 1)
    decode_mla_kernel(const __grid_constant__ Params p, const __grid_constant__ DecodeGrid grid) {
  wait_for_predecessor();
  start_dependents();
  if (p.dtype == static_cast<int>(DType::f16)) {
    decode_mla<__half>(p, grid);
  } else {
    decode_mla<__nv_bfloat16>(p, grid);
  }
}

}  // namespace attnspan::cuda
