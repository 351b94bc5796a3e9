#include "attnspan/tensor.hpp"

#include <utility>

namespace attnspan {

const char* name_of(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return "f32";
    case DType::f16:
      return "f16";
    case DType::bf16:
      return "bf16";
    case DType::i32:
      return "int32";
  }
  return "unknown dtype";
}

const char* name_of(Device device) {
  switch (device) {
    case Device::cpu:
      return "cpu";
    case Device::cuda:
      return "cuda";
    case Device::webgpu:
      return "webgpu";
    case Device::metal:
      return "metal";
  }
  return "unknown device";
}

std::string Tensor::shape_text() const {
  std::string text = "[";
  for (int i = 0; i < rank; ++i) text += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  return text + "]";
}

Tensor contiguous(const void* data, DType dtype, std::initializer_list<int64_t> shape, Device device) {
  Tensor tensor;
  tensor.data = const_cast<void*>(data);
  tensor.dtype = dtype;
  tensor.device = device;
  for (int64_t extent : shape) tensor.shape[tensor.rank++] = extent;
  int64_t stride = 1;
  for (int i = tensor.rank - 1; i >= 0; --i) {
    tensor.stride[i] = stride;
    stride *= tensor.shape[i];
  }
  return tensor;
}

Tensor bshd(const void* data, DType dtype, int64_t batch, int64_t seqlen, int64_t heads, int64_t dim,
            Device device) {
  return contiguous(data, dtype, {batch, seqlen, heads, dim}, device);
}

Tensor bhsd(const void* data, DType dtype, int64_t batch, int64_t seqlen, int64_t heads, int64_t dim,
            Device device) {
  return transposed(contiguous(data, dtype, {batch, heads, seqlen, dim}, device), 1, 2);
}

Tensor transposed(const Tensor& tensor, int dim_a, int dim_b) {
  Tensor result = tensor;
  std::swap(result.shape[dim_a], result.shape[dim_b]);
  std::swap(result.stride[dim_a], result.stride[dim_b]);
  return result;
}

}  // namespace attnspan
