// lse and delta = rowsum(dout * out) - dlse of every query row, side by side, for the sweeps of backward.

#include "cuda/backward_rows.cuh"
#include "cuda/ptx.cuh"

namespace attnspan::cuda::detail {
namespace {

constexpr int kLanes = 8;  // a row: 8 columns each at a time
constexpr int kThreads = 256;

template <typename T>
struct Eight {
  float x[8];

  __device__ __forceinline__ Eight(const T* from, int count, bool wide) {
    if (wide) {
      union {
        uint4 words[sizeof(T) / 2];
        T values[8];
      } loaded;
#pragma unroll
      for (int i = 0; i < static_cast<int>(sizeof(T)) / 2; ++i)
        loaded.words[i] = reinterpret_cast<const uint4*>(from)[i];
#pragma unroll
      for (int i = 0; i < 8; ++i) x[i] = to_float(loaded.values[i]);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) x[i] = i < count ? to_float(from[i]) : 0.0F;
    }
  }
};

__device__ bool in_words(const Params& p, const DeviceRows& rows) {
  const int64_t size = p.dtype == 0 ? 4 : 2;
  return p.head_dim_v % 8 == 0 && ((reinterpret_cast<int64_t>(rows.data) | rows.batch_stride * size |
                                    rows.head_stride * size | rows.row_stride * size) &
                                   15) == 0;
}

template <typename T>
__device__ __forceinline__ void rows_of_tile(const BackwardParams& b, const DeviceSequence& s, int32_t head,
                                             int32_t row0, RowStat* stats) {
  constexpr int kRows = kStatRows / (kThreads / kLanes);  // of a thread; their loads are in flight together
  const Params& p = b.forward;
  const bool wide = in_words(p, p.out) && in_words(p, b.dout);
  const int lane = static_cast<int>(threadIdx.x) % kLanes,
            first = static_cast<int>(threadIdx.x) / kLanes * kRows;
  const int64_t at = s.q_row0 + row0 + first;
  const T* out = static_cast<const T*>(p.out.data) + p.out.index(s.batch, head, at);
  const T* dout = static_cast<const T*>(b.dout.data) + b.dout.index(s.batch, head, at);
  float delta[kRows] = {};
  for (int column = lane * 8; column < p.head_dim_v; column += kLanes * 8) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (row0 + first + r >= s.seqlen_q) continue;
      const Eight<T> x(out + r * p.out.row_stride + column, p.head_dim_v - column, wide);
      const Eight<T> y(dout + r * b.dout.row_stride + column, p.head_dim_v - column, wide);
#pragma unroll
      for (int i = 0; i < 8; ++i) delta[r] = fmaf(x.x[i], y.x[i], delta[r]);
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int d = kLanes / 2; d > 0; d /= 2) delta[r] += __shfl_xor_sync(0xffffffffU, delta[r], d);
    if (lane != r % kLanes) continue;
    RowStat stat{INFINITY, 0.0F};
    if (row0 + first + r < s.seqlen_q) {
      const float lse = static_cast<const float*>(p.lse.data)[p.lse.index(s.batch, head, at + r)];
      if (b.dlse.data != nullptr)
        delta[r] -= static_cast<const float*>(b.dlse.data)[b.dlse.index(s.batch, head, at + r)];
      // exp(s - inf) = 0: a row that sees nothing, and one that does not exist, has no weights.
      if (lse != -INFINITY) stat = {lse, delta[r]};
    }
    stats[first + r] = stat;
  }
}

// A block: kStatRows padded rows of one head.
__global__ void __launch_bounds__(kThreads) row_stats_kernel(const __grid_constant__ BackwardParams b) {
  start_dependents();
  const Params& p = b.forward;
  const int32_t head = static_cast<int32_t>(blockIdx.x) % p.heads;
  const RowTile tile = backward_tile(p.cu_seqlens_q, p.batch, kStatRows, blockIdx.x / p.heads);
  if (tile.batch < 0) return;
  const DeviceSequence s = sequence_of(p, tile.batch);
  const int32_t row0 = tile.tile * kStatRows;
  RowStat* stats = b.stats + head * b.stat_rows + stat_row0(p, s) + row0;
  if (p.dtype == 0) {
    rows_of_tile<float>(b, s, head, row0, stats);
  } else if (p.dtype == 1) {
    rows_of_tile<__half>(b, s, head, row0, stats);
  } else {
    rows_of_tile<__nv_bfloat16>(b, s, head, row0, stats);
  }
}

// d_sink = -sum over rows of exp(sink - lse) delta; one block a head, thread t sums rows t, t + kThreads, ...
__global__ void __launch_bounds__(kThreads) d_sinks_kernel(const __grid_constant__ BackwardParams b) {
  __shared__ double sums[kThreads];
  const Params& p = b.forward;
  const int64_t head = blockIdx.x;
  const float sink = p.sinks[head];
  double sum = 0;
  for (int64_t at = threadIdx.x; at < b.stat_rows; at += kThreads) {
    const RowStat stat = b.stats[head * b.stat_rows + at];
    if (stat.lse != INFINITY) sum -= static_cast<double>(expf(sink - stat.lse)) * stat.delta;
  }
  sums[threadIdx.x] = sum;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  if (threadIdx.x != 0) return;
  const float value = static_cast<float>(sums[0]);
  const bool replace = p.nan_guard && !isfinite(value);
  b.d_sinks[head] = replace ? 0.0F : value;
  if (replace) atomicAdd(p.replaced, 1ULL);
}

}  // namespace

cudaError_t launch_row_stats(const BackwardParams& b, cudaStream_t stream) {
  const int64_t blocks = b.stat_rows / kStatRows * b.forward.heads;
  if (blocks == 0) return cudaSuccess;
  row_stats_kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(b);
  return cudaGetLastError();
}

cudaError_t launch_d_sinks(const BackwardParams& b, cudaStream_t stream) {
  d_sinks_kernel<<<static_cast<unsigned>(b.forward.heads), kThreads, 0, stream>>>(b);
  return cudaGetLastError();
}

}  // namespace attnspan::cuda::detail
