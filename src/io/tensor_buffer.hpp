#pragma once
// Tensors that own their memory: what files are read into and results are written from.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <vector>

#include "attnspan/tensor.hpp"

namespace attnspan::io {

// Bytes of a dense tensor, or nothing if the product does not fit in 63 bits.
std::optional<int64_t> checked_bytes(const std::vector<int64_t>& shape, int64_t element_size);

std::string shape_text(const std::vector<int64_t>& shape);  // "[2, 128, 8, 64]"

// A dense row-major tensor in host memory of its own, 64-byte aligned, not initialised.
class TensorBuffer {
 public:
  TensorBuffer() = default;
  TensorBuffer(DType dtype, std::vector<int64_t> shape);  // rank 1..4; throws Error if it cannot be allocated

  DType dtype() const { return dtype_; }
  const std::vector<int64_t>& shape() const { return shape_; }
  int rank() const { return static_cast<int>(shape_.size()); }
  int64_t bytes() const { return bytes_; }
  void* data() { return data_.get(); }
  const void* data() const { return data_.get(); }
  explicit operator bool() const { return !shape_.empty(); }

  Tensor view() const;  // the library's views carry a mutable address, whatever they are used for

 private:
  static constexpr std::align_val_t kAlignment{64};
  struct Free {
    void operator()(std::byte* data) const { ::operator delete[](data, kAlignment); }
  };

  DType dtype_ = DType::f32;
  std::vector<int64_t> shape_;
  int64_t bytes_ = 0;
  std::unique_ptr<std::byte[], Free> data_;
};

}  // namespace attnspan::io
