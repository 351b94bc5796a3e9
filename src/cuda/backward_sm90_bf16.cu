// Backward on Hopper in bf16.
#include "cuda/backward_sm90.cuh"

namespace attnspan::cuda::detail {
template cudaError_t launch_backward_sm90_as<__nv_bfloat16>(const Sm90BackwardArgs& keys,
                                                            const Sm90BackwardArgs& queries, int dim,
                                                            cudaStream_t stream);
}
