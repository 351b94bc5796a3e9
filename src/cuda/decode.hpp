#pragma once
// Decode: few query rows against many keys, bound by the bytes of the cache.

#include <cuda_runtime_api.h>

#include "cuda/params.hpp"

namespace attnspan::cuda {

struct DecodePlan {
  bool ok = false;         // the kernels of decode.cuh run this problem
  bool quantised = false;  // K or V is q8 or tbq4
  int bucket = 0;          // 0, 1, 2: head dims up to 64, 128, 256
  int warps = 4;
  int tile_rows = 8;  // packed query rows of one block: 8 or 16
  int blocks_per_multiprocessor = 1;
  int resident_blocks = 1;  // on the whole device
  size_t shared_bytes = 0;
  bool overlap = false;  // programmatic launches exist (compute capability 9.0)
  int stages = 0;        // of the ring of copies of a warp
  // Quantised planes: bytes of codes and scales of a row.
  int key_row = 0, value_row = 0, key_scales = 0, value_scales = 0;
};

inline constexpr int kQuantisedStep = 32;  // keys of one step of a warp
// Decoding takes several times the instructions of 16-bit keys: as many warps as registers allow (12 x 32 x
// 168, or 8 x 32 x 255).
constexpr int quantised_warps(int dim, int tiles) { return tiles == 1 && dim <= 128 ? 12 : 8; }

DecodePlan plan_decode_kernel(const Params& p, size_t shared_limit, int multiprocessors, int major);
cudaError_t launch_decode(const Params& p, const DecodePlan& plan, cudaStream_t stream);

namespace detail {
template <typename T>
cudaError_t launch_decode_dense(const Params& p, const DecodePlan& plan, cudaStream_t stream);
cudaError_t launch_decode_quantised(const Params& p, const DecodePlan& plan, cudaStream_t stream);
}  // namespace detail

}  // namespace attnspan::cuda
