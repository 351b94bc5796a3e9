# Writes a C++ file with the text of every shader: cmake -DOUT=file -DSHADERS=a.wgsl;b.wgsl -P embed_shaders.cmake
set(text "// Generated from src/webgpu/shaders.\n#include \"webgpu/shaders.hpp\"\n\nnamespace attnspan::webgpu {\n\n")
set(names "")
foreach(file IN LISTS SHADERS)
  get_filename_component(name ${file} NAME_WE)
  file(READ ${file} source)
  string(APPEND text "static const char k_${name}[] = R\"WGSL(${source})WGSL\";\n\n")
  string(APPEND names "      {\"${name}\", k_${name}},\n")
endforeach()
string(APPEND text "const std::vector<Shader>& shaders() {\n  static const std::vector<Shader> list = {\n${names}  };\n"
                   "  return list;\n}\n\n}  // namespace attnspan::webgpu\n")
file(WRITE ${OUT} "${text}")
