#pragma once
// Problem -> Params: addresses and strides for the kernels.

#include "attnspan/device_cache.hpp"
#include "core/problem.hpp"
#include "cuda/append.hpp"
#include "cuda/merge.hpp"
#include "cuda/params.hpp"
#include "registry/backend.hpp"

namespace attnspan::cuda {

Params make_params(const Problem& problem);
MergeParams make_merge_params(const MergeProblem& problem);
AppendParams make_append_params(const DeviceAppendArgs& args);
DeviceRows device_rows(const Rows& rows);

}  // namespace attnspan::cuda
