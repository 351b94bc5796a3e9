#pragma once
// out, lse = attention of few query rows over many keys: see ForwardArgs.

#include <cstdint>

#include "core/problem.hpp"

namespace attnspan::cpu {

// Whether the rows of this sequence go through decode: by the sequence's own shape and the instruction set.
bool takes_decode(const Problem& problem, const Sequence& sequence);

// The sequences that takes_decode() names; the others are left alone. Returns the number of non-finite values
// replaced (nan_guard).
int64_t decode(const Problem& problem, const Execution& execution);

}  // namespace attnspan::cpu
