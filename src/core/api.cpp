// The public calls: validate, choose a backend, stage host tensors where the backend has its own memory, run.

#include "attnspan/attention.hpp"
#include "core/merge_problem.hpp"
#include "core/problem.hpp"
#include "core/staging.hpp"
#include "core/validation.hpp"
#include "registry/registry.hpp"

namespace attnspan {
namespace {

bool needs_staging(const Backend& backend, Device tensors) {
  if (backend.device() == tensors) return false;
  if (tensors == Device::cpu) return true;
  throw Error(ErrorCode::unsupported, "backend",
              backend.name() + " works on " + name_of(backend.device()) +
                  " or cpu tensors, found tensors on " + name_of(tensors));
}

int64_t run(Backend& backend, const Problem& problem, const Execution& execution) {
  return problem.phase == Phase::forward ? backend.forward(problem, execution)
                                         : backend.backward(problem, execution);
}

template <typename Args>
Result run_checked(const Args& args, const Execution& execution) {
  const Problem problem = make_problem(args);
  Backend& backend = select_backend(problem, execution.backend);
  if (!needs_staging(backend, problem.device)) return {backend.name(), run(backend, problem, execution)};
  Staging staging(*backend.memory(), backend.device());
  Execution staged = execution;
  staged.stream = nullptr;  // the caller's stream and scratch belong to device tensors
  staged.workspace = nullptr;
  staged.workspace_bytes = 0;
  const auto device_args = staging.stage(args);
  const int64_t replaced = run(backend, make_problem(device_args), staged);
  staging.fetch_outputs();
  return {backend.name(), replaced};
}

template <typename Args>
Support support_of(const Args& args, const std::string& name) {
  const Problem problem = make_problem(args);
  for (const RegisteredBackend& entry : backends(name)) {
    if (entry.name != name) continue;
    if (entry.backend == nullptr) return Support::no("not available: " + entry.reason);
    return supports_here(*entry.backend, problem);
  }
  throw Error(ErrorCode::invalid_argument, "backend", "found '" + name + "', expected a backend's name");
}

}  // namespace

Result forward(const ForwardArgs& args, const Execution& execution) { return run_checked(args, execution); }

Result backward(const BackwardArgs& args, const Execution& execution) { return run_checked(args, execution); }

Result merge_states(const MergeArgs& args, const Execution& execution) {
  const MergeProblem problem = make_merge_problem(args);
  Backend& backend = select_backend(problem.device, execution.backend);
  if (!needs_staging(backend, problem.device)) {
    backend.merge(problem, execution);
    return {backend.name(), 0};
  }
  Staging staging(*backend.memory(), backend.device());
  Execution staged = execution;
  staged.stream = nullptr;
  const MergeArgs device_args = staging.stage(args);
  backend.merge(make_merge_problem(device_args), staged);
  staging.fetch_outputs();
  return {backend.name(), 0};
}

Result decode(const Tensor& query, const KvView& cache, const Tensor& out, const Tensor& lse,
              const AttentionOptions& options, const Execution& execution) {
  if (query.rank == kMaxRank) {  // make_problem refuses other ranks
    require(query.shape[1] <= kMaxDecodeRows, "query", std::to_string(query.shape[1]) + " rows",
            "at most " + std::to_string(kMaxDecodeRows) + "; forward() takes longer chunks");
  }
  ForwardArgs args;
  args.query = query;
  args.cache = &cache;
  args.out = out;
  args.lse = lse;
  args.options = options;
  return forward(args, execution);
}

std::vector<BackendInfo> list_backends() {
  std::vector<BackendInfo> list;
  for (const RegisteredBackend& entry : backends()) {
    const Backend* backend = entry.backend;
    list.push_back({entry.name, backend != nullptr, backend != nullptr ? backend->device() : Device::cpu,
                    backend != nullptr ? backend->description() : entry.reason});
  }
  return list;
}

Support supports(const ForwardArgs& args, const std::string& backend) { return support_of(args, backend); }

Support supports(const BackwardArgs& args, const std::string& backend) { return support_of(args, backend); }

size_t workspace_bytes(const ForwardArgs& args, const Execution& execution) {
  const Problem problem = make_problem(args);
  return select_backend(problem, execution.backend).workspace_bytes(problem, execution);
}

size_t workspace_bytes(const BackwardArgs& args, const Execution& execution) {
  const Problem problem = make_problem(args);
  return select_backend(problem, execution.backend).workspace_bytes(problem, execution);
}

}  // namespace attnspan
