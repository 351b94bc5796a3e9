#pragma once
// dq, dk, dv, d_sinks: see BackwardArgs.

#include <cstdint>

#include "core/problem.hpp"

namespace attnspan::cpu {

// Returns the number of non-finite values replaced (nan_guard).
int64_t backward(const Problem& problem, const Execution& execution);

}  // namespace attnspan::cpu
