// GGUF headers.

#include "fuzz.hpp"
#include "io/gguf.hpp"

using namespace attnspan;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::expect_result_or_error([&] {
    const io::GgufHeader header = io::parse_gguf(std::as_bytes(std::span(data, size)), "input");
    fuzz::check(header.tensor_bytes >= 0 && header.tensor_bytes <= static_cast<int64_t>(size),
                "tensors lie in the file");
  });
  return 0;
}
