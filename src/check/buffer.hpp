#pragma once
// Owned host tensors for checks: random values, gaps and unused memory poisoned with NaN.

#include <cstdint>
#include <random>
#include <vector>

#include "attnspan/tensor.hpp"

namespace attnspan::check {

using Random = std::mt19937_64;

// How a [batch, rows, heads, dim] tensor lies in memory.
enum class Layout {
  bshd,
  bhsd,
  sliced,     // every extent is a slice of a larger tensor; the gaps are poisoned
  broadcast,  // one batch entry stands for all (stride 0); inputs only
};
const char* name_of(Layout layout);

// A tensor and the memory under it. Moving keeps the address.
class Buffer {
 public:
  Buffer() = default;
  Buffer(Buffer&&) = default;
  Buffer& operator=(Buffer&&) = default;
  Buffer(const Buffer&) = delete;  // a copy's tensor would point into the original
  Buffer& operator=(const Buffer&) = delete;

  // NaN everywhere (int32: a large negative number)
  static Buffer poisoned(const std::vector<int64_t>& shape, DType dtype, Layout layout = Layout::bshd);

  const Tensor& tensor() const { return tensor_; }
  // Element by its index in row-major order of the shape.
  float get(int64_t index) const;
  void set(int64_t index, float value);
  void set_int(int64_t index, int32_t value);

  // Normal values times `scale`, rounded to the dtype.
  void fill_normal(Random& random, float scale = 1.0F);
  // Number of elements outside the view whose poison was overwritten.
  int64_t damaged_gaps() const;

 private:
  int64_t element(int64_t index) const;

  Tensor tensor_;
  std::vector<char> memory_;
};

}  // namespace attnspan::check
