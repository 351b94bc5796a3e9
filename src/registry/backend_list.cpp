// The order: the machine's GPU first where tensors already live there, then the CPU; the reference last, so
// that "auto" reaches it only for what nothing else supports (probs).

#include "registry/make_backends.hpp"

namespace attnspan {
namespace {

[[maybe_unused]] BackendOrReason left_out(const char* reason) { return {nullptr, reason}; }

}  // namespace

std::vector<BackendEntry> backend_entries() {
  return {
#ifdef ATTNSPAN_WITH_CUDA
      {"cuda", cuda::make_backend, Device::cuda},
#else
      {"cuda", [] { return left_out("this build has no CUDA (ATTNSPAN_CUDA is OFF, or there was no nvcc)"); },
       Device::cuda},
#endif
#ifdef ATTNSPAN_WITH_METAL
      {"metal", metal::make_backend, Device::metal},
#else
      {"metal", [] { return left_out("Metal needs macOS"); }, Device::metal},
#endif
#ifdef ATTNSPAN_WITH_WEBGPU
      {"webgpu", webgpu::make_backend, Device::webgpu},
#else
      {"webgpu",
       [] { return left_out("this build has no WebGPU (ATTNSPAN_WEBGPU is OFF, or there was no webgpu.h)"); },
       Device::webgpu},
#endif
      {"cpu", cpu::make_backend, Device::cpu},  // these two are in every build
      {"reference", reference::make_backend, Device::cpu},
  };
}

}  // namespace attnspan
