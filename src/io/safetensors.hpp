#pragma once
// safetensors files: an 8-byte length, a JSON header, the bytes of the tensors. F32, F16, BF16 and I32 can be
// read; a file may hold other types beside them. Offsets are checked as the format demands: in order, no
// holes, no overlaps, nothing after the last tensor.

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "attnspan/tensor.hpp"
#include "io/tensor_buffer.hpp"

namespace attnspan::io {

struct SafetensorsEntry {
  std::string type;  // as the file spells it: "F32"
  std::vector<int64_t> shape;
  int64_t begin = 0;  // in the file
  int64_t end = 0;
};

struct SafetensorsHeader {
  std::map<std::string, SafetensorsEntry> tensors;
  std::map<std::string, std::string> metadata;

  std::string names() const;  // "key, query, value", for messages
};

// `header` is the JSON text alone. Throws Error(io, name, ...).
SafetensorsHeader parse_safetensors_header(std::span<const char> header, int64_t file_size,
                                           const std::string& name);
// The length of the JSON text from the first 8 bytes of the file, checked.
int64_t safetensors_header_bytes(std::span<const std::byte, 8> prefix, int64_t file_size,
                                 const std::string& name);

SafetensorsHeader read_safetensors_header(const std::string& path);
TensorBuffer read_safetensors(const std::string& path, const std::string& tensor);

struct NamedTensor {
  std::string name;
  const TensorBuffer* buffer = nullptr;
};
// The length prefix and the header, padded so that the data starts at a multiple of 64 bytes.
std::string safetensors_header(std::span<const NamedTensor> tensors);

}  // namespace attnspan::io
