#pragma once
// Tensor maps for TMA, made through the driver (found at run time: nothing links against libcuda).

#include <cuda.h>

#include "cuda/params.hpp"

namespace attnspan::cuda {

// A 16-bit tensor (dim, rows, heads, batch) of which boxes of `box_rows` rows x 64 columns are loaded,
// swizzled by 128 bytes. Extents of 1 need no stride. False where TMA can't address it.
struct TensorMapSpec {
  const void* data = nullptr;
  bool bf16 = false;
  int64_t dim = 0, rows = 0, heads = 0, batch = 0;
  int64_t row_stride = 0, head_stride = 0, batch_stride = 0;  // in elements
};
bool tma_can_address(const TensorMapSpec& spec);
// Throws Error(internal) where the driver refuses.
CUtensorMap make_tensor_map(const TensorMapSpec& spec, int box_rows);

}  // namespace attnspan::cuda
