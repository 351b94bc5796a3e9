#include "webgpu/api.hpp"

#include <dlfcn.h>

#include <cstdlib>
#include <mutex>
#include <vector>

namespace attnspan::webgpu {
namespace {

// Where to look: what the user named, the file that the build found, then the loader's own search path.
std::vector<std::string> candidates() {
  const char* named = std::getenv("ATTNSPAN_WEBGPU_LIBRARY");
  if (named != nullptr && *named != '\0') return {named};
  return {ATTNSPAN_WEBGPU_LIBRARY_FILE, ATTNSPAN_WEBGPU_LIBRARY_NAME};
}

template <typename Function>
bool find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  return function != nullptr;
}

bool resolve(void* library, Api& api, std::string& reason) {
#define ATTNSPAN_WEBGPU_FIND(name)               \
  if (!find(library, "wgpu" #name, api.name)) {  \
    reason = api.library + " has no wgpu" #name; \
    return false;                                \
  }
  ATTNSPAN_WEBGPU_CALLS(ATTNSPAN_WEBGPU_FIND)
#undef ATTNSPAN_WEBGPU_FIND
  find(library, "wgpuDevicePoll", api.DevicePoll);
#ifdef ATTNSPAN_WEBGPU_DAWN
  find(library, "wgpuAdapterPropertiesSubgroupMatrixConfigsFreeMembers",
       api.AdapterPropertiesSubgroupMatrixConfigsFreeMembers);
#endif
  return true;
}

bool load(Api& api, std::string& reason) {
  // Vulkan drivers look for a Wayland display and write to stderr where this is unset, as it is in containers
  // and for root; set to a folder without a socket, they go on in silence.
  setenv("XDG_RUNTIME_DIR", "/tmp", /*overwrite=*/0);
  for (const std::string& file : candidates()) {
    void* library = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      reason = dlerror();
      continue;
    }
    api.library = file;
    return resolve(library, api, reason);
  }
  reason = "no WebGPU library: " + reason;
  return false;
}

}  // namespace

const Api* load_api(std::string& reason) {
  static std::string why;
  static Api api;
  static const bool loaded = load(api, why);
  reason = why;
  return loaded ? &api : nullptr;
}

}  // namespace attnspan::webgpu
