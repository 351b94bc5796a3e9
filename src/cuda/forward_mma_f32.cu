// The portable forward kernel with products in f32.
#include "cuda/forward_mma.cuh"

namespace attnspan::cuda::detail {
template cudaError_t launch_forward_mma_as<float>(const Params& p, const MmaShape& shape,
                                                  cudaStream_t stream);
}
