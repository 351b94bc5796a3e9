#pragma once
// Backward on Hopper: wgmma on tiles that TMA loads, for 16-bit head dims up to 128.

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "cuda/params.hpp"

namespace attnspan::cuda {

bool backward_sm90_runs(const BackwardParams& b, int major);
cudaError_t launch_backward_sm90(const BackwardParams& b, cudaStream_t stream);

namespace detail {

// One sweep's: `own` are the tensors of which a block keeps 128 rows, `step` those that pass in steps.
struct Sm90BackwardArgs {
  CUtensorMap own[2], step[2];
  BackwardParams b;
  int64_t blocks = 0;
  bool zero_tail = false;  // rows beyond a sequence belong to others and may be no numbers
};
template <typename T>
cudaError_t launch_backward_sm90_as(const Sm90BackwardArgs& keys, const Sm90BackwardArgs& queries, int dim,
                                    cudaStream_t stream);

}  // namespace detail
}  // namespace attnspan::cuda
