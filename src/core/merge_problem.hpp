#pragma once
// Validation of merge_states, and the merge itself on host memory (used by the backends that live there).

#include "registry/backend.hpp"

namespace attnspan {

MergeProblem make_merge_problem(const MergeArgs& args);

// Joins every row in order, in double: host backends share it because a merge reads and writes each value
// once and is bound by memory.
void merge_on_host(const MergeProblem& problem);

}  // namespace attnspan
