#pragma once
// The CUDA runtime: which device, its limits, errors as attnspan::Error, memory for staging.

#include <cuda_runtime_api.h>

#include <string>

#include "registry/backend.hpp"

namespace attnspan::cuda {

// Throws Error(out_of_memory | internal) naming what was being done.
void check(cudaError_t error, const char* doing);

struct DeviceLimits {
  std::string name;
  int major = 0, minor = 0;
  int multiprocessors = 0;
  size_t shared_bytes = 0;  // that one block may ask for
  int64_t l2_bytes = 0;
};
// Of the calling thread's current device. Read once per device.
const DeviceLimits& current_device();

// Staging copies for host tensors.
class CudaMemory final : public DeviceMemory {
 public:
  void* allocate(size_t bytes) override;
  void release(void* address) override;
  void upload(void* to, const void* from, size_t bytes) override;
  void download(void* to, const void* from, size_t bytes) override;
};

// Scratch of one call: the caller's workspace, or memory taken from and given back to the stream's own pool.
class Scratch {
 public:
  Scratch(const Execution& execution, size_t bytes);
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  // The next `bytes` of it, at a multiple of 256.
  void* take(size_t bytes);

 private:
  cudaStream_t stream_;
  char* base_ = nullptr;
  size_t size_ = 0, used_ = 0;
  bool owned_ = false;
};
// The counter of nan_guard: zeroed on the stream, read after waiting for it. Off, it is nothing.
class NanGuard {
 public:
  NanGuard(bool on, Scratch& scratch, cudaStream_t stream);
  unsigned long long* counter() const { return counter_; }
  int64_t replaced() const;

 private:
  cudaStream_t stream_;
  unsigned long long* counter_ = nullptr;
};

// What `bytes` occupy in a Scratch.
constexpr size_t scratch_size(size_t bytes) { return (bytes + 255) / 256 * 256; }

}  // namespace attnspan::cuda
