#pragma once
// The two sweeps of backward on mma.sync. A block keeps `warps * 16` keys (or query rows) and passes the
// other side by in steps:
//
//   dk, dv of keys:  s = key query^T,  dp = value dout^T,  dv += p dout,  dk += ds query   (p, ds transposed)
//   dq of rows:      s = query key^T,  dp = dout value^T,  dq += ds key
//
//   p = exp(s - lse),  ds = softmax_scale p (dp - delta) ds/dx

#include "cuda/backward_rows.cuh"
#include "cuda/products.cuh"
#include "cuda/score.cuh"

namespace attnspan::cuda {

// One head of a dense tensor, from the sequence's first row on.
struct RowSource {
  const uint8_t* first;
  int64_t row_bytes;
  int32_t dim;
  bool words;  // rows are whole words of 16 bytes
};

__device__ inline RowSource source_of(const void* data, int64_t offset, int64_t row_stride, int32_t dim,
                                      int size) {
  RowSource source{static_cast<const uint8_t*>(data) + offset * size, row_stride * size, dim, false};
  source.words =
      ((reinterpret_cast<int64_t>(source.first) | source.row_bytes | static_cast<int64_t>(dim) * size) &
       15) == 0;
  return source;
}

// tile[i][0 .. width) = row row0 + i; rows from `limit` on and columns beyond the dim become zeros.
template <typename T>
__device__ inline void load_rows(T* tile, int stride, const RowSource& from, int32_t row0, int32_t limit,
                                 int rows, int width) {
  constexpr int kUnit = 16 / sizeof(T);
  for (int row = static_cast<int>(threadIdx.x) / 8; row < rows; row += static_cast<int>(blockDim.x) / 8) {
    const T* source = reinterpret_cast<const T*>(from.first + (row0 + row) * from.row_bytes);
    const int columns = row0 + row < limit ? from.dim : 0;
    T* to = tile + row * stride;
    for (int c = static_cast<int>(threadIdx.x) % 8 * kUnit; c < width; c += 8 * kUnit) {
      if (from.words) {
        copy_async_16(shared_address(to + c), source + c, c < columns);
      } else {
#pragma unroll
        for (int i = 0; i < kUnit; ++i) to[c + i] = c + i < columns ? source[c + i] : from_float<T>(0.0F);
      }
    }
  }
}

// What a block works on: rows of its own side, of one head, and the steps of the other side.
struct MmaBackwardWork {
  DeviceSequence s;
  int32_t head = 0, chunk = 0;
  int32_t own0 = 0, own_rows = 0;  // the first, and how many there are in the tensor; 0: nothing to do
  int32_t own_limit = 0;           // rows of the sequence: those behind it (seqused_k) get zeros
  int32_t step_limit = 0;
  int32_t head0 = 0, heads = 1;  // query heads that pass, one after the other
  KeySpan steps;
};

template <bool kOwnsKeys>
__device__ inline MmaBackwardWork find_mma_work(const Params& p, const BackwardShape& shape) {
  const uint32_t heads = static_cast<uint32_t>(kOwnsKeys ? p.kv_heads : p.heads);
  const int32_t rows = static_cast<int32_t>(blockDim.x) / 2;
  const uint32_t block = blockIdx.x / shape.chunks;
  const RowTile tile =
      backward_tile(kOwnsKeys ? p.cu_seqlens_k : p.cu_seqlens_q, p.batch, rows, block / heads);
  MmaBackwardWork w;
  if (tile.batch < 0) return w;
  w.s = sequence_of(p, tile.batch);
  w.head = static_cast<int32_t>(block % heads);
  w.chunk = static_cast<int32_t>(blockIdx.x % shape.chunks);
  w.own0 = tile.tile * rows;
  w.own_limit = kOwnsKeys ? w.s.seqlen_k : w.s.seqlen_q;
  w.step_limit = kOwnsKeys ? w.s.seqlen_q : w.s.seqlen_k;
  w.head0 = kOwnsKeys ? w.head * p.group : w.head;
  w.heads = kOwnsKeys ? p.group : 1;
  const int32_t exist = kOwnsKeys && p.cu_seqlens_k == nullptr ? p.seqlen_k : w.own_limit;
  w.own_rows = min(rows, exist - w.own0);
  const int32_t last = min(w.own0 + rows, w.own_limit);
  if (w.own0 >= last) return w;
  w.steps = {span_of<kOwnsKeys>(w.s, w.own0).begin, span_of<kOwnsKeys>(w.s, last - 1).end};
  w.steps.begin -= w.steps.begin % kBackwardStep;  // statistics are read two at a time
  return w;
}

// softcap, bias and alibi of one query head.
struct HeadScore {
  float slope = 0;
  const float* bias = nullptr;
};
__device__ inline HeadScore head_score(const Params& p, int32_t batch, int32_t head) {
  HeadScore h;
  if (p.alibi_slopes.data != nullptr)
    h.slope = p.alibi_slopes.data[batch * p.alibi_slopes.batch_stride + head];
  if (p.bias.data != nullptr) h.bias = p.bias.data + batch * p.bias.batch_stride + head * p.bias.head_stride;
  return h;
}

// Turns a product and dp into p and ds (times softmax_scale), both 0 where the row does not see the key.
__device__ __forceinline__ void gradient_of_score(const Params& p, const HeadScore& h, RowStat stat,
                                                  int64_t diagonal, int32_t row, int32_t key, bool visible,
                                                  float& product, float& d_weight) {
  float x = product * p.softmax_scale, slope = p.softmax_scale;
  if (p.softcap != 0) {
    const float t = tanhf(x / p.softcap);
    x = p.softcap * t;
    slope *= 1 - t * t;
  }
  if (h.bias != nullptr && visible) {
    const float bias = h.bias[row * p.bias.row_stride + key * p.bias.key_stride];
    visible = bias > kMaskingBiasValue;
    x += bias;
  }
  x -= h.slope * fabsf(static_cast<float>(row + diagonal) - static_cast<float>(key));
  product = visible ? exp2f((x - stat.lse) * kLog2e) : 0.0F;
  d_weight = visible ? product * (d_weight - stat.delta) * slope : 0.0F;
}

// A constant depth of 64 unrolls: loads of the next columns run beside the products of these.
template <int kTiles, typename T>
__device__ __forceinline__ void products_of_rows(float (&s)[kTiles][4], const T* rows, const T* others,
                                                 int stride, int width) {
  for (int column = 0; column < width; column += 64)
    rows_times_keys(s, rows + column, others + column, stride, 64);
}

// What a warp keeps: sums over `columns` of one or two outputs, in halves of 64.
template <typename T, bool kOwnsKeys>
struct MmaBackward {
  static constexpr int kTiles = kBackwardStep / 8;

  const BackwardParams& b;
  const Params& p;
  const BackwardShape& shape;
  const MmaBackwardWork& w;
  int32_t own = 0;            // of this thread; its other row is 8 further
  KeySpan spans[2], core;     // steps that its rows see, or are seen by; that all rows of the block do
  RowStat own_stats[2] = {};  // dq: of this thread's rows
  float s[kTiles][4], dp[kTiles][4];
  float sum[2][8][4] = {}, value_sum[kOwnsKeys ? 2 : 1][8][4] = {};

  __device__ __forceinline__ MmaBackward(const BackwardParams& params, const BackwardShape& form,
                                         const MmaBackwardWork& work)
      : b(params), p(params.forward), shape(form), w(work) {
    const int lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) / 32;
    own = w.own0 + warp * 16 + lane / 4;
    const int32_t last = min(w.own0 + static_cast<int32_t>(blockDim.x) / 2, w.own_limit) - 1;
    if (last >= w.own0) core = {span_of<kOwnsKeys>(w.s, last).begin, span_of<kOwnsKeys>(w.s, w.own0).end};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (own + 8 * half >= w.own_limit) continue;
      spans[half] = span_of<kOwnsKeys>(w.s, own + 8 * half);
      if (!kOwnsKeys) own_stats[half] = stats_of(w.head)[own + 8 * half];
    }
  }
  __device__ __forceinline__ const RowStat* stats_of(int32_t head) const {
    return b.stats + head * b.stat_rows + stat_row0(p, w.s);
  }

  // Calls f(s, dp, statistics, half, index of the step's row) for every element.
  template <typename F>
  __device__ __forceinline__ void for_each(const RowStat* stats, int32_t step0, F f) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      const int32_t first = step0 + 8 * t + 2 * (static_cast<int>(threadIdx.x) & 3);
      RowStat step_stats[2] = {};
      if constexpr (kOwnsKeys) {
        const float4 two = *reinterpret_cast<const float4*>(stats + first);
        step_stats[0] = {two.x, two.y};
        step_stats[1] = {two.z, two.w};
      }
#pragma unroll
      for (int e = 0; e < 4; ++e)
        f(s[t][e], dp[t][e], kOwnsKeys ? step_stats[e & 1] : own_stats[e / 2], e / 2, first + (e & 1));
    }
  }

  // s and dp become p and ds.
  __device__ __forceinline__ void differentiate(int32_t head, int32_t step0) {
    const bool inside = core.begin <= step0 && step0 + kBackwardStep <= core.end;
    const bool plain = p.softcap == 0 && p.bias.data == nullptr && p.alibi_slopes.data == nullptr;
    const RowStat* stats = stats_of(head);
    if (inside && plain) {
      for_each(stats, step0, [&](float& weight, float& d_weight, RowStat stat, int, int32_t) {
        weight = exp2_approx(fmaf(weight, p.softmax_scale, -stat.lse) * kLog2e);
        d_weight = weight * (d_weight - stat.delta) * p.softmax_scale;
      });
    } else {
      const HeadScore score = head_score(p, w.s.batch, head);
      for_each(stats, step0, [&](float& weight, float& d_weight, RowStat stat, int half, int32_t other) {
        const int32_t mine = own + 8 * half;
        gradient_of_score(p, score, stat, w.s.rule.diagonal, kOwnsKeys ? other : mine,
                          kOwnsKeys ? mine : other, spans[half].contains(other), weight, d_weight);
      });
    }
  }

  // sums += weights times this block's columns of a tile.
  __device__ __forceinline__ void add(float (&sums)[2][8][4], const float (&weights)[kTiles][4],
                                      const T* tile, int stride, int dim) const {
    const int column = w.chunk * shape.columns;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (64 * half < shape.columns && column + 64 * half < dim)
        weights_times_rows(sums[half], weights, tile + column + 64 * half, stride);
    }
  }

  __device__ __forceinline__ void store(const DeviceRows& to, int dim, const float (&sums)[2][8][4]) const {
    int replaced = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t row = own + 8 * half;
      if (row >= w.own0 + w.own_rows) continue;
      const int64_t first = to.index(w.s.batch, w.head, (kOwnsKeys ? w.s.k_row0 : w.s.q_row0) + row);
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        const int in_chunk = i / 2 * 8 + 2 * (static_cast<int>(threadIdx.x) & 3) + i % 2;
        const int column = w.chunk * shape.columns + in_chunk;
        if (in_chunk >= shape.columns || column >= dim) continue;
        const float value = row < w.own_limit ? sums[i / 16][i / 2 % 8][2 * half + i % 2] : 0.0F;
        replaced += store_guarded(to.data, first + column, p.dtype, value, p.nan_guard);
      }
    }
    if (replaced > 0) atomicAdd(p.replaced, static_cast<unsigned long long>(replaced));
  }
};

// Tiles in shared memory: own rows, then the stages of steps; of each, the side of head_dim, then of
// head_dim_v.
template <typename T, bool kOwnsKeys>
struct MmaBackwardTiles {
  const BackwardParams& b;
  const BackwardShape& shape;
  const MmaBackwardWork& w;
  T* const shared;
  const int key_stride = shape.key_width + kRowPad<T>, value_stride = shape.value_width + kRowPad<T>;
  const int own_rows = static_cast<int>(blockDim.x) / 2;

  __device__ T* own_key_side() const { return shared; }
  __device__ T* own_value_side() const { return shared + own_rows * key_stride; }
  __device__ T* key_side(int stage) const {
    return shared + (own_rows + stage * kBackwardStep) * (key_stride + value_stride);
  }
  __device__ T* value_side(int stage) const { return key_side(stage) + kBackwardStep * key_stride; }

  // query or dout; key or value
  __device__ RowSource query_source(const DeviceRows& rows, int32_t dim, int32_t head) const {
    return source_of(rows.data, rows.index(w.s.batch, head, w.s.q_row0), rows.row_stride, dim, sizeof(T));
  }
  __device__ RowSource key_source(const KvPlane& plane, int32_t dim, int32_t head) const {
    const uint8_t* first = plane.codes + w.s.batch * plane.page_stride + head * plane.head_stride +
                           w.s.k_row0 * plane.token_stride;
    return source_of(first, 0, plane.token_stride / static_cast<int>(sizeof(T)), dim, sizeof(T));
  }

  __device__ void load_own() const {
    const Params& p = b.forward;
    const RowSource first =
        kOwnsKeys ? key_source(p.key, p.head_dim, w.head) : query_source(p.query, p.head_dim, w.head);
    const RowSource second =
        kOwnsKeys ? key_source(p.value, p.head_dim_v, w.head) : query_source(b.dout, p.head_dim_v, w.head);
    load_rows(own_key_side(), key_stride, first, w.own0, w.own_limit, own_rows, shape.key_width);
    load_rows(own_value_side(), value_stride, second, w.own0, w.own_limit, own_rows, shape.value_width);
  }
  __device__ void load_step(int stage, int32_t head, int32_t step0) const {
    const Params& p = b.forward;
    const int32_t kv_head = head / p.group;
    const RowSource first =
        kOwnsKeys ? query_source(p.query, p.head_dim, head) : key_source(p.key, p.head_dim, kv_head);
    const RowSource second =
        kOwnsKeys ? query_source(b.dout, p.head_dim_v, head) : key_source(p.value, p.head_dim_v, kv_head);
    load_rows(key_side(stage), key_stride, first, step0, w.step_limit, kBackwardStep, shape.key_width);
    load_rows(value_side(stage), value_stride, second, step0, w.step_limit, kBackwardStep, shape.value_width);
  }
};

template <typename T, bool kOwnsKeys>
__global__ void __launch_bounds__(128)
    backward_mma_kernel(const __grid_constant__ BackwardParams b, const BackwardShape shape) {
  extern __shared__ __align__(16) unsigned char dynamic[];
  const Params& p = b.forward;
  const MmaBackwardWork w = find_mma_work<kOwnsKeys>(p, shape);
  if (w.own_rows <= 0 || w.chunk * shape.columns >= max(p.head_dim, kOwnsKeys ? p.head_dim_v : 0)) return;
  const MmaBackwardTiles<T, kOwnsKeys> tiles{b, shape, w, reinterpret_cast<T*>(dynamic)};
  MmaBackward<T, kOwnsKeys> at(b, shape, w);
  const int row = static_cast<int>(threadIdx.x) / 32 * 16;

  const int32_t begin = static_cast<int32_t>(w.steps.begin), end = static_cast<int32_t>(w.steps.end);
  const int32_t passes = begin < end ? (end - begin + kBackwardStep - 1) / kBackwardStep : 0;
  const int32_t steps = passes * w.heads;
  const auto load = [&](int32_t step) {
    if (step < steps)
      tiles.load_step(step % shape.stages, w.head0 + step / passes, begin + step % passes * kBackwardStep);
    copy_async_commit();
  };
  if (steps > 0) tiles.load_own();
  load(0);
  for (int32_t step = 0; step < steps; ++step) {
    // With one stage the next step is loaded when this one is done.
    if (shape.stages == 2) {
      load(step + 1);
      copy_async_wait<1>();
    } else {
      copy_async_wait<0>();
    }
    __syncthreads();
    const int stage = step % shape.stages;
    const int32_t head = w.head0 + step / passes, step0 = begin + step % passes * kBackwardStep;
#pragma unroll
    for (int t = 0; t < kBackwardStep / 8; ++t) {
#pragma unroll
      for (int e = 0; e < 4; ++e) at.s[t][e] = at.dp[t][e] = 0;
    }
    products_of_rows(at.s, tiles.own_key_side() + row * tiles.key_stride, tiles.key_side(stage),
                     tiles.key_stride, shape.key_width);
    products_of_rows(at.dp, tiles.own_value_side() + row * tiles.value_stride, tiles.value_side(stage),
                     tiles.value_stride, shape.value_width);
    at.differentiate(head, step0);
    if constexpr (kOwnsKeys)
      at.add(at.value_sum, at.s, tiles.value_side(stage), tiles.value_stride, p.head_dim_v);
    at.add(at.sum, at.dp, tiles.key_side(stage), tiles.key_stride, p.head_dim);
    __syncthreads();  // nobody reads this stage any more
    if (shape.stages == 1) load(step + 1);
  }
  copy_async_wait<0>();
  at.store(kOwnsKeys ? b.dk : b.dq, p.head_dim, at.sum);
  if constexpr (kOwnsKeys) at.store(b.dv, p.head_dim_v, at.value_sum);
}

namespace detail {

template <typename T, bool kOwnsKeys>
cudaError_t launch_mma_sweep(const BackwardParams& b, const BackwardShape& shape, cudaStream_t stream) {
  const Params& p = b.forward;
  const int64_t rows = shape.warps * 16;
  const int64_t length = kOwnsKeys ? p.seqlen_k : p.seqlen_q, heads = kOwnsKeys ? p.kv_heads : p.heads;
  const int64_t tiles =
      p.cu_seqlens_q != nullptr ? length / rows + p.batch : (length + rows - 1) / rows * p.batch;
  const int64_t blocks = tiles * heads * shape.chunks;
  if (blocks == 0) return cudaSuccess;
  const auto kernel = backward_mma_kernel<T, kOwnsKeys>;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                 static_cast<int>(shape.shared_bytes));
  if (error != cudaSuccess) return error;
  kernel<<<static_cast<unsigned>(blocks), shape.warps * 32, shape.shared_bytes, stream>>>(b, shape);
  return cudaGetLastError();
}

template <typename T>
cudaError_t launch_backward_mma_as(const BackwardParams& b, const BackwardShape& shape, cudaStream_t stream) {
  const cudaError_t error = launch_mma_sweep<T, true>(b, shape, stream);
  return error != cudaSuccess ? error : launch_mma_sweep<T, false>(b, shape, stream);
}

}  // namespace detail
}  // namespace attnspan::cuda
