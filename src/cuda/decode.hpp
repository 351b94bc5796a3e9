#pragma once
// Decode: few query rows against many keys, bound by the bytes of the cache.

#include <cuda_runtime_api.h>

#include "cuda/device.hpp"
#include "cuda/params.hpp"
#include "cuda/tiles.hpp"

namespace attnspan::cuda {

// How the work is dealt: a unit is a run of splits of one (sequence, KV head, tile of rows).
struct DecodeGrid {
  uint32_t units = 0;
  int32_t runs = 1;        // of a sequence
  int32_t run_splits = 1;  // of a run
  int32_t stages = 0;      // of a warp's ring (quantised caches)
};

struct DecodePlan {
  bool ok = false;         // the kernels of decode.cuh run this problem
  bool quantised = false;  // K or V is q8 or tbq4
  bool mla = false;        // values are the first 512 of 576 columns of keys
  int dim = 0;             // of the kernel: 64, 128 or 256
  int tile_rows = 8;       // packed query rows of a unit: 8 or 16
  int warps = kTeamWarps;  // of a team
  int teams = 1;           // of a block
  int blocks_per_multiprocessor = 1;
  size_t shared_bytes = 0;
  int32_t min_split_keys = 0;
  bool overlap = false;  // programmatic launches exist (compute capability 9.0)
  DecodeGrid grid;
  int64_t blocks = 0;
};

DecodePlan plan_decode_kernel(const Params& p, const DeviceLimits& device);
// Deals the splits of p, which are known now.
void plan_decode_grid(DecodePlan& plan, const Params& p, const DeviceLimits& device);
cudaError_t launch_decode(const Params& p, const DecodePlan& plan, cudaStream_t stream);

namespace detail {
cudaError_t launch_decode_dense(const Params& p, const DecodePlan& plan, cudaStream_t stream);
cudaError_t launch_decode_mla(const Params& p, const DecodePlan& plan, cudaStream_t stream);
cudaError_t launch_decode_quantised(const Params& p, const DecodePlan& plan, cudaStream_t stream);
}  // namespace detail

}  // namespace attnspan::cuda
