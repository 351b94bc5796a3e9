#pragma once
// The rows of the format table: each is defined in the file of its format.

#include "kv/format.hpp"

namespace attnspan {

extern const KvFormatOps kF32Ops;
extern const KvFormatOps kF16Ops;
extern const KvFormatOps kBf16Ops;
extern const KvFormatOps kQ8Ops;
extern const KvFormatOps kTbq4Ops;

// enter_domain and leave_domain of the formats that store values as they are
void copy_row(const float* from, int64_t dim, float* to);

// A scale in f16, rounded to nearest even. One outside [0, 65504] or not a number (the sums of a block can
// overflow) is stored as 65504, and 1 is added to `saturated`.
uint16_t scale_to_f16(float scale, int64_t& saturated);

}  // namespace attnspan
