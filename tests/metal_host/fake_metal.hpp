#pragma once
// A Metal that runs the shaders on the emulator, and holds its caller to Metal's rules: what is bound,
// resident, aligned, encoded, committed and waited for. device.mm meets it on Linux. Test-only.

#include <string>

#include "emulator/machine.hpp"

namespace fake_metal {

// What the next device is like, and what the host asked of the last one.
struct State {
  emu::Schedule schedule = emu::Schedule::forward;
  bool has_device = true;
  bool has_simdgroup_matrices = true;
  bool library_loads = true;
  unsigned long threadgroup_bytes = 32768;
  unsigned long simd_width = 32;
  unsigned long most_threads = 1024;
  std::string failing_kernel;  // its function does not exist

  int functions_made = 0, pipelines_made = 0, command_buffers = 0, dispatches = 0;
};
State& state();

}  // namespace fake_metal
