#pragma once
// out, lse = attention(query, key, value): see ForwardArgs.

#include <cstdint>

#include "core/problem.hpp"

namespace attnspan::cpu {

// Returns the number of non-finite values replaced (nan_guard).
int64_t forward(const Problem& problem, const Execution& execution);

// The instruction set that the kernels use on this machine: "AVX3" is AVX-512.
const char* instruction_set();

}  // namespace attnspan::cpu
