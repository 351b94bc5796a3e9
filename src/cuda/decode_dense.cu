#include "cuda/decode_dense.cuh"

namespace attnspan::cuda::detail {

cudaError_t launch_decode_dense(const Params& p, const DecodePlan& plan, cudaStream_t stream) {
  const bool wide = plan.tile_rows == 16;
  if (plan.dim == 64) {
    return wide ? start_decode(decode_dense_kernel<64, 2>, p, plan, stream)
                : start_decode(decode_dense_kernel<64, 1>, p, plan, stream);
  }
  if (plan.dim == 128) {
    return wide ? start_decode(decode_dense_kernel<128, 2>, p, plan, stream)
                : start_decode(decode_dense_kernel<128, 1>, p, plan, stream);
  }
  return start_decode(decode_dense_kernel<256, 1>, p, plan, stream);
}

}  // namespace attnspan::cuda::detail
