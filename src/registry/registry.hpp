#pragma once
// The ordered list of backends. The first that supports the problem wins; ATTNSPAN_BACKEND, or a name given
// by the caller, forces one.

#include <string>
#include <vector>

#include "registry/backend.hpp"

namespace attnspan {

struct RegisteredBackend {
  std::string name;
  Backend* backend = nullptr;  // null: not available, for this reason
  std::string reason;
};

// Every backend that this library was built to know, in order of preference. All are made for this list; the
// calls below make only those that they need.
const std::vector<RegisteredBackend>& backends();
// The one of this name, or none; for "auto" all of them.
std::vector<RegisteredBackend> backends(const std::string& name);

// Backend::supports, and before it whether the tensors are where the backend works or in host memory, from
// where they can be staged.
Support supports_here(const Backend& backend, const Problem& problem);

// The backend for a problem. Throws Error(unavailable | unsupported) naming the backend and the reason.
Backend& select_backend(const Problem& problem, const std::string& requested);
// The backend by name, or for "auto" the first whose tensors live on `device`.
Backend& select_backend(Device device, const std::string& requested);

}  // namespace attnspan
