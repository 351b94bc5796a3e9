#include "cuda/tensor_map.hpp"

#include <cuda_runtime_api.h>

#include <limits>
#include <string>

#include "cuda/device.hpp"

namespace attnspan::cuda {
namespace {

using EncodeFunction = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                    const cuuint64_t*, const cuuint32_t*, const cuuint32_t*,
                                    CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                                    CUtensorMapFloatOOBfill);

EncodeFunction encode_function() {
  static const EncodeFunction function = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found{};
    check(
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found),
        "looking for cuTensorMapEncodeTiled in the driver");
    return found == cudaDriverEntryPointSuccess ? reinterpret_cast<EncodeFunction>(entry) : nullptr;
  }();
  return function;
}

bool stride_fits(int64_t extent, int64_t stride) {
  return extent <= 1 || (stride > 0 && stride % 8 == 0 && stride * 2 < (int64_t{1} << 40));
}

}  // namespace

bool tma_can_address(const TensorMapSpec& s) {
  const int64_t longest = std::numeric_limits<int32_t>::max();
  return reinterpret_cast<uintptr_t>(s.data) % 16 == 0 && s.rows <= longest && s.heads <= longest &&
         s.batch <= longest && s.rows > 0 && s.heads > 0 && s.batch > 0 &&
         stride_fits(s.rows, s.row_stride) && stride_fits(s.heads, s.head_stride) &&
         stride_fits(s.batch, s.batch_stride);
}

CUtensorMap make_tensor_map(const TensorMapSpec& s, int box_rows) {
  const EncodeFunction encode = encode_function();
  if (encode == nullptr) throw Error(ErrorCode::internal, "cuda", "the driver has no cuTensorMapEncodeTiled");
  const auto bytes = [](int64_t extent, int64_t stride) {
    return static_cast<cuuint64_t>(extent <= 1 ? 16 : stride * 2);
  };
  const cuuint64_t extents[4] = {static_cast<cuuint64_t>(s.dim), static_cast<cuuint64_t>(s.rows),
                                 static_cast<cuuint64_t>(s.heads), static_cast<cuuint64_t>(s.batch)};
  const cuuint64_t strides[3] = {bytes(s.rows, s.row_stride), bytes(s.heads, s.head_stride),
                                 bytes(s.batch, s.batch_stride)};
  const cuuint32_t box[4] = {64, static_cast<cuuint32_t>(box_rows), 1, 1};
  const cuuint32_t steps[4] = {1, 1, 1, 1};
  CUtensorMap map;
  const CUresult result = encode(
      &map, s.bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 4,
      const_cast<void*>(s.data), extents, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    throw Error(ErrorCode::internal, "cuda",
                "cuTensorMapEncodeTiled refused a tensor (error " + std::to_string(result) + ")");
  }
  return map;
}

}  // namespace attnspan::cuda
