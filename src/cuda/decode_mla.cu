#include "cuda/decode_mla.cuh"

namespace attnspan::cuda::detail {

cudaError_t launch_decode_mla(const Params& p, const DecodePlan& plan, cudaStream_t stream) {
  static_assert(MlaShape::kStages * MlaShape::kStageBytes + sizeof(MlaShared) <= kMlaSharedBytes);
  return start_decode(decode_mla_kernel, p, plan, stream);
}

}  // namespace attnspan::cuda::detail
