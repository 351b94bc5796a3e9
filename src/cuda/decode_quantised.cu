#include "cuda/decode_quantised.cuh"

namespace attnspan::cuda::detail {
namespace {

template <int kDim, int kRows>
cudaError_t launch_tbq4(const Params& p, const DecodePlan& plan, cudaStream_t stream) {
  using Tbq4 = Tbq4Codes<kDim, quantised_table(kDim, kRows)>;
  return start_decode(decode_quantised_kernel<Tbq4, Tbq4, kDim, kRows>, p, plan, stream);
}

template <int kDim>
cudaError_t launch(const Params& p, const DecodePlan& plan, cudaStream_t stream) {
  using Q8 = Q8Codes<kDim>;
  using Tbq4 = Tbq4Codes<kDim, quantised_table(kDim, 8)>;
  const bool key_q8 = p.key.format == Format::q8, value_q8 = p.value.format == Format::q8;
  if (key_q8) {
    return value_q8 ? start_decode(decode_quantised_kernel<Q8, Q8, kDim, 8>, p, plan, stream)
                    : start_decode(decode_quantised_kernel<Q8, Tbq4, kDim, 8>, p, plan, stream);
  }
  if (value_q8) return start_decode(decode_quantised_kernel<Tbq4, Q8, kDim, 8>, p, plan, stream);
  if constexpr (kDim <= 128) {
    if (plan.tile_rows == 16) return launch_tbq4<kDim, 16>(p, plan, stream);
  }
  return launch_tbq4<kDim, 8>(p, plan, stream);
}

}  // namespace

cudaError_t launch_decode_quantised(const Params& p, const DecodePlan& plan, cudaStream_t stream) {
  if (plan.dim == 64) return launch<64>(p, plan, stream);
  if (plan.dim == 128) return launch<128>(p, plan, stream);
  return launch<256>(p, plan, stream);
}

}  // namespace attnspan::cuda::detail
