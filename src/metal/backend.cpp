#include "metal/backend.hpp"

#include <array>

#include "metal/plan_parts.hpp"

namespace attnspan::metal {
namespace {

// Scratch of one call.
class OwnedScratch {
 public:
  OwnedScratch(DeviceMemory& memory, size_t bytes) : memory_(memory) {
    if (bytes > 0) address_ = memory_.allocate(bytes);
  }
  ~OwnedScratch() {
    if (address_ != nullptr) memory_.release(address_);
  }
  OwnedScratch(const OwnedScratch&) = delete;
  OwnedScratch& operator=(const OwnedScratch&) = delete;
  void* address() const { return address_; }

 private:
  DeviceMemory& memory_;
  void* address_ = nullptr;
};

class MetalBackend final : public Backend {
 public:
  explicit MetalBackend(std::unique_ptr<MetalDevice> device) : device_(std::move(device)) {}

  std::string name() const override { return "metal"; }
  std::string description() const override { return device_->description(); }
  Device device() const override { return Device::metal; }
  DeviceMemory* memory() override { return device_.get(); }
  Support supports(const Problem& problem) const override { return metal::supports(problem); }
  size_t workspace_bytes(const Problem& problem, const Execution&) const override {
    return plan_of(problem).scratch_bytes;
  }

  int64_t forward(const Problem& problem, const Execution& execution) override {
    return run(plan_of(problem), execution);
  }
  int64_t backward(const Problem& problem, const Execution& execution) override {
    return run(plan_of(problem), execution);
  }
  void merge(const MergeProblem& problem, const Execution&) override {
    device_->run(plan_merge(problem), nullptr);
  }
  void append(const DeviceAppendArgs& args, const Execution&) override {
    append_side(args, KvSide::key);
    if (args.value) append_side(args, KvSide::value);
  }

 private:
  static Plan plan_of(const Problem& problem) {
    return problem.phase == Phase::forward ? plan_forward(problem) : plan_backward(problem);
  }

  void append_side(const DeviceAppendArgs& args, KvSide side) {
    const Tensor& rows = side == KvSide::key ? args.key : args.value;
    AppendProblem problem;
    problem.rows = {rows.data, rows.byte_offset, rows.stride[0], rows.stride[2], rows.stride[1]};
    problem.dtype = rows.dtype;
    problem.batch = rows.shape[0];
    problem.seqlen_new = rows.shape[1];
    problem.view = args.cache;
    problem.side = side;
    problem.positions = args.start;
    problem.mode = args.encode_mode;
    problem.saturated = args.saturated;
    const Plan plan = plan_append(problem);
    const OwnedScratch scratch(*device_, plan.scratch_bytes);
    device_->run(plan, scratch.address());
  }

  // Returns how many values nan_guard replaced.
  int64_t run(const Plan& plan, const Execution& execution) {
    const bool given = execution.workspace != nullptr;
    if (given && execution.workspace_bytes < plan.scratch_bytes) {
      throw Error(ErrorCode::invalid_argument, "workspace_bytes",
                  "found " + std::to_string(execution.workspace_bytes) + ", expected at least " +
                      std::to_string(plan.scratch_bytes) + " (workspace_bytes() tells)");
    }
    const OwnedScratch owned(*device_, given ? 0 : plan.scratch_bytes);
    void* scratch = given ? execution.workspace : owned.address();
    if (plan.nonfinite_offset >= 0) {
      const std::array<char, kCounterBytes> zeros{};
      device_->upload(scratch, zeros.data(), zeros.size());
    }
    device_->run(plan, scratch);
    if (plan.nonfinite_offset < 0) return 0;
    std::array<uint32_t, kCounterBytes / 4> counters{};
    device_->download(counters.data(), scratch, kCounterBytes);
    return counters[static_cast<size_t>(plan.nonfinite_offset) / 4];
  }

  std::unique_ptr<MetalDevice> device_;
};

// Whether both elements of every lane lie in the row that the shaders rescale (matrix_row).
bool has_known_matrix_layout(MetalDevice& device) {
  std::array<float, 64> elements{};
  const OwnedScratch buffer(device, sizeof elements);
  device.run(plan_layout_probe(buffer.address()), nullptr);
  device.download(elements.data(), buffer.address(), sizeof elements);
  for (int i = 0; i < 64; ++i) {
    if (static_cast<int>(elements[i]) / 8 != attnspan_metal::matrix_row(i / 2)) return false;
  }
  return true;
}

}  // namespace

BackendOrReason make_backend(std::unique_ptr<MetalDevice> device) {
  if (!has_known_matrix_layout(*device)) {
    return {nullptr,
            device->description() + " spreads simdgroup matrices over lanes in a way not known here"};
  }
  return {std::make_unique<MetalBackend>(std::move(device)), ""};
}

}  // namespace attnspan::metal
