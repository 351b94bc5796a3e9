#pragma once
// Checks shared by everything that takes public arguments. A failed check throws Error naming the argument,
// what was found and what was expected.

#include <string>
#include <utility>
#include <vector>

#include "attnspan/error.hpp"
#include "attnspan/tensor.hpp"

namespace attnspan {

[[noreturn]] inline void refuse(const std::string& argument, const std::string& found,
                                const std::string& expected) {
  throw Error(ErrorCode::invalid_argument, argument, "found " + found + ", expected " + expected);
}

inline void require(bool ok, const std::string& argument, const std::string& found,
                    const std::string& expected) {
  if (!ok) refuse(argument, found, expected);
}

// -1 in `shape` accepts any extent.
void require_shape(const Tensor& tensor, const std::string& argument, const std::vector<int64_t>& shape,
                   const std::string& meaning);
void require_rank(const Tensor& tensor, const std::string& argument, int rank, const std::string& meaning);
void require_dtype(const Tensor& tensor, const std::string& argument, DType dtype);
void require_device(const Tensor& tensor, const std::string& argument, Device device);
// The last dimension must be contiguous (or of extent 1), strides non-negative, data given unless empty.
void require_rows(const Tensor& tensor, const std::string& argument);
// No two indices of a tensor that is written may share an element.
void require_no_overlap(const Tensor& tensor, const std::string& argument);

}  // namespace attnspan
