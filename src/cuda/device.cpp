#include "cuda/device.hpp"

#include <map>
#include <mutex>

namespace attnspan::cuda {

void check(cudaError_t error, const char* doing) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // an error of this call must not be reported by the next one
  const ErrorCode code = error == cudaErrorMemoryAllocation ? ErrorCode::out_of_memory : ErrorCode::internal;
  throw Error(code, "cuda", std::string(doing) + ": " + cudaGetErrorString(error));
}

const DeviceLimits& current_device() {
  static std::mutex mutex;
  static std::map<int, DeviceLimits> known;
  int ordinal = 0;
  check(cudaGetDevice(&ordinal), "finding the current device");
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = known.find(ordinal);
  if (found != known.end()) return found->second;
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, ordinal), "reading the device's properties");
  DeviceLimits limits;
  limits.name = properties.name;
  limits.major = properties.major;
  limits.minor = properties.minor;
  limits.multiprocessors = properties.multiProcessorCount;
  limits.shared_bytes = properties.sharedMemPerBlockOptin;
  limits.l2_bytes = properties.l2CacheSize;
  return known.emplace(ordinal, limits).first->second;
}

void* CudaMemory::allocate(size_t bytes) {
  void* address = nullptr;
  check(cudaMalloc(&address, bytes), "allocating device memory");
  return address;
}
void CudaMemory::release(void* address) { cudaFree(address); }
void CudaMemory::upload(void* to, const void* from, size_t bytes) {
  check(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice), "copying to the device");
}
void CudaMemory::download(void* to, const void* from, size_t bytes) {
  check(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost), "copying from the device");
}

Scratch::Scratch(const Execution& execution, size_t bytes)
    : stream_(static_cast<cudaStream_t>(execution.stream)), size_(bytes) {
  if (bytes == 0) return;
  if (execution.workspace != nullptr) {
    if (execution.workspace_bytes < bytes) {
      throw Error(ErrorCode::invalid_argument, "workspace_bytes",
                  "found " + std::to_string(execution.workspace_bytes) + ", expected at least " +
                      std::to_string(bytes) + " (workspace_bytes() tells)");
    }
    base_ = static_cast<char*>(execution.workspace);
    return;
  }
  check(cudaMallocAsync(reinterpret_cast<void**>(&base_), bytes, stream_), "allocating scratch");
  owned_ = true;
}

Scratch::~Scratch() {
  if (owned_) cudaFreeAsync(base_, stream_);
}

void* Scratch::take(size_t bytes) {
  char* at = base_ + used_;
  used_ += scratch_size(bytes);
  if (used_ > size_) throw Error(ErrorCode::internal, "cuda", "a call takes more scratch than it planned");
  return at;
}

NanGuard::NanGuard(bool on, Scratch& scratch, cudaStream_t stream) : stream_(stream) {
  if (!on) return;
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(stream, &capture), "asking whether the stream is being captured");
  if (capture != cudaStreamCaptureStatusNone) {
    throw Error(ErrorCode::unsupported, "nan_guard",
                "found a stream that is being captured, expected none: the count must be waited for");
  }
  counter_ = static_cast<unsigned long long*>(scratch.take(sizeof(unsigned long long)));
  check(cudaMemsetAsync(counter_, 0, sizeof(unsigned long long), stream),
        "clearing the counter of nan_guard");
}

int64_t NanGuard::replaced() const {
  if (counter_ == nullptr) return 0;
  unsigned long long count = 0;
  check(cudaMemcpyAsync(&count, counter_, sizeof(count), cudaMemcpyDeviceToHost, stream_),
        "reading nan_guard's count");
  check(cudaStreamSynchronize(stream_), "waiting for nan_guard's count");
  return static_cast<int64_t>(count);
}

}  // namespace attnspan::cuda
