#pragma once
// The tbq4 encoder in vectors: the same bytes as the scalar definition in tbq4.cpp, many times faster.

#include "kv/format.hpp"

namespace attnspan::tbq4 {

// KvFormatOps::encode_row of tbq4.
int64_t encode_row_simd(const float* values, int64_t dim, EncodeMode mode, uint8_t* codes, uint16_t* norms);

}  // namespace attnspan::tbq4
