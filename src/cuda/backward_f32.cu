// Backward with products in f32.
#include "cuda/backward.cuh"

namespace attnspan::cuda::detail {
template cudaError_t launch_backward_as<float>(const BackwardParams& b, const BackwardShape& shape,
                                               cudaStream_t stream);
}
