// The portable forward kernel with products in bf16.
#include "cuda/forward_mma.cuh"

namespace attnspan::cuda::detail {
template cudaError_t launch_forward_mma_as<__nv_bfloat16>(const Params& p, const MmaShape& shape,
                                                          cudaStream_t stream);
}
