// The backends of the test binaries here: linked in place of src/registry/backend_list.cpp.

#include "emulated_device.hpp"
#include "registry/make_backends.hpp"

namespace attnspan {

std::vector<BackendEntry> backend_entries() {
  return {{"metal", metal_emulation::make_backend, Device::metal},
          {"reference", reference::make_backend, Device::cpu}};
}

}  // namespace attnspan
