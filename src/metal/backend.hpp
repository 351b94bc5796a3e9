#pragma once
// The Metal backend over a device that carries out launch plans: the GPU, or the emulator of the tests.

#include <memory>

#include "metal/launch_plan.hpp"
#include "registry/backend.hpp"

namespace attnspan::metal {

class MetalDevice : public DeviceMemory {
 public:
  virtual std::string description() const = 0;
  // Runs the launches in order and waits for the last. `scratch` has the plan's scratch_bytes.
  virtual void run(const Plan& plan, void* scratch) = 0;
};

// The backend, or the reason why this device cannot run the shaders.
BackendOrReason make_backend(std::unique_ptr<MetalDevice> device);

}  // namespace attnspan::metal
