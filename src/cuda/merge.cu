#include "cuda/merge.hpp"

#include <algorithm>

#include "cuda/ptx.cuh"
#include "cuda/sequence.cuh"

namespace attnspan::cuda {
namespace {

constexpr int kThreads = 128;  // of merge_states
constexpr int kMaxWarps = 16;  // of merge_splits
constexpr int kAhead = 4;      // splits of a warp that are read at once

constexpr int kColumns = 4;            // of a lane
constexpr int kChunk = kColumns * 32;  // columns of a block

// One block a (row, head) and 128 columns. Warp w sums splits w, w + stride, ... in order and the sums of the
// warps are added in order: the same bits every time. A lane holds columns lane + 32 i.
__global__ void __launch_bounds__(32 * kMaxWarps)
    merge_splits_kernel(const __grid_constant__ Params p, int32_t stride) {
  __shared__ float sums[kMaxWarps][kChunk];
  __shared__ float weights[kMaxWarps];
  start_dependents();
  wait_for_predecessor();
  const bool packed = p.cu_seqlens_q != nullptr;
  const int64_t total = packed ? p.seqlen_q : static_cast<int64_t>(p.batch) * p.seqlen_q;
  const int64_t at = blockIdx.x % total;
  const int32_t head = static_cast<int32_t>(blockIdx.x / total);
  const int64_t batch = packed ? 0 : at / p.seqlen_q, row = packed ? at : at % p.seqlen_q;
  const int64_t split_stride = static_cast<int64_t>(p.heads) * total;
  const int64_t first = static_cast<int64_t>(head) * total + at;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) & 31;

  const int column0 = static_cast<int>(blockIdx.y) * kChunk;
  const int columns = p.head_dim_v - column0 < kChunk ? p.head_dim_v - column0 : kChunk;

  // The first splits' outputs travel while the maximum is found. A split without keys wrote none: what is
  // read there is not used.
  float parts[kAhead][kColumns];
#pragma unroll
  for (int a = 0; a < kAhead; ++a) {
    const int s = warp + a * stride;
    const float* part = p.partial_out + (first + s * split_stride) * p.head_dim_v + column0;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const int c = lane + 32 * i;
      parts[a][i] = s < p.max_splits && c < columns ? part[c] : 0.0F;
    }
  }
  const float sink = p.sinks != nullptr ? p.sinks[head] : -INFINITY;
  float top = sink;
  for (int s = lane; s < p.max_splits; s += 32) top = fmaxf(top, p.partial_lse[first + s * split_stride]);
  for (int d = 1; d < 32; d *= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffU, top, d));
  float sum = 0;
  float o[kColumns] = {};
  const auto weight_of = [&](int s) {
    const float lse = p.partial_lse[first + s * split_stride];
    return lse == -INFINITY ? 0.0F : exp2_approx((lse - top) * 1.4426950408889634F);
  };
#pragma unroll
  for (int a = 0; a < kAhead; ++a) {
    const int s = warp + a * stride;
    const float weight = s < p.max_splits ? weight_of(s) : 0.0F;
    sum += weight;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) o[i] += weight > 0 ? weight * parts[a][i] : 0.0F;
  }
#pragma unroll 4
  for (int s = warp + kAhead * stride; s < p.max_splits; s += stride) {
    const float weight = weight_of(s);
    const float* part = p.partial_out + (first + s * split_stride) * p.head_dim_v + column0;
    sum += weight;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const int c = lane + 32 * i;
      if (weight > 0 && c < columns) o[i] += weight * part[c];
    }
  }
  if (lane == 0) weights[warp] = sum;
#pragma unroll
  for (int i = 0; i < kColumns; ++i) sums[warp][lane + 32 * i] = o[i];
  __syncthreads();
  const int warps = static_cast<int>(blockDim.x) / 32;
  sum = sink == -INFINITY ? 0.0F : exp2_approx((sink - top) * 1.4426950408889634F);
  for (int w = 0; w < warps; ++w) sum += weights[w];
  const float factor = sum > 0 ? 1.0F / sum : 0.0F;
  const int64_t to = p.out.index(batch, head, row) + column0;
  int replaced = 0;
  for (int c = static_cast<int>(threadIdx.x); c < columns; c += static_cast<int>(blockDim.x)) {
    float value = 0;
    for (int w = 0; w < warps; ++w) value += sums[w][c];
    replaced += store_guarded(p.out.data, to + c, p.dtype, value * factor, p.nan_guard);
  }
  if (replaced > 0) atomicAdd(p.replaced, static_cast<unsigned long long>(replaced));
  if (threadIdx.x == 0 && column0 == 0 && p.lse.data != nullptr) {
    static_cast<float*>(p.lse.data)[p.lse.index(batch, head, row)] = sum > 0 ? top + logf(sum) : -INFINITY;
  }
}

// One warp a row. Every lane reads both lse before lane 0 writes: they may be one tensor.
__global__ void __launch_bounds__(kThreads) merge_states_kernel(const __grid_constant__ MergeParams p) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32;
  if (index >= static_cast<int64_t>(p.batch) * p.heads * p.rows) return;
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const int64_t row = index % p.rows, head = index / p.rows % p.heads, batch = index / p.rows / p.heads;
  const float a = static_cast<const float*>(p.lse_a.data)[p.lse_a.index(batch, head, row)];
  const float b = static_cast<const float*>(p.lse_b.data)[p.lse_b.index(batch, head, row)];
  const float top = fmaxf(a, b);
  const float weight_a = a == -INFINITY ? 0.0F : expf(a - top);
  const float weight_b = b == -INFINITY ? 0.0F : expf(b - top);
  const float sum = weight_a + weight_b;
  const float factor = sum > 0 ? 1.0F / sum : 0.0F;
  const int64_t from_a = p.out_a.index(batch, head, row), from_b = p.out_b.index(batch, head, row);
  const int64_t to = p.out.index(batch, head, row);
  for (int c = lane; c < p.head_dim_v; c += 32) {
    // An empty state's output is not read into the sum: it may be anything.
    const float value_a = weight_a > 0 ? weight_a * load_element(p.out_a.data, from_a + c, p.dtype) : 0.0F;
    const float value_b = weight_b > 0 ? weight_b * load_element(p.out_b.data, from_b + c, p.dtype) : 0.0F;
    store_element(p.out.data, to + c, p.dtype, (value_a + value_b) * factor);
  }
  __syncwarp();
  if (lane == 0) {
    static_cast<float*>(p.lse.data)[p.lse.index(batch, head, row)] = sum > 0 ? top + logf(sum) : -INFINITY;
  }
}

}  // namespace

cudaError_t launch_merge_splits(const Params& p, bool overlap, cudaStream_t stream) {
  const int64_t rows = p.cu_seqlens_q != nullptr ? p.seqlen_q : static_cast<int64_t>(p.batch) * p.seqlen_q;
  if (rows * p.heads == 0) return cudaSuccess;
  // Enough warps that each reads its splits at once; their number must not depend on the batch.
  const int stride = std::clamp((p.split_target + kAhead - 1) / kAhead, 1, kMaxWarps);
  // Its blocks may start while the splits are still running; the kernel waits for them by itself.
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(rows * p.heads),
                        static_cast<unsigned>((p.head_dim_v + kChunk - 1) / kChunk));
  config.blockDim = dim3(static_cast<unsigned>(32 * std::min(stride, p.max_splits)));
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = overlap ? 1 : 0;
  return cudaLaunchKernelEx(&config, merge_splits_kernel, p, stride);
}

cudaError_t launch_merge_states(const MergeParams& p, cudaStream_t stream) {
  const int64_t rows = static_cast<int64_t>(p.batch) * p.heads * p.rows;
  if (rows == 0) return cudaSuccess;
  const int64_t blocks = (rows + kThreads / 32 - 1) / (kThreads / 32);
  merge_states_kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace attnspan::cuda
