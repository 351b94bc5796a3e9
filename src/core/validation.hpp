#pragma once
// Checks shared by everything that takes public arguments. A failed check throws Error naming the argument,
// what was found and what was expected.

#include <initializer_list>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "attnspan/attention.hpp"
#include "attnspan/error.hpp"
#include "attnspan/tensor.hpp"

namespace attnspan {

[[noreturn]] inline void refuse(std::string_view argument, const std::string& found,
                                const std::string& expected) {
  throw Error(ErrorCode::invalid_argument, std::string(argument),
              "found " + found + ", expected " + expected);
}

// For texts that cost nothing to make. Where one is composed, test first and then refuse(): the texts of a
// valid call would take longer than a small problem itself (4 of 7 us for 1 x 1 x 1 x 64).
inline void require(bool ok, std::string_view argument, const std::string& found,
                    const std::string& expected) {
  if (!ok) refuse(argument, found, expected);
}
inline void require(bool ok, std::string_view argument, const char* found, const char* expected) {
  if (!ok) refuse(argument, found, expected);
}

// -1 in `shape` accepts any extent.
void require_shape(const Tensor& tensor, std::string_view argument, std::span<const int64_t> shape,
                   std::string_view meaning);
inline void require_shape(const Tensor& tensor, std::string_view argument,
                          std::initializer_list<int64_t> shape, std::string_view meaning) {
  require_shape(tensor, argument, std::span(shape.begin(), shape.size()), meaning);
}
void require_rank(const Tensor& tensor, std::string_view argument, int rank, std::string_view meaning);
void require_dtype(const Tensor& tensor, std::string_view argument, DType dtype);
void require_device(const Tensor& tensor, std::string_view argument, Device device);
// The last dimension must be contiguous (or of extent 1), strides non-negative, data given unless empty.
void require_rows(const Tensor& tensor, std::string_view argument);
// No two indices of a tensor that is written may share an element.
void require_no_overlap(const Tensor& tensor, std::string_view argument);

// 1..kMaxHeadDim
void check_head_dim(int64_t dim, const char* name);

}  // namespace attnspan
