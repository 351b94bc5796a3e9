#pragma once

#include "webgpu/bind.hpp"

namespace attnspan::webgpu {

// Everything that a phase needs.
struct Context {
  GpuDevice& device;
  Pipelines& pipelines;
};

// Each records its dispatches; the caller submits.
void record_forward(Context& context, Commands& commands, const Problem& problem);

}  // namespace attnspan::webgpu
