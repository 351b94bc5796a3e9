#pragma once
// NumPy's .npy files, versions 1 to 3: f32, f16 and int32, little-endian, C order. Everything else is refused
// by name: other element types, Python objects, big-endian, Fortran order, files shorter or longer than they
// say.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "attnspan/tensor.hpp"
#include "io/tensor_buffer.hpp"

namespace attnspan::io {

struct NpyHeader {
  DType dtype = DType::f32;
  std::vector<int64_t> shape;
  int64_t data_offset = 0;
};

// `head` is the start of the file, long enough for its header; `file_size` the length of the whole file.
// Throws Error(io, name, ...). A header that is returned promises exactly the bytes that the file has.
NpyHeader parse_npy_header(std::span<const std::byte> head, int64_t file_size, const std::string& name);

// Longest header that is read: NumPy's own limit for what it evaluates is 10000 characters.
inline constexpr int64_t kMaxNpyHeader = 65536 + 16;

TensorBuffer read_npy(const std::string& path);
// The header, padded so that the data starts at a multiple of 64 bytes, as NumPy writes it. No bf16.
std::string npy_header(DType dtype, const std::vector<int64_t>& shape);

}  // namespace attnspan::io
