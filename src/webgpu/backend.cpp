#include "webgpu/backend.hpp"

#include "registry/make_backends.hpp"

namespace attnspan::webgpu {

std::string WebgpuBackend::description() const {
  const Capabilities& c = device_->capabilities();
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
  return text + "; " + device_->api().library;
}

Support WebgpuBackend::supports(const Problem& problem) const {
  if (problem.probs.data != nullptr)
    return Support::no("probs: only backends that keep N x N matrices return them, this one never has them");
  return within_limits(device_->capabilities(), problem);
}

int64_t WebgpuBackend::run(const std::function<WGPUBuffer(Context&, Commands&)>& record) {
  const std::lock_guard lock(mutex_);
  Context context{*device_, pipelines_};
  Commands commands(*device_);
  const WGPUBuffer counter = record(context, commands);
  commands.submit();
  if (counter == nullptr) return 0;
  uint32_t count = 0;
  device_->read(counter, 0, &count, sizeof(count));
  return count;
}

int64_t WebgpuBackend::forward(const Problem& problem, const Execution&) {
  return run([&](Context& context, Commands& commands) {
    record_forward(context, commands, problem);
    return problem.nan_guard ? record_nan_guard(context, commands, problem) : nullptr;
  });
}

int64_t WebgpuBackend::backward(const Problem& problem, const Execution&) {
  return run([&](Context& context, Commands& commands) {
    record_backward(context, commands, problem);
    return problem.nan_guard ? record_nan_guard(context, commands, problem) : nullptr;
  });
}

void WebgpuBackend::merge(const MergeProblem& problem, const Execution&) {
  run([&](Context& context, Commands& commands) -> WGPUBuffer {
    record_merge(context, commands, problem);
    return nullptr;
  });
}

BackendOrReason make_backend() {
  std::string reason;
  std::unique_ptr<GpuDevice> device = GpuDevice::open(reason);
  if (device == nullptr) return {nullptr, reason};
  return {std::make_unique<WebgpuBackend>(std::move(device)), ""};
}

}  // namespace attnspan::webgpu
