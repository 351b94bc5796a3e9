#pragma once
// The tolerance rule. Both results are measured against the double reference: the error of a backend may be
// at most twice that of the plain same-dtype implementation, plus one rounding of the result. Infinities and
// NaNs must stand in the same places.

#include <string>

#include "check/buffer.hpp"

namespace attnspan::check {

struct Comparison {
  bool ok = true;
  double error = 0;  // largest |result - reference|
  double plain = 0;  // largest |plain - reference|
  double tolerance = 0;
  std::string message;  // where and what, when not ok
};

// `slack` is an absolute tolerance relative to the largest reference value, for arithmetic with a stated
// error (int8 dot products over quantised caches). `noise` is absolute: what f32 sums in another order leave
// where the true value cancels to nothing.
Comparison compare(const std::string& name, const Buffer& result, const Buffer& reference,
                   const Buffer& plain, DType dtype, double slack = 0, double noise = 0);

}  // namespace attnspan::check
