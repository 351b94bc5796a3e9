#pragma once
// merge_states over threads: see MergeArgs.

#include "registry/backend.hpp"

namespace attnspan::cpu {

void merge(const MergeProblem& problem, const Execution& execution);

}  // namespace attnspan::cpu
