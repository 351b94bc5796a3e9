#include "webgpu/backend.hpp"

#include <mutex>

#include "registry/make_backends.hpp"

namespace attnspan::webgpu {
namespace {

std::string describe(const Capabilities& c) {
  std::string text = c.adapter + " (" + c.driver + "), " + std::to_string(c.workgroup_storage / 1024) +
                     " KiB of workgroup memory, " + std::to_string(c.workgroup_threads) +
                     " threads, bindings up to " + std::to_string(c.binding_bytes >> 20) + " MiB, " +
                     std::to_string(c.storage_buffers) + " storage buffers";
  if (c.f16) text += ", f16";
  if (c.subgroups)
    text += ", subgroups of " + std::to_string(c.subgroup_min) + " to " + std::to_string(c.subgroup_max);
  if (c.matrix > 0)
    text += ", subgroup matrices of " + std::to_string(c.matrix) + " x " + std::to_string(c.matrix);
  if (c.timestamps) text += ", timestamps";
  return text;
}

class WebgpuBackend final : public Backend {
 public:
  explicit WebgpuBackend(std::unique_ptr<GpuDevice> device)
      : device_(std::move(device)), pipelines_(*device_) {}

  std::string name() const override { return "webgpu"; }
  std::string description() const override { return describe(device_->capabilities()); }
  Device device() const override { return Device::webgpu; }
  DeviceMemory* memory() override { return device_.get(); }

  Support supports(const Problem& problem) const override {
    if (problem.probs.data != nullptr) return Support::no("probs: only the reference keeps N x N matrices");
    if (problem.nan_guard) return Support::no("nan_guard");
    return Support::yes();
  }

  int64_t forward(const Problem& problem, const Execution&) override {
    run(problem, record_forward);
    return 0;
  }
  int64_t backward(const Problem& problem, const Execution&) override {
    run(problem, record_backward);
    return 0;
  }
  void merge(const MergeProblem& problem, const Execution&) override { run(problem, record_merge); }

 private:
  template <typename P>
  void run(const P& problem, void (*record)(Context&, Commands&, const P&)) {
    const std::lock_guard lock(mutex_);
    Context context{*device_, pipelines_};
    Commands commands(*device_);
    record(context, commands, problem);
    commands.submit();
  }

  std::mutex mutex_;
  std::unique_ptr<GpuDevice> device_;
  Pipelines pipelines_;
};

}  // namespace

BackendOrReason make_backend() {
  std::string reason;
  std::unique_ptr<GpuDevice> device = GpuDevice::open(reason);
  if (device == nullptr) return {nullptr, reason};
  return {std::make_unique<WebgpuBackend>(std::move(device)), ""};
}

}  // namespace attnspan::webgpu
