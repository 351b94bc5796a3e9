#pragma once
// Which kernels answer a forward problem, and the scratch they need.

#include "cuda/decode.hpp"
#include "cuda/device.hpp"
#include "cuda/forward_mma.hpp"
#include "cuda/forward_sm90.hpp"
#include "cuda/params.hpp"

namespace attnspan::cuda {

struct ForwardPlan {
  Params params;
  int compute = 0;       // DType of the products
  DecodePlan decode;     // used where ok
  Sm90Plan sm90;         // else used where ok
  MmaShape mma;          // otherwise
  bool overlap = false;  // the merge of splits may be launched early
  size_t partial_out_bytes = 0, partial_lse_bytes = 0;
  Support support;

  size_t scratch_bytes() const;
};

ForwardPlan plan_forward(const Problem& problem, const DeviceLimits& device);
// Runs on the execution's stream; returns what nan_guard replaced.
int64_t run_forward(ForwardPlan plan, const Execution& execution);

}  // namespace attnspan::cuda
