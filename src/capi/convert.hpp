#pragma once
// The structs of the C ABI as those of the C++ API. Every pointer and size is checked; a failure throws
// Error.

#include <memory>

#include "attnspan/attention.hpp"
#include "attnspan/attnspan.h"

namespace attnspan::capi {

// C++ arguments, and the view that they point to.
template <typename Args>
struct Converted {
  Args args;
  std::unique_ptr<KvView> cache;
};

Converted<ForwardArgs> convert(const attnspan_forward_args* args);
Converted<BackwardArgs> convert(const attnspan_backward_args* args);
Converted<MergeArgs> convert(const attnspan_merge_args* args);
Execution convert(const attnspan_execution* execution);  // null: defaults
Tensor convert(const attnspan_tensor* tensor, const char* name);

// Fill in the caller's struct as far as its size reaches.
void store(const KvView& view, attnspan_kv_view* to);
void store(const Result& result, attnspan_result* to);  // null: ignored
void store(const BackendInfo& info, attnspan_backend_info* to);

}  // namespace attnspan::capi
