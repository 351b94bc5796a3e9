// Backward with products in f32.
#include "cuda/backward_mma.cuh"

namespace attnspan::cuda::detail {
template cudaError_t launch_backward_mma_as<float>(const BackwardParams& b, const BackwardShape& shape,
                                                   cudaStream_t stream);
}
