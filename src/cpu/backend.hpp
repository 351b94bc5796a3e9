#pragma once
// The CPU backend: SIMD kernels chosen at run time (AVX-512, AVX2, NEON), threads from oneTBB. It works
// everywhere.

#include "registry/backend.hpp"

namespace attnspan::cpu {

BackendOrReason make_backend();

}  // namespace attnspan::cpu
