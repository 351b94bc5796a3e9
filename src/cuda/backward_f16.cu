// Backward with products in f16.
#include "cuda/backward.cuh"

namespace attnspan::cuda::detail {
template cudaError_t launch_backward_as<__half>(const BackwardParams& b, const BackwardShape& shape,
                                                cudaStream_t stream);
}
