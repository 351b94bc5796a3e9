#pragma once
// Joining softmax states: the splits of one decode, and the public merge_states.

#include <cuda_runtime_api.h>

#include "cuda/params.hpp"

namespace attnspan::cuda {

// Partial states of Params::max_splits splits -> out and lse, sinks included. `overlap`: on sm_90 and later
// it may be launched before the kernel in front of it has ended.
cudaError_t launch_merge_splits(const Params& p, bool overlap, cudaStream_t stream);

struct MergeParams {
  int32_t dtype = 0;
  int32_t batch = 0, heads = 0, rows = 0, head_dim_v = 0;
  DeviceRows out_a, lse_a, out_b, lse_b, out, lse;
};
cudaError_t launch_merge_states(const MergeParams& p, cudaStream_t stream);

}  // namespace attnspan::cuda
