#pragma once
// The text of src/webgpu/shaders/*.wgsl, joined with the common files that they name, embedded by the build.

#include <string>
#include <vector>

namespace attnspan::webgpu {

struct Shader {
  const char* name;  // of the file, without .wgsl
  const char* source;
};
const std::vector<Shader>& shaders();

}  // namespace attnspan::webgpu
