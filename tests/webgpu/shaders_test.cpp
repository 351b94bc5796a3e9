// Every shader as it lies in src/webgpu/shaders is accepted by the WebGPU implementation at hand, and the
// blocks that several files share are the same in all of them (WGSL has no include).

#include <gtest/gtest.h>

#include <map>

#include "webgpu/backend.hpp"
#include "webgpu/shaders.hpp"

namespace attnspan::webgpu {
namespace {

// name of a block -> text, and the file where it was first seen
using Blocks = std::map<std::string, std::pair<std::string, std::string>>;

void expect_same_blocks(const Shader& shader, Blocks& blocks) {
  const std::string text = shader.source, opening = "// ---- shared: ", closing = "// ---- end shared";
  for (size_t at = text.find(opening); at != std::string::npos; at = text.find(opening, at + 1)) {
    const size_t line_end = text.find('\n', at), end = text.find(closing, at);
    ASSERT_NE(end, std::string::npos) << shader.name << ": a shared block without an end";
    const std::string name = text.substr(at + opening.size(), line_end - at - opening.size());
    const std::string body = text.substr(line_end, end - line_end);
    const auto [first, fresh] = blocks.try_emplace(name, body, shader.name);
    EXPECT_EQ(first->second.first, body)
        << "block '" << name << "' of " << shader.name << " differs from that of " << first->second.second;
  }
}

TEST(Shaders, SharedBlocksAreTheSame) {
  Blocks blocks;
  for (const Shader& shader : shaders()) expect_same_blocks(shader, blocks);
  EXPECT_GE(blocks.size(), 5U);
}

TEST(Shaders, AreValidAsTheyAre) {
  std::string reason;
  const auto device = GpuDevice::open(reason);
  if (device == nullptr) GTEST_SKIP() << reason;
  const Capabilities& c = device->capabilities();
  for (const Shader& shader : shaders()) {
    std::string source = shader.source;
    if (shader.name == std::string("attention_forward_matrix")) {  // experimental, and sized by its prelude
      if (c.matrix == 0) continue;
      source = matrix_prelude(c, kMatrixTiles[0], 72, 40) + source;
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
  if (device == nullptr) GTEST_SKIP() << reason;
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
