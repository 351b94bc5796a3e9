// The CUDA backend: on this machine when a driver and a device of compute capability 8.0 or later are there.

#include <limits>

#include "cuda/backward.hpp"
#include "cuda/device.hpp"
#include "cuda/forward.hpp"
#include "cuda/make_params.hpp"
#include "cuda/merge.hpp"
#include "registry/make_backends.hpp"

namespace attnspan::cuda {
namespace {

Support fits_kernels(const Problem& p) {
  if (p.device != Device::cuda && p.device != Device::cpu) {
    return Support::no(std::string("the tensors are on ") + name_of(p.device));
  }
  if (p.phase == Phase::forward && p.probs.data != nullptr) {
    return Support::no("probs would need N x N memory; the reference backend returns them");
  }
  const int64_t longest = std::numeric_limits<int32_t>::max() / 2;
  if (p.seqlen_q * p.group() > longest || p.seqlen_k > longest) {
    return Support::no("a sequence of more than " + std::to_string(longest) + " rows");
  }
  return Support::yes();
}

class CudaBackend final : public Backend {
 public:
  explicit CudaBackend(std::string description) : description_(std::move(description)) {}

  std::string name() const override { return "cuda"; }
  std::string description() const override { return description_; }
  Device device() const override { return Device::cuda; }
  DeviceMemory* memory() override { return &memory_; }

  Support supports(const Problem& problem) const override {
    const Support fits = fits_kernels(problem);
    if (!fits) return fits;
    if (problem.phase == Phase::backward) return plan_backward(problem, current_device()).support;
    return plan_forward(problem, current_device()).support;
  }

  size_t workspace_bytes(const Problem& problem, const Execution&) const override {
    if (problem.phase == Phase::backward) return plan_backward(problem, current_device()).scratch_bytes();
    return plan_forward(problem, current_device()).scratch_bytes();
  }

  int64_t forward(const Problem& problem, const Execution& execution) override {
    return run_forward(plan_forward(problem, current_device()), execution);
  }

  int64_t backward(const Problem& problem, const Execution& execution) override {
    return run_backward(plan_backward(problem, current_device()), execution);
  }

  void merge(const MergeProblem& problem, const Execution& execution) override {
    check(launch_merge_states(make_merge_params(problem), static_cast<cudaStream_t>(execution.stream)),
          "launching merge_states");
  }

  void append(const DeviceAppendArgs& args, const Execution& execution) override {
    check(launch_append(make_append_params(args), static_cast<cudaStream_t>(execution.stream)),
          "launching append");
  }

 private:
  std::string description_;
  CudaMemory memory_;
};

std::string describe(const DeviceLimits& d) {
  return d.name + ", compute capability " + std::to_string(d.major) + "." + std::to_string(d.minor) + ", " +
         std::to_string(d.multiprocessors) + " multiprocessors, " + std::to_string(d.shared_bytes / 1024) +
         " KB of shared memory a block";
}

}  // namespace

BackendOrReason make_backend() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess) {
    cudaGetLastError();
    return {nullptr, std::string("no usable NVIDIA driver: ") + cudaGetErrorString(error)};
  }
  if (count == 0) return {nullptr, "no NVIDIA device"};
  const DeviceLimits& device = current_device();
  if (device.major < 8) {
    return {nullptr, describe(device) + ": compute capability 8.0 or later is needed"};
  }
  return {std::make_unique<CudaBackend>(describe(device)), ""};
}

}  // namespace attnspan::cuda
