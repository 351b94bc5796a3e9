// .npy headers, with the length of the whole file: the input's own.

#include "fuzz.hpp"
#include "io/npy.hpp"

using namespace attnspan;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::expect_result_or_error([&] {
    const auto file_size = static_cast<int64_t>(size);
    const io::NpyHeader header =
        io::parse_npy_header(std::as_bytes(std::span(data, size)), file_size, "input");
    const auto bytes = io::checked_bytes(header.shape, size_of(header.dtype));
    fuzz::check(bytes && header.data_offset + *bytes == file_size,
                "an accepted header claims the file's bytes");
    fuzz::check(!header.shape.empty() && header.shape.size() <= kMaxRank, "rank 1 to 4");
    // What we would write for it reads back the same.
    const std::string written = io::npy_header(header.dtype, header.shape);
    const io::NpyHeader again = io::parse_npy_header(
        std::as_bytes(std::span(written)), static_cast<int64_t>(written.size()) + *bytes, "written");
    fuzz::check(again.dtype == header.dtype && again.shape == header.shape, "written headers read back");
  });
  return 0;
}
