#include "core/merge_problem.hpp"
#include "reference/attention.hpp"
#include "registry/make_backends.hpp"

namespace attnspan::reference {
namespace {

class ReferenceBackend final : public Backend {
 public:
  std::string name() const override { return "reference"; }
  std::string description() const override {
    return "plain C++, double accumulation, N x N; the definition of the contract";
  }
  Device device() const override { return Device::cpu; }
  Support supports(const Problem&) const override { return Support::yes(); }
  int64_t forward(const Problem& problem, const Execution&) override { return reference::forward(problem); }
  int64_t backward(const Problem& problem, const Execution&) override { return reference::backward(problem); }
  void merge(const MergeProblem& problem, const Execution&) override { merge_on_host(problem); }
};

}  // namespace

BackendOrReason make_backend() { return {std::make_unique<ReferenceBackend>(), ""}; }

}  // namespace attnspan::reference
