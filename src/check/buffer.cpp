#include "check/buffer.hpp"

#include <cstring>

#include "core/dtype.hpp"

namespace attnspan::check {
namespace {

// Quiet NaNs with a payload that no computation produces.
constexpr uint32_t kPoison32 = 0x7fc5a5a5U;
constexpr uint16_t kPoisonF16 = 0x7e5aU;
constexpr uint16_t kPoisonBf16 = 0x7fdaU;
constexpr int32_t kPoisonInt = -1234567891;

void poison(std::vector<char>& memory, DType dtype) {
  const size_t size = static_cast<size_t>(size_of(dtype));
  const uint32_t word = dtype == DType::i32 ? static_cast<uint32_t>(kPoisonInt) : kPoison32;
  const uint16_t half = dtype == DType::f16 ? kPoisonF16 : kPoisonBf16;
  for (size_t at = 0; at < memory.size(); at += size) {
    std::memcpy(memory.data() + at, size == 4 ? static_cast<const void*>(&word) : &half, size);
  }
}

}  // namespace

const char* name_of(Layout layout) {
  switch (layout) {
    case Layout::bshd:
      return "bshd";
    case Layout::bhsd:
      return "bhsd";
    case Layout::sliced:
      return "sliced";
    case Layout::broadcast:
      return "broadcast";
  }
  return "unknown layout";
}

Buffer Buffer::poisoned(const std::vector<int64_t>& shape, DType dtype, Layout layout) {
  Buffer buffer;
  Tensor& t = buffer.tensor_;
  t.dtype = dtype;
  t.rank = static_cast<int>(shape.size());
  for (int i = 0; i < t.rank; ++i) t.shape[i] = shape[i];
  // Extents as allocated, in memory order.
  std::vector<int> order(shape.size());
  for (int i = 0; i < t.rank; ++i) order[i] = i;
  if (layout == Layout::bhsd && t.rank == 4) std::swap(order[1], order[2]);
  const int64_t slack = layout == Layout::sliced ? 3 : 0;
  int64_t stride = 1;
  for (int at = t.rank - 1; at >= 0; --at) {
    t.stride[order[at]] = stride;
    stride *= shape[order[at]] + slack;
  }
  int64_t elements = stride;
  if (layout == Layout::broadcast && t.rank == 4 && shape[0] > 0) {
    elements = stride / shape[0];
    t.stride[0] = 0;
  }
  int64_t first = 0;
  if (layout == Layout::sliced) {
    for (int i = 0; i < t.rank; ++i) first += t.stride[i];  // start at index 1 of every dimension
  }
  buffer.memory_.resize(static_cast<size_t>((elements + first + 1) * size_of(dtype)));
  poison(buffer.memory_, dtype);
  t.data = buffer.memory_.data() + first * size_of(dtype);
  return buffer;
}

int64_t Buffer::element(int64_t index) const {
  int64_t offset = 0;
  for (int i = tensor_.rank - 1; i >= 0; --i) {
    offset += index % tensor_.shape[i] * tensor_.stride[i];
    index /= tensor_.shape[i];
  }
  return offset;
}

float Buffer::get(int64_t index) const { return load_f32(tensor_.data, element(index), tensor_.dtype); }

void Buffer::set(int64_t index, float value) {
  store_f32(tensor_.data, element(index), tensor_.dtype, value);
}

void Buffer::set_int(int64_t index, int32_t value) {
  static_cast<int32_t*>(tensor_.data)[element(index)] = value;
}

void Buffer::fill_normal(Random& random, float scale) {
  std::normal_distribution<float> normal;
  for (int64_t i = 0; i < tensor_.numel(); ++i) set(i, scale * normal(random));
}

int64_t Buffer::damaged_gaps() const {
  const size_t size = static_cast<size_t>(size_of(tensor_.dtype));
  std::vector<char> expected(memory_.size());
  poison(expected, tensor_.dtype);
  std::vector<char> in_view(memory_.size() / size, 0);
  const int64_t first =
      (static_cast<const char*>(tensor_.data) - memory_.data()) / static_cast<int64_t>(size);
  for (int64_t i = 0; i < tensor_.numel(); ++i) in_view[first + element(i)] = 1;
  int64_t damaged = 0;
  for (size_t i = 0; i < in_view.size(); ++i) {
    if (in_view[i] == 0 && std::memcmp(&memory_[i * size], &expected[i * size], size) != 0) ++damaged;
  }
  return damaged;
}

}  // namespace attnspan::check
