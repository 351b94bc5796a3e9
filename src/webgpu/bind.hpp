#pragma once
// From a Problem to what a shader sees: parameters in bytes, bindings that respect the device's alignment and
// limits, and the side inputs in one buffer (stages have 8 storage buffers by default).

#include <string>
#include <vector>

#include "core/problem.hpp"
#include "webgpu/params.hpp"
#include "webgpu/pipelines.hpp"

namespace attnspan::webgpu {

// How many of each index a tensor is read at.
struct Extent {
  int64_t batch = 1, heads = 1, rows = 1, dim = 1;
};

struct BoundRows {
  Binding binding;
  RowsParams params;
  Loader loader = Loader::f32_vec;
};

// Bytes from the first to the last element: what a binding must hold.
int64_t bytes_of(const Rows& rows, const Extent& extent, int64_t element_size);
int64_t code_bytes_of(const KvView& cache, const KvRows& rows);
int64_t side_bytes(const Problem& problem);

// Throws Error(unsupported) naming `name` where the tensor does not fit a binding.
BoundRows bind_rows(GpuDevice& device, const Rows& rows, const Extent& extent, DType dtype, const char* name);
// lse and dlse: one f32 a row
BoundRows bind_lse(GpuDevice& device, const Rows& rows, const Extent& extent, const char* name);
// The rows of a cache in its own format, and their scales (an empty binding for formats without).
BoundRows bind_cache_rows(GpuDevice& device, const KvView& cache, const KvRows& rows, const char* name);
BoundRows bind_cache_scales(GpuDevice& device, const KvView& cache, const KvRows& rows, const char* name);

// How a shader writes rows of this dtype, and reads them element by element.
Loader plain_loader(DType dtype);

// Shapes, mask and score transform; the strides of tensors are filled in by their users.
Params base_params(const Problem& problem);

// The side inputs as one binding; writes their offsets into `params`. Copies only where there are several.
Binding bind_side(GpuDevice& device, Commands& commands, const Problem& problem, Params& params);

// Two bindings of one buffer can't be mixed where one is written: WebGPU tracks whole buffers.
void require_distinct(const BoundRows& written, const char* name, const std::vector<BoundRows>& read);

}  // namespace attnspan::webgpu
