#pragma once
// The portable forward kernel: every feature of the contract on sm_80 and later.

#include <cuda_runtime_api.h>

#include "cuda/params.hpp"

namespace attnspan::cuda {

// Block shape and shared memory of one launch.
struct MmaShape {
  int warps = 4;   // 16 rows each
  int depth = 0;   // stored width of a key, rounded up to 16
  int chunks = 1;  // of the value's columns; each repeats the scores
  size_t shared_bytes = 0;
};

// False where no shape fits the device's shared memory.
bool choose_mma_shape(const Params& p, int compute, size_t shared_limit, MmaShape& shape);
// compute: DType in which products are taken (f32: 3xTF32).
cudaError_t launch_forward_mma(const Params& p, int compute, const MmaShape& shape, cudaStream_t stream);

namespace detail {
template <typename T>
cudaError_t launch_forward_mma_as(const Params& p, const MmaShape& shape, cudaStream_t stream);
}

}  // namespace attnspan::cuda
