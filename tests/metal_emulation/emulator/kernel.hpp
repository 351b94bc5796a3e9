#pragma once
// Kernels by name, called with the arguments that their parameter types ask for. rewrite.sed writes the
// binding attributes of a parameter into its type: `uint lane [[thread_index_in_simdgroup]]` becomes
// `emu::Lane lane`.

#include <array>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "emulator/machine.hpp"
#include "emulator/memory.hpp"

namespace emu {

struct uint3 {
  uint32_t x, y, z;
};

// What a dispatch binds: bytes per buffer index (parameters), or the tensors of an argument buffer.
struct Arguments {
  std::map<int, std::vector<unsigned char>> bytes;
  std::map<int, std::vector<DevicePointer<unsigned char>>> tensors;
};

// ---- parameter types

template <int kIndex, typename T>
struct Constant : T {  // constant T& name [[buffer(kIndex)]]
  explicit Constant(const Arguments& arguments) {
    // A struct of device pointers is an argument buffer; any other struct is plain bytes.
    if (const auto found = arguments.tensors.find(kIndex); found != arguments.tensors.end()) {
      using Pointer = DevicePointer<unsigned char>;
      const size_t count = sizeof(T) / sizeof(Pointer);
      if (found->second.size() != count) throw std::logic_error("argument buffer of another size");
      std::memcpy(static_cast<void*>(static_cast<T*>(this)), found->second.data(), sizeof(T));
      return;
    }
    const std::vector<unsigned char>& bytes = arguments.bytes.at(kIndex);
    if (bytes.size() != sizeof(T)) throw std::logic_error("parameters of another size");
    std::memcpy(static_cast<void*>(static_cast<T*>(this)), bytes.data(), sizeof(T));
  }
};
template <int kIndex, typename T>
struct Dynamic : SharedPointer<T> {  // threadgroup T* name [[threadgroup(kIndex)]]
  static_assert(kIndex == 0);
  explicit Dynamic(const Arguments&) : SharedPointer<T>(0) {}
};
struct Group : uint3 {  // [[threadgroup_position_in_grid]]
  explicit Group(const Arguments&) {
    const auto& group = Machine::current().position().group;
    x = group[0], y = group[1], z = group[2];
  }
};
template <uint32_t Position::*kField>
struct Index {
  uint32_t value = Machine::current().position().*kField;
  explicit Index(const Arguments&) {}
  operator uint32_t() const { return value; }
};
using ThreadIndex = Index<&Position::thread>;   // [[thread_index_in_threadgroup]]
using Lane = Index<&Position::lane>;            // [[thread_index_in_simdgroup]]
using Simdgroup = Index<&Position::simdgroup>;  // [[simdgroup_index_in_threadgroup]]

// ---- the registry

using KernelFunction = std::function<void(const Arguments&)>;
std::map<std::string, KernelFunction>& kernels();

struct RegisterKernel {
  template <typename... Parameters>
  RegisterKernel(const char* name, void (*function)(Parameters...)) {
    kernels()[name] = [function](const Arguments& arguments) {
      function(std::remove_cvref_t<Parameters>(arguments)...);
    };
  }
};

// Function constants: every translation unit has its own copy of the shader's variable.
using ConstantSetter = std::function<void(int)>;
std::multimap<int, ConstantSetter>& function_constants();

struct RegisterConstant {
  template <typename T>
  RegisterConstant(int index, T* variable) {
    function_constants().emplace(index, [variable](int value) { *variable = static_cast<T>(value); });
  }
};

struct Dispatch {
  std::string kernel;
  std::vector<int> constants;  // by function_constant index
  Arguments arguments;
  std::array<uint32_t, 3> groups{};
  uint32_t threads = 0;
  uint32_t shared_bytes = 0;
};
// Runs every threadgroup to its end. Throws Fault.
void dispatch(const Dispatch& work, Schedule schedule);

}  // namespace emu

#define EMU_FUNCTION_CONSTANT(TYPE, NAME, INDEX) \
  static TYPE NAME;                              \
  static const emu::RegisterConstant NAME##_registered(INDEX, &NAME)
