#pragma once
// What the decode kernels share. A block owns one split of the keys of one (sequence, KV head), with all
// query rows of the group packed into 8 or 16 rows. Its warps are independent: each walks over its own steps
// of keys with its own ring of asynchronous copies and its own softmax state, and the states are merged at
// the end.
//
// Both products are taken transposed, S^T = K Q^T and O^T = V^T P^T: keys and columns fill the 16 rows of an
// mma and the few query rows its 8 columns, which halves products and registers. Lane l holds, of S^T, keys
// g = l / 4 and g + 8 of each 16 for query rows 2 (l % 4) and the next; of O^T, two columns for the same
// rows.

#include "cuda/decode.hpp"
#include "cuda/kv_loader.cuh"
#include "cuda/rotation.cuh"
#include "cuda/score.cuh"
#include "cuda/split.hpp"

namespace attnspan::cuda {

struct DecodeBlock {
  DeviceSequence s;
  int32_t kv_head = 0, split = 0;
  int32_t row0 = 0, rows = 0;  // packed rows
  KeySpan keys, core;          // of this split: seen by any row, by all rows
  int64_t start = 0;           // keys.begin rounded down so that 16 keys lie in one page
  PlaneHead key_head, value_head;
};

__device__ inline KeySpan overlap(KeySpan a, KeySpan b) {
  return {a.begin > b.begin ? a.begin : b.begin, a.end < b.end ? a.end : b.end};
}

// Heads are neighbours in the grid: in a [token, head, dim] cache they read neighbouring bytes.
__device__ inline DecodeBlock find_decode_block(const Params& p, int32_t tile_rows, uint32_t index) {
  DecodeBlock b;
  b.kv_head = static_cast<int32_t>(index % p.kv_heads);
  index /= p.kv_heads;
  const int32_t tiles = (p.seqlen_q * p.group + tile_rows - 1) / tile_rows;
  b.row0 = static_cast<int32_t>(index % tiles) * tile_rows;
  index /= tiles;
  b.split = static_cast<int32_t>(index % p.max_splits);
  b.s = sequence_of(p, static_cast<int32_t>(index / p.max_splits));
  const int32_t left = p.seqlen_q * p.group - b.row0;
  b.rows = left < tile_rows ? left : tile_rows;
  const int64_t first = b.row0 / p.group, last = (b.row0 + b.rows - 1) / p.group;
  const KeySpan whole = b.s.rule.hull(0, p.seqlen_q);
  const SplitPlan plan = plan_splits(whole.size(), p.split_target);
  const KeySpan mine = b.split < plan.splits ? plan.keys(whole, b.split) : KeySpan{};
  b.keys = overlap(b.s.rule.hull(first, last + 1), mine);
  b.core = overlap(b.s.rule.core(first, last + 1), mine);
  b.start = b.keys.begin - ((b.keys.begin - b.s.rule.key_begin) & 15);
  if (b.keys.empty()) b.start = b.keys.end = b.keys.begin;
  b.key_head = head_of(p.key, b.kv_head);
  b.value_head = head_of(p.value, b.kv_head);
  return b;
}

__device__ inline int32_t head_of_row(const Params& p, const DecodeBlock& b, int r) {
  return b.kv_head * p.group + (b.row0 + r) % p.group;
}
__device__ inline int32_t query_row(const Params& p, const DecodeBlock& b, int r) {
  return (b.row0 + r) / p.group;
}

// The query row behind element e of a thread's column tile n.
__device__ __forceinline__ int row_of(int n, int e) {
  return 8 * n + 2 * (static_cast<int>(threadIdx.x) & 3) + (e & 1);
}

// Turns products into logits in natural units, in place; s[i][n][e] is key0 + 16 i + g + 8 (e / 2).
template <int kGroups, int kTiles>
__device__ __forceinline__ void score_step(const Params& p, const DecodeBlock& b,
                                           const RowScore (&rows)[kTiles][2], float (&s)[kGroups][kTiles][4],
                                           int64_t key0) {
  const bool transformed = p.softcap != 0 || p.bias.data != nullptr || p.alibi_slopes.data != nullptr;
  const bool masked = classify(b.keys, b.core, key0, key0 + 16 * kGroups) != TileClass::inside;
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const RowScore& r = rows[n][e & 1];
        float x = s[i][n][e] * p.softmax_scale;
        if (masked || transformed) {
          const int64_t key = key0 + 16 * i + (static_cast<int>(threadIdx.x) & 31) / 4 + 8 * (e / 2);
          const bool visible = !masked || r.span.contains(key);
          if (transformed) x = transform(p, r, x, key, visible);
          if (!visible) x = -INFINITY;
        }
        s[i][n][e] = x;
      }
    }
  }
}

// The thread's query rows, their spans cut to the split.
template <int kTiles>
__device__ inline void find_rows(const Params& p, const DecodeBlock& b, RowScore (&rows)[kTiles][2]) {
  for (int n = 0; n < kTiles; ++n) {
    for (int e = 0; e < 2; ++e) {
      const int r = row_of(n, e);
      if (r >= b.rows) continue;
      rows[n][e] = row_score(p, b.s, head_of_row(p, b, r), query_row(p, b, r));
      rows[n][e].span = overlap(rows[n][e].span, b.keys);
    }
  }
}

// Over the lanes that hold the same query rows (l % 4).
__device__ __forceinline__ float column_max(float x) {
#pragma unroll
  for (int d = 4; d < 32; d *= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffU, x, d));
  return x;
}
__device__ __forceinline__ float column_sum(float x) {
#pragma unroll
  for (int d = 4; d < 32; d *= 2) x += __shfl_xor_sync(0xffffffffU, x, d);
  return x;
}

// An 8x8 matrix of 16-bit values, transposed across the warp.
__device__ __forceinline__ uint32_t transpose_matrix(uint32_t x) {
  uint32_t y;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// The softmax state of a warp's query rows.
template <int kDim, int kTiles>
struct WarpState {
  float o[kDim / 16][kTiles][4] = {};
  float m[kTiles][2];
  float l[kTiles][2] = {};

  __device__ WarpState() {
    for (int n = 0; n < kTiles; ++n) m[n][0] = m[n][1] = -INFINITY;
  }
  __device__ __forceinline__ void scale(const float (&factor)[kTiles][2]) {
#pragma unroll
    for (int c = 0; c < kDim / 16; ++c) {
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) o[c][n][e] *= factor[n][e & 1];
      }
    }
  }
};

// Logits in natural units become weights; older outputs are rescaled where some row's maximum grew.
template <int kGroups, int kDim, int kTiles>
__device__ __forceinline__ void weigh_step(float (&s)[kGroups][kTiles][4], WarpState<kDim, kTiles>& state) {
  float top[kTiles][2];
  bool grows = false;
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      top[n][e] = fmaxf(s[0][n][e], s[0][n][e + 2]);
#pragma unroll
      for (int i = 1; i < kGroups; ++i) top[n][e] = fmaxf(top[n][e], fmaxf(s[i][n][e], s[i][n][e + 2]));
      top[n][e] = column_max(top[n][e]);
      grows = grows || top[n][e] > state.m[n][e];
    }
  }
  if (__any_sync(0xffffffffU, grows)) {
    float rescale[kTiles][2];
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float m = fmaxf(top[n][e], state.m[n][e]);
        rescale[n][e] = m == -INFINITY ? 1.0F : exp2_approx((state.m[n][e] - m) * kLog2e);
        state.m[n][e] = m;
        state.l[n][e] *= rescale[n][e];
      }
    }
    state.scale(rescale);
  }
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float base = state.m[n][e] == -INFINITY ? 0.0F : state.m[n][e] * kLog2e;
#pragma unroll
      for (int i = 0; i < kGroups; ++i) {
#pragma unroll
        for (int k = e; k < 4; k += 2) {
          s[i][n][k] = exp2_approx(fmaf(s[i][n][k], kLog2e, -base));
          state.l[n][e] += s[i][n][k];
        }
      }
    }
  }
}

// Element index of a row in the partial results: [split][head][row of all sequences]
__device__ inline int64_t decode_partial_row(const Params& p, const DecodeBlock& b, int r) {
  return (static_cast<int64_t>(b.split) * p.heads + head_of_row(p, b, r)) *
             (static_cast<int64_t>(p.batch) * p.seqlen_q) +
         static_cast<int64_t>(b.s.batch) * p.seqlen_q + query_row(p, b, r);
}

// A split without keys: an empty state.
__device__ inline void store_empty(const Params& p, const DecodeBlock& b) {
  for (int r = static_cast<int>(threadIdx.x); r < b.rows; r += static_cast<int>(blockDim.x)) {
    p.partial_lse[decode_partial_row(p, b, r)] = -INFINITY;
  }
}

// Joins the warps' states and writes the split's partial result, 8 query rows at a time. Shared memory: a
// [row][kDim + 4] tile a warp, then (m, l) of each row. column_of maps tile c, lane group g and half (rows g
// or g + 8 of the tile) to a stored column.
template <int kDim, int kTiles, typename ColumnOf>
__device__ inline void store_split(const Params& p, const DecodeBlock& b,
                                   const WarpState<kDim, kTiles>& state, float* shared, ColumnOf column_of) {
  constexpr int kStride = kDim + 4;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) & 31;
  const int warps = static_cast<int>(blockDim.x) / 32;
  float* stats = shared + warps * 8 * kStride;  // [warp][row][m, l]
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    __syncthreads();  // whatever was here has been read
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int at = warp * 8 + row_of(0, e);
      const float l = column_sum(state.l[n][e]);
      if (lane < 4) {
        stats[at * 2] = state.m[n][e];
        stats[at * 2 + 1] = l;
      }
#pragma unroll
      for (int c = 0; c < kDim / 16; ++c) {
        shared[at * kStride + column_of(c, lane / 4, 0)] = state.o[c][n][e];
        shared[at * kStride + column_of(c, lane / 4, 1)] = state.o[c][n][e + 2];
      }
    }
    __syncthreads();
    for (int r = warp; r < 8 && 8 * n + r < b.rows; r += warps) {
      float top = -INFINITY, sum = 0;
      for (int w = 0; w < warps; ++w) top = fmaxf(top, stats[(w * 8 + r) * 2]);
      float* row = shared + r * kStride;  // of warp 0: the result replaces its state
      float value[kDim / 32] = {};
      for (int w = 0; w < warps; ++w) {
        const float l = stats[(w * 8 + r) * 2 + 1];
        if (!(l > 0)) continue;
        const float weight = exp2_approx((stats[(w * 8 + r) * 2] - top) * kLog2e);
        sum += l * weight;
#pragma unroll
        for (int i = 0; i < kDim / 32; ++i)
          value[i] += weight * shared[(w * 8 + r) * kStride + lane + 32 * i];
      }
      const float inverse = sum > 0 ? 1.0F / sum : 0.0F;
#pragma unroll
      for (int i = 0; i < kDim / 32; ++i) row[lane + 32 * i] = value[i] * inverse;
      __syncwarp();
      if (p.value.format == Format::tbq4) {
        for (int first = 0; first < p.value.stored_dim; first += p.value.block)
          rotate_block(row + first, p.value.block, true);
      }
      const int64_t to = decode_partial_row(p, b, 8 * n + r);
      for (int c = lane; c < p.head_dim_v; c += 32) p.partial_out[to * p.head_dim_v + c] = row[c];
      if (lane == 0) p.partial_lse[to] = sum > 0 ? top + logf(sum) : -INFINITY;
    }
  }
}

namespace detail {

// Blocks' worth of work: (sequence, split, tile of rows, KV head).
inline int64_t decode_items(const Params& p, const DecodePlan& plan) {
  const int64_t tiles = (static_cast<int64_t>(p.seqlen_q) * p.group + plan.tile_rows - 1) / plan.tile_rows;
  return static_cast<int64_t>(p.batch) * p.max_splits * tiles * p.kv_heads;
}

template <typename Kernel, typename... Rest>
cudaError_t start_decode(Kernel kernel, const Params& p, const DecodePlan& plan, int64_t blocks,
                         cudaStream_t stream, const Rest&... rest) {
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                 static_cast<int>(plan.shared_bytes));
  if (error != cudaSuccess) return error;
  // On Hopper its blocks may take their places while the kernel in front of it ends; they wait by themselves.
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(plan.warps * 32));
  config.dynamicSmemBytes = plan.shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = plan.overlap ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, p, rest...);
}

}  // namespace detail
}  // namespace attnspan::cuda
