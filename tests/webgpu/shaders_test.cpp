// Every shader, joined with its common files, is accepted by the WebGPU implementation at hand.

#include <gtest/gtest.h>

#include "no_device.hpp"
#include "webgpu/backend.hpp"
#include "webgpu/shaders.hpp"

namespace attnspan::webgpu {
namespace {

TEST(Shaders, AreValidAsTheyAre) {
  std::string reason;
  const auto device = GpuDevice::open(reason);
  if (device == nullptr) ATTNSPAN_NO_DEVICE(reason);
  const Capabilities& c = device->capabilities();
  for (const Shader& shader : shaders()) {
    std::string source = shader.source;
    if (shader.name == std::string("attention_forward_matrix")) {  // experimental, and sized by its prelude
      if (c.matrix == 0) continue;
      source = matrix_prelude(c, kMatrixTiles[1], 72, 40) + source;
    }
    WGPUShaderSourceWGSL wgsl{};
    wgsl.chain.sType = WGPUSType_ShaderSourceWGSL;
    wgsl.code = view_of(source);
    WGPUShaderModuleDescriptor descriptor{};
    descriptor.nextInChain = &wgsl.chain;
    device->api().ShaderModuleRelease(device->api().DeviceCreateShaderModule(device->handle(), &descriptor));
    EXPECT_NO_THROW(device->check(shader.name)) << shader.name;
  }
}

TEST(Shaders, ABrokenShaderIsRefused) {
  std::string reason;
  const auto device = GpuDevice::open(reason);
  if (device == nullptr) ATTNSPAN_NO_DEVICE(reason);
  WGPUShaderSourceWGSL wgsl{};
  wgsl.chain.sType = WGPUSType_ShaderSourceWGSL;
  wgsl.code = view_of("@compute @workgroup_size(1) fn main() { let x: u32 = 1.5; }");
  WGPUShaderModuleDescriptor descriptor{};
  descriptor.nextInChain = &wgsl.chain;
  device->api().ShaderModuleRelease(device->api().DeviceCreateShaderModule(device->handle(), &descriptor));
  EXPECT_THROW(device->check("broken"), Error);
}

}  // namespace
}  // namespace attnspan::webgpu
