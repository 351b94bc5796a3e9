#include "cuda/decode_dense.cuh"

namespace attnspan::cuda::detail {
template cudaError_t launch_decode_dense<__half>(const Params& p, const DecodePlan& plan,
                                                 cudaStream_t stream);
template cudaError_t launch_decode_dense<__nv_bfloat16>(const Params& p, const DecodePlan& plan,
                                                        cudaStream_t stream);
}  // namespace attnspan::cuda::detail
