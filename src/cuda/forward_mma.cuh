#pragma once
// The portable forward kernel. A block owns 16 rows a warp of one (sequence, KV head); all query heads of the
// group are packed into the rows (row r = query row r / group, head r % group), so that each tile of keys is
// loaded and decoded once for the whole group. K and V have a tile each: V travels during the scores, the
// next K during the weighted sum.

#include "cuda/forward_mma.hpp"
#include "cuda/kv_loader.cuh"
#include "cuda/products.cuh"
#include "cuda/rotation.cuh"
#include "cuda/score.cuh"
#include "cuda/split.hpp"
#include "cuda/tiles.hpp"

namespace attnspan::cuda {

struct MmaBlock {
  DeviceSequence s;
  int32_t kv_head = 0, split = 0, chunk = 0;
  int32_t row0 = 0, rows = 0;  // packed rows [row0, row0 + rows) of this block
  KeySpan keys, core;          // keys that any, and that every row sees, within this split
};

__device__ inline int64_t packed_rows(const Params& p, const DeviceSequence& s) {
  return static_cast<int64_t>(s.seqlen_q) * p.group;
}

__device__ inline KeySpan intersect(KeySpan a, KeySpan b) {
  return {a.begin > b.begin ? a.begin : b.begin, a.end < b.end ? a.end : b.end};
}

// Which rows and keys this block works on; rows == 0: none.
__device__ inline MmaBlock find_block(const Params& p, const MmaShape& shape, int tile_rows) {
  MmaBlock b;
  int64_t index = blockIdx.x;
  b.chunk = static_cast<int32_t>(index % shape.chunks);
  index /= shape.chunks;
  b.split = static_cast<int32_t>(index % p.max_splits);
  index /= p.max_splits;
  b.kv_head = static_cast<int32_t>(index % p.kv_heads);
  index /= p.kv_heads;
  // The last tiles of a causal problem are the longest: they start first.
  if (p.cu_seqlens_q == nullptr) index = gridDim.x / shape.chunks / p.max_splits / p.kv_heads - 1 - index;
  const RowTile at = locate_tile(p, tile_rows, p.group, index);
  if (at.batch < 0) return b;
  b.s = sequence_of(p, at.batch);
  b.row0 = at.tile * tile_rows;
  const int64_t left = packed_rows(p, b.s) - b.row0;
  b.rows = static_cast<int32_t>(left < tile_rows ? (left > 0 ? left : 0) : tile_rows);
  if (b.rows == 0) return b;
  const int64_t first = b.row0 / p.group, last = (b.row0 + b.rows - 1) / p.group;
  b.keys = b.s.rule.hull(first, last + 1);
  b.core = b.s.rule.core(first, last + 1);
  if (p.max_splits > 1) {
    const KeySpan whole = b.s.rule.hull(0, b.s.seqlen_q);
    const SplitPlan plan = plan_splits(whole.size(), p.split_target, p.min_split_keys);
    const KeySpan mine = b.split < plan.splits ? plan.keys(whole, b.split) : KeySpan{};
    b.keys = intersect(b.keys, mine);
    b.core = intersect(b.core, mine);
  }
  return b;
}

// The query rows of the block, converted (and rotated where keys are); missing rows become zeros.
template <typename T>
__device__ inline void load_query(T* tile, int stride, const Params& p, const MmaBlock& b, int tile_rows,
                                  int depth) {
  __shared__ float scratch[4][128];
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) & 31;
  const bool rotated = p.key.format == Format::tbq4;
  const int block = rotated ? p.key.block : 64;
  for (int r = warp; r < tile_rows; r += static_cast<int>(blockDim.x) / 32) {
    const int32_t packed = b.row0 + r;
    const int64_t first =
        p.query.index(b.s.batch, b.kv_head * p.group + packed % p.group, b.s.q_row0 + packed / p.group);
    for (int col0 = 0; col0 < depth; col0 += block) {
      for (int i = lane; i < block; i += 32) {
        const bool exists = r < b.rows && col0 + i < p.head_dim;
        scratch[warp][i] = exists ? load_element(p.query.data, first + col0 + i, p.dtype) : 0.0F;
      }
      __syncwarp();
      if (rotated) rotate_block(scratch[warp], block, false);
      for (int i = lane; i < block && col0 + i < depth; i += 32)
        tile[r * stride + col0 + i] = from_float<T>(scratch[warp][i]);
      __syncwarp();
    }
  }
}

// Element index of a row in the partial results: [split][head][row of all sequences]
__device__ inline int64_t partial_row(const Params& p, const DeviceSequence& s, int32_t split, int32_t head,
                                      int32_t row) {
  const bool packed = p.cu_seqlens_q != nullptr;
  const int64_t total = packed ? p.seqlen_q : static_cast<int64_t>(p.batch) * p.seqlen_q;
  const int64_t at = packed ? s.q_row0 + row : static_cast<int64_t>(s.batch) * p.seqlen_q + row;
  return (static_cast<int64_t>(split) * p.heads + head) * total + at;
}

// Final factor of a row's output, and its lse. The sink joins once: here, or where splits are merged.
__device__ inline float finish_row(const Params& p, int32_t head, float m, float l, float& lse) {
  float scale = 1;
  if (p.sinks != nullptr && p.max_splits == 1 && p.sinks[head] != -INFINITY) {
    const float sink = p.sinks[head];
    const float top = l > 0 ? fmaxf(m, sink) : sink;
    scale = l > 0 ? expf(m - top) : 0.0F;
    l = l * scale + expf(sink - top);
    m = top;
  }
  lse = l > 0 ? m + logf(l) : -INFINITY;
  return l > 0 ? scale / l : 0.0F;
}

// o, in the caller's domain, from shared memory to out or to the partial results.
__device__ inline void store_rows(const Params& p, const MmaBlock& b, const float* o, int stride, int col0,
                                  int width) {
  int replaced = 0;
  for (int i = static_cast<int>(threadIdx.x); i < b.rows * width; i += static_cast<int>(blockDim.x)) {
    const int r = i / width, c = i - r * width;
    const int32_t packed = b.row0 + r;
    const int32_t head = b.kv_head * p.group + packed % p.group, row = packed / p.group;
    const float value = o[r * stride + c];
    if (p.max_splits > 1) {
      p.partial_out[partial_row(p, b.s, b.split, head, row) * p.head_dim_v + col0 + c] = value;
    } else {
      replaced += store_guarded(p.out.data, p.out.index(b.s.batch, head, b.s.q_row0 + row) + col0 + c,
                                p.dtype, value, p.nan_guard);
    }
  }
  if (replaced > 0) atomicAdd(p.replaced, static_cast<unsigned long long>(replaced));
}

__device__ inline void store_lse(const Params& p, const MmaBlock& b, int32_t head, int32_t row, float lse) {
  if (p.max_splits > 1) {
    p.partial_lse[partial_row(p, b.s, b.split, head, row)] = lse;
  } else if (p.lse.data != nullptr) {
    static_cast<float*>(p.lse.data)[p.lse.index(b.s.batch, head, b.s.q_row0 + row)] = lse;
  }
}

template <typename T, int kColumns, int kKeys>
__global__ void __launch_bounds__(128)
    forward_mma_kernel(const __grid_constant__ Params p, const MmaShape shape) {
  extern __shared__ __align__(16) unsigned char shared[];
  const int tile_rows = static_cast<int>(blockDim.x) / 2;
  const int stride = shape.depth + kRowPad<T>;
  constexpr int kValueStride = kColumns + kRowPad<T>;
  T* query_tile = reinterpret_cast<T*>(shared);
  T* key_tile = query_tile + tile_rows * stride;
  T* value_tile = key_tile + kKeys * stride;

  const MmaBlock b = find_block(p, shape, tile_rows);
  if (b.rows == 0) return;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) & 31;
  const PlaneHead key_head = head_of(p.key, b.kv_head), value_head = head_of(p.value, b.kv_head);
  const int col0 = b.chunk * kColumns;

  load_query(query_tile, stride, p, b, tile_rows, shape.depth);
  RowScore rows[2];
  for (int half = 0; half < 2; ++half) {
    const int r = warp * 16 + lane / 4 + half * 8;
    if (r >= b.rows) continue;
    const int32_t packed = b.row0 + r;
    rows[half] = row_score(p, b.s, b.kv_head * p.group + packed % p.group, packed / p.group);
    rows[half].span = intersect(rows[half].span, b.keys);
  }
  const bool transformed = p.softcap != 0 || p.bias.data != nullptr || p.alibi_slopes.data != nullptr;

  float o[kColumns / 8][4] = {};
  float m[2] = {-INFINITY, -INFINITY}, l[2] = {0, 0};
  load_tile(key_tile, stride, p, b.s, p.key, key_head, b.keys, b.keys.begin, kKeys, 0, shape.depth);
  for (int64_t key0 = b.keys.begin; key0 < b.keys.end; key0 += kKeys) {
    copy_async_wait<0>();
    __syncthreads();  // K is here, and nobody reads the old V any more
    load_tile(value_tile, kValueStride, p, b.s, p.value, value_head, b.keys, key0, kKeys, col0, kColumns);
    float s[kKeys / 8][4] = {};
    rows_times_keys(s, query_tile + warp * 16 * stride, key_tile, stride, shape.depth);
    const bool masked = classify(b.keys, b.core, key0, key0 + kKeys) != TileClass::inside;
    score_tile(p, rows, s, key0, masked, transformed);
    float rescale[2];
    softmax_step(s, m, l, rescale);
#pragma unroll
    for (int c = 0; c < kColumns / 8; ++c) {
#pragma unroll
      for (int e = 0; e < 4; ++e) o[c][e] *= rescale[e / 2];
    }
    copy_async_wait<0>();
    __syncthreads();  // V is here, and nobody reads the old K any more
    if (key0 + kKeys < b.keys.end) {
      load_tile(key_tile, stride, p, b.s, p.key, key_head, b.keys, key0 + kKeys, kKeys, 0, shape.depth);
    }
    weights_times_rows(o, s, value_tile, kValueStride);
  }
  copy_async_wait<0>();
  __syncthreads();  // the tiles become the output's staging

  float* staged = reinterpret_cast<float*>(shared);
  constexpr int kStagedStride = kColumns + 4;
  for (int half = 0; half < 2; ++half) {
    const int r = warp * 16 + lane / 4 + half * 8;
    const int32_t packed = b.row0 + r;
    const int32_t head = b.kv_head * p.group + packed % p.group;
    float lse = 0;
    const float factor = finish_row(p, head < p.heads ? head : 0, m[half], quad_sum(l[half]), lse);
    if (b.chunk == 0 && r < b.rows && (lane & 3) == 0) store_lse(p, b, head, packed / p.group, lse);
#pragma unroll
    for (int c = 0; c < kColumns / 8; ++c) {
      staged[r * kStagedStride + c * 8 + 2 * (lane & 3)] = o[c][2 * half] * factor;
      staged[r * kStagedStride + c * 8 + 2 * (lane & 3) + 1] = o[c][2 * half + 1] * factor;
    }
  }
  __syncthreads();
  if (p.value.format == Format::tbq4) {
    const int blocks = kColumns / p.value.block;
    for (int i = warp; i < b.rows * blocks; i += static_cast<int>(blockDim.x) / 32) {
      rotate_block(staged + i / blocks * kStagedStride + i % blocks * p.value.block, p.value.block, true);
    }
    __syncthreads();
  }
  const int width = p.head_dim_v - col0 < kColumns ? p.head_dim_v - col0 : kColumns;
  store_rows(p, b, staged, kStagedStride, col0, width);
}

namespace detail {

template <typename T, int kColumns, int kKeys>
cudaError_t launch(const Params& p, const MmaShape& shape, cudaStream_t stream) {
  const int threads = shape.warps * 32;
  const int64_t blocks =
      max_row_tiles(p, shape.warps * 16, p.group) * p.kv_heads * p.max_splits * shape.chunks;
  if (blocks == 0) return cudaSuccess;
  const auto kernel = forward_mma_kernel<T, kColumns, kKeys>;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                 static_cast<int>(shape.shared_bytes));
  if (error != cudaSuccess) return error;
  kernel<<<static_cast<unsigned>(blocks), threads, shape.shared_bytes, stream>>>(p, shape);
  return cudaGetLastError();
}

template <typename T>
cudaError_t launch_forward_mma_as(const Params& p, const MmaShape& shape, cudaStream_t stream) {
  switch (mma_bucket(p.key.stored_dim, p.value.stored_dim)) {
    case 0:
      return launch<T, MmaTiles<T>::table[0].columns, MmaTiles<T>::table[0].keys>(p, shape, stream);
    case 1:
      return launch<T, MmaTiles<T>::table[1].columns, MmaTiles<T>::table[1].keys>(p, shape, stream);
    default:
      return launch<T, MmaTiles<T>::table[2].columns, MmaTiles<T>::table[2].keys>(p, shape, stream);
  }
}

}  // namespace detail
}  // namespace attnspan::cuda
