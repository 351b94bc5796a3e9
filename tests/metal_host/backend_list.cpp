// The backends of the test binaries here: the Metal host itself, on the Metal of these tests.

#include "registry/make_backends.hpp"

namespace attnspan {

std::vector<BackendEntry> backend_entries() {
  return {{"metal", metal::make_backend, Device::metal}, {"reference", reference::make_backend, Device::cpu}};
}

}  // namespace attnspan
