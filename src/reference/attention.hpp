#pragma once
// The definition of the contract: double accumulation, N x N matrices, no cleverness.

#include "core/problem.hpp"

namespace attnspan::reference {

// Both return how many non-finite values nan_guard replaced.
int64_t forward(const Problem& problem);
int64_t backward(const Problem& problem);

}  // namespace attnspan::reference
