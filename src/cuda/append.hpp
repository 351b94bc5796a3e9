#pragma once
// New tokens into the pages of a cache on the device.

#include <cuda_runtime_api.h>

#include "cuda/params.hpp"

namespace attnspan::cuda {

struct AppendParams {
  Params cache;           // its planes, table and first positions
  DeviceRows key, value;  // [batch, tokens, kv_heads, dim]; no value where values are keys
  int32_t dtype = 0;      // of both
  int32_t tokens = 0;
  const int32_t* start = nullptr;  // [batch]: the position of each sequence's first new token
  int64_t start_stride = 1;
  bool quality = true;           // tbq4's encoder
  int32_t* saturated = nullptr;  // scales beyond f16 are added to it, where given
};
cudaError_t launch_append(const AppendParams& a, cudaStream_t stream);

}  // namespace attnspan::cuda
