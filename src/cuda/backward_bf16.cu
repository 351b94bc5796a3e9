// Backward with products in bf16.
#include "cuda/backward.cuh"

namespace attnspan::cuda::detail {
template cudaError_t launch_backward_as<__nv_bfloat16>(const BackwardParams& b, const BackwardShape& shape,
                                                       cudaStream_t stream);
}
