#pragma once
// Backward: statistics of rows, then two sweeps, each with one owner for every output value and a fixed order
// of sums, so that results are bitwise the same from run to run: dk and dv over query rows, dq over keys. On
// Hopper by backward_sm90.hpp, elsewhere and for other head dims by mma.sync.

#include <cuda_runtime_api.h>

#include "core/problem.hpp"
#include "cuda/device.hpp"
#include "cuda/params.hpp"

namespace attnspan::cuda {

// Of the mma.sync kernels.
struct BackwardShape {
  int warps = 4;                       // 16 rows, or keys, each
  int stages = 2;                      // of steps in shared memory
  int columns = 0;                     // of an output that one block accumulates: 64 or 128
  int chunks = 1;                      // blocks along the columns of outputs; each repeats the scores
  int key_width = 0, value_width = 0;  // of tiles in shared memory
  size_t shared_bytes = 0;
};

struct BackwardPlan {
  BackwardParams params;
  BackwardShape shape;
  Support support;
  bool sm90 = false;  // the kernels of Hopper run it
  size_t stat_bytes = 0;

  size_t scratch_bytes() const;
};

BackwardPlan plan_backward(const Problem& problem, const DeviceLimits& device);
int64_t run_backward(BackwardPlan plan, const Execution& execution);

inline constexpr int kBackwardStep = 32;  // rows or keys that one step loads

namespace detail {
cudaError_t launch_row_stats(const BackwardParams& b, cudaStream_t stream);
cudaError_t launch_d_sinks(const BackwardParams& b, cudaStream_t stream);
template <typename T>
cudaError_t launch_backward_mma_as(const BackwardParams& b, const BackwardShape& shape, cudaStream_t stream);
}  // namespace detail

}  // namespace attnspan::cuda
