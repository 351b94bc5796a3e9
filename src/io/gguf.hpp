#pragma once
// The header of a GGUF model file, versions 2 and 3: its metadata, and how many bytes its tensors have.
// Enough to know the shape of the attention; tensors are never read.

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace attnspan::io {

struct GgufHeader {
  uint32_t version = 0;
  // Integers and booleans, alone or in arrays. Other values are skipped.
  std::map<std::string, std::vector<int64_t>> integers;
  std::map<std::string, std::string> strings;  // alone only
  int64_t tensor_count = 0;
  int64_t tensor_bytes = 0;  // from the start of the data to the end of the file
};

// `bytes` is the whole file; `name` stands in messages. Throws Error(io, name, ...).
GgufHeader parse_gguf(std::span<const std::byte> bytes, const std::string& name);
GgufHeader read_gguf(const std::string& path);

}  // namespace attnspan::io
