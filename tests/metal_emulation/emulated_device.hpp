#pragma once
// A MetalDevice that runs the shaders that ship on the emulator.

#include "emulator/machine.hpp"
#include "metal/backend.hpp"

namespace attnspan::metal_emulation {

std::unique_ptr<metal::MetalDevice> make_emulated_device(emu::Schedule schedule);
// The backend of the test build; the schedule is ATTNSPAN_METAL_SCHEDULE, forward where it is not set.
BackendOrReason make_backend();

}  // namespace attnspan::metal_emulation
