#include "cuda/decode_quantised.cuh"

namespace attnspan::cuda::detail {
namespace {

template <int kDim, int kTiles>
cudaError_t launch(const Params& p, const DecodePlan& plan, cudaStream_t stream) {
  const StageLayout layout = stage_layout(plan.key_row, plan.value_row, plan.key_scales, plan.value_scales,
                                          QuantisedDecode<kDim>::kStep, plan.stages);
  return start_decode(decode_quantised_kernel<kDim, kTiles>, p, plan, decode_items(p, plan), stream, layout);
}

template <int kDim>
cudaError_t launch(const Params& p, const DecodePlan& plan, cudaStream_t stream) {
  return plan.tile_rows == 8 ? launch<kDim, 1>(p, plan, stream) : launch<kDim, 2>(p, plan, stream);
}

}  // namespace

cudaError_t launch_decode_quantised(const Params& p, const DecodePlan& plan, cudaStream_t stream) {
  if (plan.bucket == 0) return launch<64>(p, plan, stream);
  if (plan.bucket == 1) return launch<128>(p, plan, stream);
  return launch<256>(p, plan, stream);
}

}  // namespace attnspan::cuda::detail
