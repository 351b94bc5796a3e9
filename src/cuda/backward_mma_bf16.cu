// Backward with products in bf16.
#include "cuda/backward_mma.cuh"

namespace attnspan::cuda::detail {
template cudaError_t launch_backward_mma_as<__nv_bfloat16>(const BackwardParams& b,
                                                           const BackwardShape& shape, cudaStream_t stream);
}
