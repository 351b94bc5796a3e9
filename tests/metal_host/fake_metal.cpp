#include "fake_metal.hpp"

#include <cstring>
#include <set>
#include <stdexcept>

#include "emulator/kernel.hpp"
#include "emulator/report.hpp"
#include "objc_runtime.hpp"

namespace fake_metal {
namespace {

using objc::autorelease;
using objc::method;
using objc::Methods;
using objc::Object;
using objc::Selector;
using UInteger = unsigned long;

constexpr UInteger kBool = 53, kInt = 29;    // MTLDataType
constexpr UInteger kMostInlineBytes = 4096;  // setBytes
constexpr uint64_t kFirstAddress = 0x1000000;

[[noreturn]] void broken(const std::string& rule) { throw std::logic_error("Metal's rules: " + rule); }
void require(bool holds, const std::string& rule) {
  if (!holds) broken(rule);
}

struct String final : Object {
  explicit String(std::string value) : Object(table()), text(std::move(value)) {}
  const char* kind() const override { return "NSString"; }
  static const char* utf8(String* self, Selector*) { return self->text.c_str(); }
  static const Methods& table() {
    static const Methods methods = {method("UTF8String", &utf8)};
    return methods;
  }
  std::string text;
};

struct Error final : Object {
  explicit Error(std::string value) : Object(table()), text(std::move(value)) {}
  const char* kind() const override { return "NSError"; }
  static Object* description(Error* self, Selector*) { return autorelease(new String(self->text)); }
  static const Methods& table() {
    static const Methods methods = {method("localizedDescription", &description)};
    return methods;
  }
  std::string text;
};

// nil, with the error where the caller wants it
Object* failed(Object** error, const std::string& text) {
  if (error != nullptr) *error = autorelease(new Error(text));
  return nullptr;
}

struct Data final : Object {
  explicit Data(size_t bytes) : Object(table()), size(bytes) {}
  const char* kind() const override { return "dispatch_data"; }
  static const Methods& table() {
    static const Methods methods;
    return methods;
  }
  size_t size;
};

struct ConstantValues final : Object {
  ConstantValues() : Object(table()), values(64), set(64) {}
  const char* kind() const override { return "MTLFunctionConstantValues"; }
  static void set_value(ConstantValues* self, Selector*, const void* value, UInteger type, UInteger index) {
    require(type == kBool || type == kInt, "function constants here are bools and ints");
    require(index < self->values.size(), "function constant index out of range");
    if (type == kBool) self->values[index] = *static_cast<const bool*>(value) ? 1 : 0;
    if (type == kInt) std::memcpy(&self->values[index], value, sizeof(int));
    self->set[index] = true;
  }
  static const Methods& table() {
    static const Methods methods = {method("setConstantValue:type:atIndex:", &set_value)};
    return methods;
  }
  std::vector<int> values;
  std::vector<bool> set;
};

struct Function final : Object {
  Function(std::string kernel, std::vector<int> values)
      : Object(table()), name(std::move(kernel)), constants(std::move(values)) {}
  const char* kind() const override { return "MTLFunction"; }
  static const Methods& table() {
    static const Methods methods;
    return methods;
  }
  std::string name;
  std::vector<int> constants;
};

struct Pipeline final : Object {
  explicit Pipeline(const Function& function)
      : Object(table()), name(function.name), constants(function.constants) {}
  const char* kind() const override { return "MTLComputePipelineState"; }
  static UInteger width(Pipeline*, Selector*) { return state().simd_width; }
  static UInteger most_threads(Pipeline*, Selector*) { return state().most_threads; }
  static const Methods& table() {
    static const Methods methods = {method("threadExecutionWidth", &width),
                                    method("maxTotalThreadsPerThreadgroup", &most_threads)};
    return methods;
  }
  std::string name;
  std::vector<int> constants;
};

struct Library final : Object {
  Library() : Object(table()) {}
  const char* kind() const override { return "MTLLibrary"; }
  static Object* new_function(Library*, Selector*, String* name, ConstantValues* values, Object** error) {
    ++state().functions_made;
    if (name->text == state().failing_kernel || !emu::kernels().contains(name->text)) {
      return failed(error, "no function is called " + name->text);
    }
    for (const auto& [index, setter] : emu::function_constants()) {
      require(values->set.at(index),
              "function constant " + std::to_string(index) + " of " + name->text + " has no value");
    }
    return new Function(name->text, values->values);
  }
  static const Methods& table() {
    static const Methods methods = {method("newFunctionWithName:constantValues:error:", &new_function)};
    return methods;
  }
};

struct Buffer final : Object {
  explicit Buffer(size_t bytes)
      : Object(table()), words((bytes + 15) / 16 * 2, 0xfff7fff7fff7fff7ULL), extent{} {
    extent = {reinterpret_cast<unsigned char*>(words.data()),
              reinterpret_cast<unsigned char*>(words.data()) + bytes};
    static uint64_t next = kFirstAddress;
    address = next;
    next += (bytes + 0x10000) / 0x10000 * 0x10000 + 0x10000;
  }
  const char* kind() const override { return "MTLBuffer"; }
  size_t size() const { return static_cast<size_t>(extent.end - extent.begin); }
  static void* contents(Buffer* self, Selector*) { return self->extent.begin; }
  static uint64_t gpu_address(Buffer* self, Selector*) { return self->address; }
  static const Methods& table() {
    static const Methods methods = {method("contents", &contents), method("gpuAddress", &gpu_address)};
    return methods;
  }
  std::vector<uint64_t> words;
  emu::Extent extent;
  uint64_t address = 0;
};

struct Size {  // MTLSize
  UInteger width, height, depth;
};

struct Encoder final : Object {
  Encoder() : Object(table()) {}
  const char* kind() const override { return "MTLComputeCommandEncoder"; }
  ~Encoder() override {
    if (pipeline != nullptr) pipeline->release();
  }

  static void set_pipeline(Encoder* self, Selector*, Pipeline* pipeline) {
    require(pipeline != nullptr, "a pipeline is not nil");
    pipeline->retain();
    if (self->pipeline != nullptr) self->pipeline->release();
    self->pipeline = pipeline;
  }
  static void use(Encoder* self, Selector*, Buffer* buffer, UInteger usage) {
    require(usage == 3, "tensors here are read and written");
    self->resident.insert(buffer);
  }
  static void set_bytes(Encoder* self, Selector*, const void* bytes, UInteger length, UInteger index) {
    require(length > 0 && length <= kMostInlineBytes, "setBytes takes 1 to 4096 bytes");
    const auto* from = static_cast<const unsigned char*>(bytes);
    self->bound[index].assign(from, from + length);
  }
  static void set_threadgroup_length(Encoder* self, Selector*, UInteger length, UInteger index) {
    require(index == 0 && length % 16 == 0, "threadgroup memory comes in multiples of 16 bytes");
    require(length <= state().threadgroup_bytes, "threadgroup memory within the device's limit");
    self->threadgroup_bytes = length;
  }
  static void barrier(Encoder* self, Selector*, UInteger scope) {
    require(scope == 1, "the scope is buffers");
    self->ordered = true;
  }
  static void end(Encoder* self, Selector*) {
    require(!self->ended, "an encoder ends once");
    self->ended = true;
  }
  static void dispatch(Encoder* self, Selector*, Size groups, Size threads) {
    require(!self->ended && self->pipeline != nullptr, "a dispatch needs an open encoder and a pipeline");
    require(self->ordered, "dispatches that share untracked memory need a barrier between them");
    require(groups.width > 0 && groups.height > 0 && groups.depth > 0, "a grid is not empty");
    require(threads.width <= state().most_threads && threads.height == 1 && threads.depth == 1,
            "threads of a group");
    self->ordered = false;
    ++state().dispatches;
    emu::Dispatch work;
    work.kernel = self->pipeline->name;
    work.constants = self->pipeline->constants;
    work.groups = {static_cast<uint32_t>(groups.width), static_cast<uint32_t>(groups.height),
                   static_cast<uint32_t>(groups.depth)};
    work.threads = static_cast<uint32_t>(threads.width);
    work.shared_bytes = static_cast<uint32_t>(self->threadgroup_bytes);
    std::vector<uint64_t> addresses(self->bound.at(0).size() / sizeof(uint64_t));
    std::memcpy(addresses.data(), self->bound.at(0).data(), addresses.size() * sizeof(uint64_t));
    for (const uint64_t address : addresses) work.arguments.tensors[0].push_back(self->resolve(address));
    work.arguments.bytes[1] = self->bound.at(1);
    self->work.push_back(std::move(work));
  }
  static const Methods& table() {
    static const Methods methods = {method("setComputePipelineState:", &set_pipeline),
                                    method("useResource:usage:", &use),
                                    method("setBytes:length:atIndex:", &set_bytes),
                                    method("setThreadgroupMemoryLength:atIndex:", &set_threadgroup_length),
                                    method("memoryBarrierWithScope:", &barrier),
                                    method("dispatchThreadgroups:threadsPerThreadgroup:", &dispatch),
                                    method("endEncoding", &end)};
    return methods;
  }

  // An address in a buffer that useResource made resident.
  emu::DevicePointer<unsigned char> resolve(uint64_t address) const {
    if (address == 0) return {};
    for (const Buffer* buffer : resident) {
      if (address < buffer->address || address > buffer->address + buffer->size()) continue;
      return {buffer->extent.begin + (address - buffer->address), &buffer->extent};
    }
    broken("an address lies in a buffer that useResource named");
  }

  Pipeline* pipeline = nullptr;
  std::set<Buffer*> resident;
  std::map<UInteger, std::vector<unsigned char>> bound;
  UInteger threadgroup_bytes = 0;
  bool ordered = true, ended = false;
  std::vector<emu::Dispatch> work;
};

struct Commands final : Object {
  Commands() : Object(table()) { ++state().command_buffers; }
  const char* kind() const override { return "MTLCommandBuffer"; }
  ~Commands() override {
    if (encoder != nullptr) encoder->release();
  }
  static Object* encode(Commands* self, Selector*, UInteger type) {
    require(type == 0 && self->encoder == nullptr, "one serial encoder");
    self->encoder = new Encoder();
    self->encoder->retain();
    return autorelease(self->encoder);
  }
  static void commit(Commands* self, Selector*) {
    require(self->encoder != nullptr && self->encoder->ended && !self->committed,
            "commit after the encoder has ended, once");
    self->committed = true;
    try {
      for (const emu::Dispatch& work : self->encoder->work) emu::dispatch(work, state().schedule);
    } catch (const emu::Fault& fault) {
      self->fault = fault.what();
    }
  }
  static void wait(Commands* self, Selector*) {
    require(self->committed, "waiting is for committed work");
    self->waited = true;
  }
  static UInteger status(Commands* self, Selector*) {
    require(self->waited, "the status is asked for after waiting");
    return self->fault.empty() ? 4 : 5;
  }
  static Object* error(Commands* self, Selector*) {
    return self->fault.empty() ? nullptr : autorelease(new Error(self->fault));
  }
  static const Methods& table() {
    static const Methods methods = {method("computeCommandEncoderWithDispatchType:", &encode),
                                    method("commit", &commit), method("waitUntilCompleted", &wait),
                                    method("status", &status), method("error", &error)};
    return methods;
  }
  Encoder* encoder = nullptr;
  bool committed = false, waited = false;
  std::string fault;
};

struct Queue final : Object {
  Queue() : Object(table()) {}
  const char* kind() const override { return "MTLCommandQueue"; }
  static Object* command_buffer(Queue*, Selector*) { return autorelease(new Commands()); }
  static const Methods& table() {
    static const Methods methods = {method("commandBuffer", &command_buffer)};
    return methods;
  }
};

struct Device final : Object {
  Device() : Object(table()) {}
  const char* kind() const override { return "MTLDevice"; }
  static Object* name(Device*, Selector*) { return autorelease(new String("a Metal of the tests")); }
  static UInteger threadgroup_bytes(Device*, Selector*) { return state().threadgroup_bytes; }
  static bool supports(Device*, Selector*, long family) {
    return family <= 1007 && state().has_simdgroup_matrices;
  }
  static Object* new_queue(Device*, Selector*) { return new Queue(); }
  static Object* new_buffer(Device*, Selector*, UInteger length, UInteger options) {
    require(options == 0, "storage is shared");
    return length > 0 && length < UInteger{1} << 40 ? new Buffer(length) : nullptr;
  }
  static Object* new_library(Device*, Selector*, Data* data, Object** error) {
    if (!state().library_loads || data->size == 0) return failed(error, "no Metal library");
    return new Library();
  }
  static Object* new_pipeline(Device*, Selector*, Function* function, Object**) {
    ++state().pipelines_made;
    return new Pipeline(*function);
  }
  static const Methods& table() {
    static const Methods methods = {method("name", &name),
                                    method("maxThreadgroupMemoryLength", &threadgroup_bytes),
                                    method("supportsFamily:", &supports),
                                    method("newCommandQueue", &new_queue),
                                    method("newBufferWithLength:options:", &new_buffer),
                                    method("newLibraryWithData:error:", &new_library),
                                    method("newComputePipelineStateWithFunction:error:", &new_pipeline)};
    return methods;
  }
};

Object* string_with_utf8(Object*, Selector*, const char* text) { return autorelease(new String(text)); }
Object* new_constant_values(Object*, Selector*) { return new ConstantValues(); }

struct Class final : Object {
  explicit Class(const Methods& methods) : Object(methods) {}
  const char* kind() const override { return "class"; }
};
const Methods kStringClass = {method("stringWithUTF8String:", &string_with_utf8)};
const Methods kConstantsClass = {method("new", &new_constant_values)};

}  // namespace

State& state() {
  static State state;
  return state;
}

}  // namespace fake_metal

extern "C" {

// The classes that device.mm names.
fake_metal::Class _OBJC_CLASS_NSString(fake_metal::kStringClass);
fake_metal::Class _OBJC_CLASS_MTLFunctionConstantValues(fake_metal::kConstantsClass);
int __objc_class_name_NSString = 0;
int __objc_class_name_MTLFunctionConstantValues = 0;

objc::Object* MTLCreateSystemDefaultDevice() {
  return fake_metal::state().has_device ? new fake_metal::Device() : nullptr;
}
objc::Object* dispatch_data_create(const void*, size_t size, void*, void*) {
  return new fake_metal::Data(size);
}

}  // extern "C"

// In place of the compiled shaders, which the tests link as C++.
asm(".section .rodata\n"
    ".globl attnspan_metal_library\n"
    ".globl attnspan_metal_library_end\n"
    "attnspan_metal_library: .ascii \"shaders\"\n"
    "attnspan_metal_library_end: .byte 0\n"
    ".previous");
