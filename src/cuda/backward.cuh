#pragma once
// p = exp(s - lse), ds = p (dout . v - delta) ds/dx, dq = scale ds k, dk = scale ds^T q, dv = p^T dout.

#include "cuda/backward_rows.cuh"
#include "cuda/kv_loader.cuh"
#include "cuda/products.cuh"
#include "cuda/score.cuh"

namespace attnspan::cuda {

// What one (query row, key) needs besides the products.
struct RowGradient {
  int32_t begin = 0, end = 0;  // its span; empty for rows that do not exist or see nothing
  float lse = 0, delta = 0, slope = 0, position = 0;
  const float* bias = nullptr;
};

__device__ inline RowGradient row_gradient(const BackwardParams& b, const DeviceSequence& s, int32_t head,
                                           int32_t row) {
  const Params& p = b.forward;
  RowGradient r;
  if (row >= s.seqlen_q) return r;
  const RowStat stat = b.stats[head * b.stat_rows + stat_row0(p, s) + row];
  r.lse = stat.lse;
  r.delta = stat.delta;
  const RowScore score = row_score(p, s, head, row);
  if (score.span.empty()) return r;
  r.begin = static_cast<int32_t>(score.span.begin);
  r.end = static_cast<int32_t>(score.span.end);
  r.slope = score.slope;
  r.position = score.position;
  r.bias = score.bias;
  return r;
}

// Turns a product and d p into p and d s (times softmax_scale), both 0 outside the row's span.
__device__ __forceinline__ void gradient_of_score(const Params& p, const RowGradient& r, int32_t key,
                                                  float& product, float& d_weight) {
  float x = product * p.softmax_scale, slope = p.softmax_scale;
  bool visible = key >= r.begin && key < r.end;
  if (p.softcap != 0) {
    const float t = tanhf(x / p.softcap);
    x = p.softcap * t;
    slope *= 1 - t * t;
  }
  if (r.bias != nullptr && visible) {
    const float bias = r.bias[key * p.bias.key_stride];
    visible = bias > kMaskingBiasValue;
    x += bias;
  }
  x -= r.slope * fabsf(r.position - static_cast<float>(key));
  product = visible ? exp2f((x - r.lse) * kLog2e) : 0.0F;
  d_weight = visible ? product * (d_weight - r.delta) * slope : 0.0F;
}

// The block's place: which sequence, head, tile and chunk of columns.
struct BackwardBlock {
  DeviceSequence s;  // of keys; `queries` has the query side's first row in k_row0, for load_tile
  DeviceSequence queries;
  int32_t head = 0, chunk = 0, tile = 0;
};

__device__ inline BackwardBlock find_backward_block(const Params& p, int32_t heads, int32_t chunks,
                                                    int32_t tiles) {
  BackwardBlock b;
  int64_t index = blockIdx.x;
  b.chunk = static_cast<int32_t>(index % chunks);
  index /= chunks;
  b.head = static_cast<int32_t>(index % heads);
  index /= heads;
  b.tile = static_cast<int32_t>(index % tiles);
  b.s = sequence_of(p, static_cast<int32_t>(index / tiles));
  b.queries = b.s;
  b.queries.k_row0 = b.s.q_row0;
  return b;
}

// A query-side tensor as a plane for load_tile.
__device__ inline KvPlane plane_of_rows(const DeviceRows& rows, int32_t dtype, int32_t dim) {
  KvPlane plane;
  const int64_t size = dtype == 0 ? 4 : 2;
  plane.codes = static_cast<const uint8_t*>(rows.data);
  plane.format = static_cast<Format>(dtype);  // f32, f16 and bf16 have the numbers of DType
  plane.dim = plane.stored_dim = dim;
  plane.page_stride = rows.batch_stride * size;
  plane.head_stride = rows.head_stride * size;
  plane.token_stride = rows.row_stride * size;
  plane.aligned =
      ((plane.page_stride | plane.head_stride | plane.token_stride | reinterpret_cast<int64_t>(plane.codes)) &
       15) == 0;
  return plane;
}

template <int kColumns>
__device__ inline void store_accumulators(const Params& p, const DeviceRows& to, int32_t batch, int32_t head,
                                          int64_t row0, int rows, int col0, int dim,
                                          const float (&x)[kColumns / 8][4]) {
  const int lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) / 32;
  int replaced = 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int r = warp * 16 + lane / 4 + 8 * half;
    if (r >= rows) continue;
    const int64_t first = to.index(batch, head, row0 + r);
#pragma unroll
    for (int c = 0; c < kColumns / 8; ++c) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int column = col0 + c * 8 + 2 * (lane & 3) + e;
        if (column < dim)
          replaced += store_guarded(to.data, first + column, p.dtype, x[c][2 * half + e], p.nan_guard);
      }
    }
  }
  if (replaced > 0) atomicAdd(p.replaced, static_cast<unsigned long long>(replaced));
}

// dq of `warps * 16` rows of one head: over the keys that they see.
template <typename T, int kColumns>
__global__ void __launch_bounds__(128)
    backward_query_kernel(const __grid_constant__ BackwardParams b, const BackwardShape shape) {
  extern __shared__ __align__(16) unsigned char shared[];
  const Params& p = b.forward;
  const int tile_rows = static_cast<int>(blockDim.x) / 2;
  const BackwardBlock at =
      find_backward_block(p, p.heads, shape.chunks, (p.seqlen_q + tile_rows - 1) / tile_rows);
  const int32_t row0 = at.tile * tile_rows;
  const int32_t rows = min(tile_rows, at.s.seqlen_q - row0);
  if (rows <= 0 || at.chunk * kColumns >= p.head_dim) return;
  const int key_stride = shape.key_width + kRowPad<T>, value_stride = shape.value_width + kRowPad<T>;
  const int depth = (p.head_dim + 15) / 16 * 16, depth_v = (p.head_dim_v + 15) / 16 * 16;
  T* query = reinterpret_cast<T*>(shared);
  T* dout = query + tile_rows * key_stride;
  T* key = dout + tile_rows * value_stride;
  T* value = key + kBackwardStep * key_stride;

  const KvPlane query_plane = plane_of_rows(p.query, p.dtype, p.head_dim);
  const KvPlane dout_plane = plane_of_rows(b.dout, p.dtype, p.head_dim_v);
  const KeySpan own{row0, row0 + rows};
  load_tile(query, key_stride, p, at.queries, query_plane, head_of(query_plane, at.head), own, row0,
            tile_rows, 0, shape.key_width);
  load_tile(dout, value_stride, p, at.queries, dout_plane, head_of(dout_plane, at.head), own, row0, tile_rows,
            0, shape.value_width);
  const int lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) / 32;
  RowGradient gradient[2];
#pragma unroll
  for (int half = 0; half < 2; ++half)
    gradient[half] = row_gradient(b, at.s, at.head, row0 + warp * 16 + lane / 4 + 8 * half);

  const int32_t kv_head = at.head / p.group;
  const KeySpan keys = at.s.rule.hull(row0, row0 + rows);
  float dq[kColumns / 8][4] = {};
  for (int64_t key0 = keys.begin; key0 < keys.end; key0 += kBackwardStep) {
    __syncthreads();  // nobody reads the old tiles any more
    load_tile(key, key_stride, p, at.s, p.key, head_of(p.key, kv_head), keys, key0, kBackwardStep, 0,
              shape.key_width);
    load_tile(value, value_stride, p, at.s, p.value, head_of(p.value, kv_head), keys, key0, kBackwardStep, 0,
              shape.value_width);
    copy_async_wait<0>();
    __syncthreads();
    float s[kBackwardStep / 8][4] = {}, ds[kBackwardStep / 8][4] = {};
    rows_times_keys(s, query + warp * 16 * key_stride, key, key_stride, depth);
    rows_times_keys(ds, dout + warp * 16 * value_stride, value, value_stride, depth_v);
#pragma unroll
    for (int t = 0; t < kBackwardStep / 8; ++t) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        gradient_of_score(p, gradient[e / 2], static_cast<int32_t>(key0) + 8 * t + 2 * (lane & 3) + (e & 1),
                          s[t][e], ds[t][e]);
      }
    }
    weights_times_rows(dq, ds, key + at.chunk * kColumns, key_stride);
  }
  store_accumulators<kColumns>(p, b.dq, at.s.batch, at.head, at.s.q_row0 + row0, rows, at.chunk * kColumns,
                               p.head_dim, dq);
}

// dk and dv of `warps * 16` keys of one KV head: over the query heads of its group, in order, and the rows
// that see the keys.
template <typename T, int kColumns>
__global__ void __launch_bounds__(128)
    backward_key_kernel(const __grid_constant__ BackwardParams b, const BackwardShape shape) {
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ RowGradient gradients[kBackwardStep];
  const Params& p = b.forward;
  const int tile_keys = static_cast<int>(blockDim.x) / 2;
  const BackwardBlock at =
      find_backward_block(p, p.kv_heads, shape.chunks, (p.seqlen_k + tile_keys - 1) / tile_keys);
  const int32_t tile0 = at.tile * tile_keys;
  // Rows beyond seqused_k exist in dk and dv, and become zeros.
  const int32_t stored = min(tile_keys, (p.cu_seqlens_k != nullptr ? at.s.seqlen_k : p.seqlen_k) - tile0);
  if (stored <= 0) return;
  const int key_stride = shape.key_width + kRowPad<T>, value_stride = shape.value_width + kRowPad<T>;
  const int depth = (p.head_dim + 15) / 16 * 16, depth_v = (p.head_dim_v + 15) / 16 * 16;
  T* key = reinterpret_cast<T*>(shared);
  T* value = key + tile_keys * key_stride;
  T* query = value + tile_keys * value_stride;
  T* dout = query + kBackwardStep * key_stride;
  const KeySpan own{tile0, min(tile0 + tile_keys, at.s.seqlen_k)};
  load_tile(key, key_stride, p, at.s, p.key, head_of(p.key, at.head), own, tile0, tile_keys, 0,
            shape.key_width);
  load_tile(value, value_stride, p, at.s, p.value, head_of(p.value, at.head), own, tile0, tile_keys, 0,
            shape.value_width);

  const KvPlane query_plane = plane_of_rows(p.query, p.dtype, p.head_dim);
  const KvPlane dout_plane = plane_of_rows(b.dout, p.dtype, p.head_dim_v);
  const KeySpan all_rows{0, at.s.seqlen_q};
  const int lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) / 32;
  const KeySpan rows = own.empty()
                           ? KeySpan{}
                           : KeySpan{rows_of_key(at.s, own.begin).begin, rows_of_key(at.s, own.end - 1).end};
  float dk[kColumns / 8][4] = {}, dv[kColumns / 8][4] = {};
  for (int32_t head = at.head * p.group; head < (at.head + 1) * p.group; ++head) {
    for (int32_t row0 = static_cast<int32_t>(rows.begin); row0 < rows.end; row0 += kBackwardStep) {
      __syncthreads();  // nobody reads the old tiles any more
      load_tile(query, key_stride, p, at.queries, query_plane, head_of(query_plane, head), all_rows, row0,
                kBackwardStep, 0, shape.key_width);
      load_tile(dout, value_stride, p, at.queries, dout_plane, head_of(dout_plane, head), all_rows, row0,
                kBackwardStep, 0, shape.value_width);
      if (threadIdx.x < kBackwardStep)
        gradients[threadIdx.x] = row_gradient(b, at.s, head, row0 + static_cast<int32_t>(threadIdx.x));
      copy_async_wait<0>();
      __syncthreads();
      float s[kBackwardStep / 8][4] = {}, ds[kBackwardStep / 8][4] = {};  // transposed: [key][row]
      rows_times_keys(s, key + warp * 16 * key_stride, query, key_stride, depth);
      rows_times_keys(ds, value + warp * 16 * value_stride, dout, value_stride, depth_v);
#pragma unroll
      for (int t = 0; t < kBackwardStep / 8; ++t) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int32_t at_key = tile0 + warp * 16 + lane / 4 + 8 * (e / 2);
          gradient_of_score(p, gradients[8 * t + 2 * (lane & 3) + (e & 1)], at_key, s[t][e], ds[t][e]);
        }
      }
      if (at.chunk * kColumns < p.head_dim_v)
        weights_times_rows(dv, s, dout + at.chunk * kColumns, value_stride);
      if (at.chunk * kColumns < p.head_dim)
        weights_times_rows(dk, ds, query + at.chunk * kColumns, key_stride);
    }
  }
  copy_async_wait<0>();
  const int64_t to = at.s.k_row0 + tile0;
  store_accumulators<kColumns>(p, b.dk, at.s.batch, at.head, to, stored, at.chunk * kColumns, p.head_dim, dk);
  store_accumulators<kColumns>(p, b.dv, at.s.batch, at.head, to, stored, at.chunk * kColumns, p.head_dim_v,
                               dv);
}

namespace detail {

template <typename Kernel>
cudaError_t start_backward(Kernel kernel, const BackwardParams& b, const BackwardShape& shape, int64_t blocks,
                           int threads, size_t shared_bytes, cudaStream_t stream) {
  if (blocks == 0) return cudaSuccess;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                 static_cast<int>(shared_bytes));
  if (error != cudaSuccess) return error;
  kernel<<<static_cast<unsigned>(blocks), threads, shared_bytes, stream>>>(b, shape);
  return cudaGetLastError();
}

template <typename T, int kColumns>
cudaError_t launch_sweeps(const BackwardParams& b, const BackwardShape& shape, cudaStream_t stream) {
  const Params& p = b.forward;
  const int64_t rows = shape.warps * 16, sequences = static_cast<int64_t>(p.batch) * shape.chunks;
  const cudaError_t error = start_backward(backward_query_kernel<T, kColumns>, b, shape,
                                           sequences * p.heads * ((p.seqlen_q + rows - 1) / rows),
                                           shape.warps * 32, shape.shared_bytes, stream);
  if (error != cudaSuccess) return error;
  return start_backward(backward_key_kernel<T, kColumns>, b, shape,
                        sequences * p.kv_heads * ((p.seqlen_k + rows - 1) / rows), shape.warps * 32,
                        shape.shared_bytes, stream);
}

template <typename T>
cudaError_t launch_backward_as(const BackwardParams& b, const BackwardShape& shape, cudaStream_t stream) {
  return shape.columns == 64 ? launch_sweeps<T, 64>(b, shape, stream)
                             : launch_sweeps<T, 128>(b, shape, stream);
}

}  // namespace detail
}  // namespace attnspan::cuda
