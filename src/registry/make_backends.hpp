#pragma once
// The entry points of the backends, in order of preference. A backend that this build leaves out has its
// reason here, so that `attnspan info` can say why.

#include <vector>

#include "registry/backend.hpp"

namespace attnspan {

namespace cpu {
BackendOrReason make_backend();
}
namespace cuda {
BackendOrReason make_backend();
}
namespace webgpu {
BackendOrReason make_backend();
}
namespace metal {
BackendOrReason make_backend();
}
namespace reference {
BackendOrReason make_backend();
}

struct BackendEntry {
  const char* name;
  BackendOrReason (*make)();
  Device device;  // where its tensors live
};

// The list itself; a test build may link another definition (see tests/metal_emulation).
std::vector<BackendEntry> backend_entries();

}  // namespace attnspan
