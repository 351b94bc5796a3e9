#include "io/tensor_buffer.hpp"

#include "attnspan/error.hpp"

namespace attnspan::io {

std::optional<int64_t> checked_bytes(const std::vector<int64_t>& shape, int64_t element_size) {
  int64_t bytes = element_size;
  for (const int64_t extent : shape) {
    if (extent < 0 || __builtin_mul_overflow(bytes, extent, &bytes)) return std::nullopt;
  }
  return bytes;
}

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  return text + "]";
}

TensorBuffer::TensorBuffer(DType dtype, std::vector<int64_t> shape)
    : dtype_(dtype), shape_(std::move(shape)) {
  if (shape_.empty() || shape_.size() > kMaxRank) {
    throw Error(ErrorCode::invalid_argument, "",
                "rank " + std::to_string(shape_.size()) + "; expected 1 to 4");
  }
  const std::optional<int64_t> bytes = checked_bytes(shape_, size_of(dtype));
  if (!bytes)
    throw Error(ErrorCode::out_of_memory, "", "a tensor of shape " + shape_text(shape_) + " is too large");
  bytes_ = *bytes;
  // One element more than nothing, so that an empty tensor has an address too.
  const size_t allocated = static_cast<size_t>(bytes_) + sizeof(float);
  data_.reset(static_cast<std::byte*>(::operator new[](allocated, kAlignment, std::nothrow)));
  if (!data_) {
    throw Error(
        ErrorCode::out_of_memory, "",
        "no memory for a tensor of shape " + shape_text(shape_) + ", " + std::to_string(bytes_) + " bytes");
  }
}

Tensor TensorBuffer::view() const {
  Tensor tensor;
  tensor.data = data_.get();
  tensor.dtype = dtype_;
  tensor.rank = rank();
  int64_t stride = 1;
  for (int i = rank() - 1; i >= 0; --i) {
    tensor.shape[i] = shape_[i];
    tensor.stride[i] = stride;
    stride *= shape_[i];
  }
  return tensor;
}

}  // namespace attnspan::io
