#include "registry/registry.hpp"

#include <cstdlib>
#include <mutex>

#include "registry/make_backends.hpp"

namespace attnspan {
namespace {

std::vector<std::unique_ptr<Backend>>& owned() {
  static std::vector<std::unique_ptr<Backend>> list;
  return list;
}

// "auto" -> ATTNSPAN_BACKEND if set, else "auto".
std::string resolve(const std::string& requested) {
  if (!requested.empty() && requested != "auto") return requested;
  const char* forced = std::getenv("ATTNSPAN_BACKEND");
  return forced != nullptr && *forced != '\0' ? forced : "auto";
}

std::string known_names() {
  std::string names = "auto";
  for (const RegisteredBackend& entry : backends()) names += ", " + entry.name;
  return names;
}

Backend& named(const std::string& name) {
  for (const RegisteredBackend& entry : backends()) {
    if (entry.name != name) continue;
    if (entry.backend == nullptr) {
      throw Error(ErrorCode::unavailable, "backend", name + " is not available: " + entry.reason);
    }
    return *entry.backend;
  }
  throw Error(ErrorCode::invalid_argument, "backend",
              "found '" + name + "', expected one of " + known_names());
}

// Host tensors reach any backend (those with a memory of their own get staged copies), but "auto" only
// chooses backends that work where the tensors already are.
bool reaches(const Backend& backend, Device device) { return backend.device() == device; }

}  // namespace

const std::vector<RegisteredBackend>& backends() {
  static const std::vector<RegisteredBackend> list = [] {
    std::vector<RegisteredBackend> entries;
    for (const BackendEntry& entry : backend_entries()) {
      BackendOrReason made = entry.make();
      entries.push_back({entry.name, made.backend.get(), made.reason});
      if (made.backend) owned().push_back(std::move(made.backend));
    }
    return entries;
  }();
  return list;
}

Support supports_here(const Backend& backend, const Problem& problem) {
  if (backend.device() != problem.device && problem.device != Device::cpu) {
    const std::string device = name_of(backend.device());
    return Support::no("it works on " + device + (device == "cpu" ? "" : " or cpu") +
                       " tensors, found tensors on " + name_of(problem.device));
  }
  return backend.supports(problem);
}

Backend& select_backend(const Problem& problem, const std::string& requested) {
  const std::string name = resolve(requested);
  if (name != "auto") {
    Backend& backend = named(name);
    const Support support = supports_here(backend, problem);
    if (!support)
      throw Error(ErrorCode::unsupported, "backend", name + " does not support this: " + support.reason);
    return backend;
  }
  std::string reasons;
  for (const RegisteredBackend& entry : backends()) {
    if (entry.backend == nullptr || !reaches(*entry.backend, problem.device)) continue;
    const Support support = entry.backend->supports(problem);
    if (support) return *entry.backend;
    reasons += (reasons.empty() ? "" : "; ") + entry.name + ": " + support.reason;
  }
  if (reasons.empty()) {
    throw Error(ErrorCode::unavailable, "backend",
                std::string("none on this machine works on ") + name_of(problem.device) + " tensors");
  }
  throw Error(ErrorCode::unsupported, "backend", "none supports this: " + reasons);
}

Backend& select_backend(Device device, const std::string& requested) {
  const std::string name = resolve(requested);
  if (name != "auto") return named(name);
  for (const RegisteredBackend& entry : backends()) {
    if (entry.backend != nullptr && reaches(*entry.backend, device)) return *entry.backend;
  }
  throw Error(ErrorCode::unavailable, "backend",
              std::string("none on this machine works on ") + name_of(device) + " tensors");
}

}  // namespace attnspan
