// Launches of the path that keeps its probabilities: asked for by a probs tensor, or by
// ATTNSPAN_METAL_UNFUSED=1 as an oracle on the device itself.

#include <cstdlib>
#include <string>

#include "metal/plan_parts.hpp"

namespace attnspan::metal {
namespace {

using attnspan_metal::AttentionParams;

constexpr uint32_t kUnfusedBytes = 1160 * 4;  // UnfusedLayout of unfused.metal

bool is_forced() {
  const char* value = std::getenv("ATTNSPAN_METAL_UNFUSED");
  return value != nullptr && std::string(value) == "1";
}

int64_t matrix_elements(const Problem& p) { return p.batch * p.heads * p.seqlen_q * p.seqlen_k; }

void use_dense_probs(const Problem& p, AttentionParams& params) {
  params.probs_key = 1;
  params.probs_row = p.seqlen_k;
  params.probs_head = p.seqlen_q * p.seqlen_k;
  params.probs_batch = p.heads * params.probs_head;
}

Launch per_row(Launch launch, const char* kernel, const Problem& p) {
  launch.kernel = kernel;
  launch.groups = {static_cast<uint32_t>(p.seqlen_q), static_cast<uint32_t>(p.heads),
                   static_cast<uint32_t>(p.batch)};
  launch.threadgroup_bytes = kUnfusedBytes;
  return launch;
}

}  // namespace

bool is_unfused(const Problem& p) { return p.probs.data != nullptr || is_forced(); }

Support supports_unfused(const Problem& p) {
  if (p.packed()) return Support::no("the unfused path (ATTNSPAN_METAL_UNFUSED) with packed sequences");
  return Support::yes();
}

Plan plan_unfused_forward(const Problem& p) {
  Plan plan;
  Scratch scratch(plan);
  if (p.batch == 0 || p.seqlen_q == 0) return plan;
  FunctionConstants constants = constants_of(p);
  constants[WRITE_OUT] = 1;
  AttentionParams params = params_of(p);
  std::vector<TensorSlot> tensors = tensors_of(p);
  if (p.nan_guard) tensors[k_nonfinite] = {nullptr, plan.nonfinite_offset = 0, true};
  if (p.probs.data == nullptr) {
    use_dense_probs(p, params);
    tensors[k_probs] = scratch.take(matrix_elements(p) * 4);
  }
  plan.launches.push_back(per_row(attention_launch(constants, params, tensors), "unfused_probs", p));
  return plan;
}

// In place of dq and dkv of the tiled backward; `common` has delta bound.
std::vector<Launch> unfused_gradients(const Problem& p, Launch common, Scratch& scratch) {
  AttentionParams params;
  std::memcpy(&params, common.params.data(), sizeof params);
  use_dense_probs(p, params);
  common.params = bytes_of(params);
  common.tensors[k_probs] = scratch.take(matrix_elements(p) * 4);
  common.tensors[k_dscores] = scratch.take(matrix_elements(p) * 4);
  std::vector<Launch> launches;
  if (p.batch > 0 && p.seqlen_q > 0) {
    launches.push_back(per_row(common, "unfused_probs", p));
    launches.push_back(per_row(common, "unfused_dq", p));
  }
  if (p.batch > 0 && p.seqlen_k > 0) {
    common.kernel = "unfused_dkv";
    common.groups = {static_cast<uint32_t>(p.seqlen_k), static_cast<uint32_t>(p.kv_heads),
                     static_cast<uint32_t>(p.batch)};
    launches.push_back(common);
  }
  return launches;
}

}  // namespace attnspan::metal
