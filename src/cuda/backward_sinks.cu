// The gradient of the sinks.

#include "cuda/backward.hpp"
#include "cuda/ptx.cuh"

namespace attnspan::cuda::detail {
namespace {

constexpr int kThreads = 256;

// d_sink = -sum over rows of exp(sink - lse) delta; one block a head, thread t sums rows t, t + kThreads, ...
__global__ void __launch_bounds__(kThreads)
    d_sinks_kernel(const __grid_constant__ BackwardParams b, int64_t total) {
  __shared__ double sums[kThreads];
  const Params& p = b.forward;
  const int64_t head = blockIdx.x;
  const bool packed = p.cu_seqlens_q != nullptr;
  const float sink = p.sinks[head];
  double sum = 0;
  for (int64_t at = threadIdx.x; at < total; at += kThreads) {
    const int64_t batch = packed ? 0 : at / p.seqlen_q, row = packed ? at : at % p.seqlen_q;
    const float lse = static_cast<const float*>(p.lse.data)[p.lse.index(batch, head, row)];
    if (lse != -INFINITY) sum -= static_cast<double>(expf(sink - lse)) * b.delta[head * total + at];
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

int64_t total_rows(const Params& p) {
  return p.cu_seqlens_q != nullptr ? p.seqlen_q : static_cast<int64_t>(p.batch) * p.seqlen_q;
}

}  // namespace

cudaError_t launch_d_sinks(const BackwardParams& b, cudaStream_t stream) {
  d_sinks_kernel<<<static_cast<unsigned>(b.forward.heads), kThreads, 0, stream>>>(b, total_rows(b.forward));
  return cudaGetLastError();
}

}  // namespace attnspan::cuda::detail
