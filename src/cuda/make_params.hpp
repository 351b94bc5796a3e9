#pragma once
// Problem -> Params: addresses and strides for the kernels.

#include "core/problem.hpp"
#include "cuda/merge.hpp"
#include "cuda/params.hpp"
#include "registry/backend.hpp"

namespace attnspan::cuda {

Params make_params(const Problem& problem);
MergeParams make_merge_params(const MergeProblem& problem);
DeviceRows device_rows(const Rows& rows);

}  // namespace attnspan::cuda
