// The forward kernel of Hopper on bf16.
#include "cuda/forward_sm90.cuh"

namespace attnspan::cuda::detail {
template cudaError_t launch_forward_sm90_as<__nv_bfloat16>(const Sm90Args& args, int bucket, bool transformed,
                                                           int blocks, cudaStream_t stream);
}
