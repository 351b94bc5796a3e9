#pragma once
// Working memory of one thread: grows to the largest tile set that the thread has needed and is kept for the
// next call (allocating a megabyte afresh costs more than a small problem does). Contents are never assumed.

#include <cstddef>
#include <cstdlib>
#include <new>
#include <string>

#include "attnspan/error.hpp"

namespace attnspan::cpu {

class Scratch {
 public:
  static constexpr size_t kAlignment = 64;  // one cache line, and the widest vector

  static Scratch& of_thread() {
    thread_local Scratch scratch;
    return scratch;
  }

  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { std::free(memory_); }

  // Starts over with room for `floats` floats in all. Earlier slices end here.
  void begin(size_t floats) {
    used_ = 0;
    if (floats <= size_) return;
    std::free(memory_);
    memory_ = nullptr;
    size_ = 0;
    void* memory = std::aligned_alloc(kAlignment, padded(floats) * sizeof(float));
    if (memory == nullptr) throw std::bad_alloc();
    memory_ = static_cast<float*>(memory);
    size_ = padded(floats);
  }
  float* take(size_t floats) {
    float* slice = memory_ + used_;
    used_ += padded(floats);
    if (used_ > size_) {
      throw Error(ErrorCode::internal, "scratch",
                  std::to_string(used_) + " floats taken of the " + std::to_string(size_) + " asked for");
    }
    return slice;
  }
  // What a slice occupies: whole cache lines.
  static constexpr size_t padded(size_t floats) {
    constexpr size_t kLine = kAlignment / sizeof(float);
    return (floats + kLine - 1) / kLine * kLine;
  }

 private:
  float* memory_ = nullptr;
  size_t size_ = 0;
  size_t used_ = 0;
};

}  // namespace attnspan::cpu
