#include "cpu/backend.hpp"

#include "core/parallel.hpp"
#include "cpu/backward.hpp"
#include "cpu/decode.hpp"
#include "cpu/forward.hpp"
#include "cpu/merge.hpp"

namespace attnspan::cpu {
namespace {

class CpuBackend final : public Backend {
 public:
  std::string name() const override { return "cpu"; }
  std::string description() const override {
    return std::string(instruction_set()) + ", " + std::to_string(thread_count(0)) + " threads";
  }
  Device device() const override { return Device::cpu; }

  Support supports(const Problem& problem) const override {
    if (problem.device != Device::cpu) {
      return Support::no(std::string("the tensors are on ") + name_of(problem.device) +
                         ", not in host memory");
    }
    if (problem.probs.data != nullptr) {
      return Support::no("probs would need N x N memory; the reference backend returns them");
    }
    return Support::yes();
  }

  int64_t forward(const Problem& problem, const Execution& execution) override {
    return cpu::decode(problem, execution) + cpu::forward(problem, execution);
  }
  int64_t backward(const Problem& problem, const Execution& execution) override {
    return cpu::backward(problem, execution);
  }
  void merge(const MergeProblem& problem, const Execution& execution) override {
    cpu::merge(problem, execution);
  }
};

}  // namespace

BackendOrReason make_backend() { return {std::make_unique<CpuBackend>(), ""}; }

}  // namespace attnspan::cpu
