// The portable forward kernel with products in f16.
#include "cuda/forward_mma.cuh"

namespace attnspan::cuda::detail {
template cudaError_t launch_forward_mma_as<__half>(const Params& p, const MmaShape& shape,
                                                   cudaStream_t stream);
}
