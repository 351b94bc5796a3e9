#include "emulator/report.hpp"

#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <memory>

#include "emulator/machine.hpp"

namespace emu {
namespace {

// The innermost inlined frame of an address that is not the emulator's own, by addr2line (it comes with the
// compiler's binutils). Without it the address itself is given.
std::string kernel_line(const void* address) {
  Dl_info info;
  if (dladdr(address, &info) == 0) return "an unknown place";
  const uintptr_t offset =
      reinterpret_cast<uintptr_t>(address) - 1 - reinterpret_cast<uintptr_t>(info.dli_fbase);
  char command[1024];
  std::snprintf(command, sizeof command, "addr2line -i -e '%s' 0x%zx 2>/dev/null", info.dli_fname,
                static_cast<size_t>(offset));
  std::string place;
  const std::unique_ptr<FILE, int (*)(FILE*)> pipe(popen(command, "r"), pclose);
  char line[1024];
  while (pipe != nullptr && std::fgets(line, sizeof line, pipe.get()) != nullptr) {
    const std::string frame(line);
    const bool inside =
        frame.find("/emulator/") != std::string::npos || frame.find("/usr/") != std::string::npos;
    if (!place.empty() || inside) continue;
    const size_t start = frame.rfind('/') + 1;
    place = frame.substr(start, frame.find_first_of(" \n", start) - start);
  }
  if (!place.empty()) return place;
  std::snprintf(command, sizeof command, "%s+0x%zx", info.dli_fname, static_cast<size_t>(offset));
  return command;
}

}  // namespace

void fail(const std::string& message) { Machine::current().end_with_fault(message); }

void fail_at(const std::string& message, const void* address) {
  fail(message + " at " + kernel_line(address));
}

}  // namespace emu
