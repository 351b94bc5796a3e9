#pragma once
// A whole file as memory. What is written to it stays in this process.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

namespace attnspan::io {

class MappedFile {
 public:
  explicit MappedFile(const std::string& path);  // throws Error(io, path, ...)
  std::span<std::byte> bytes() const { return {memory_.get(), static_cast<size_t>(size_)}; }
  // An address inside that keeps the mapping alive.
  std::shared_ptr<std::byte> at(int64_t offset) const { return {memory_, memory_.get() + offset}; }

 private:
  std::shared_ptr<std::byte> memory_;
  int64_t size_ = 0;
};

}  // namespace attnspan::io
