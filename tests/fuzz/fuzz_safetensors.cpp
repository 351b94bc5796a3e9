// safetensors files: the length, the JSON header, and where the tensors lie.

#include <string>

#include "fuzz.hpp"
#include "io/safetensors.hpp"

using namespace attnspan;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 8) return 0;  // the caller of these functions has refused shorter files
  fuzz::expect_result_or_error([&] {
    const auto file_size = static_cast<int64_t>(size);
    const std::span<const std::byte, 8> prefix(reinterpret_cast<const std::byte*>(data), 8);
    const int64_t header_bytes = io::safetensors_header_bytes(prefix, file_size, "input");
    fuzz::check(header_bytes >= 0 && 8 + header_bytes <= file_size, "the header lies in the file");
    const std::span<const char> text(reinterpret_cast<const char*>(data) + 8,
                                     static_cast<size_t>(header_bytes));
    const io::SafetensorsHeader header = io::parse_safetensors_header(text, file_size, "input");
    for (const auto& [name, entry] : header.tensors) {
      fuzz::check(8 + header_bytes <= entry.begin && entry.begin <= entry.end && entry.end <= file_size,
                  "tensors lie behind the header, in the file");
    }
    fuzz::check(header.names().find('\n') == std::string::npos, "names are fit for a message of one line");
  });
  return 0;
}
