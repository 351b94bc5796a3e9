#pragma once
// Compute pipelines, one per specialisation, made on first use and kept; and the recording of dispatches.

#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "webgpu/device.hpp"

namespace attnspan::webgpu {

// A shader entry point with its overrides. `prelude` is prepended to the file: what `override` can't say.
struct Specialisation {
  std::string shader, entry, prelude;
  std::vector<std::pair<std::string, double>> constants;

  std::string key() const;
};

// The bindings of a shader, one letter each from binding 0: u uniform, r read-only storage, w storage.
struct Pipeline {
  WGPUBindGroupLayout layout = nullptr;
  WGPUComputePipeline pipeline = nullptr;
  std::string bindings;
};

class Pipelines {
 public:
  explicit Pipelines(GpuDevice& device) : device_(device) {}
  ~Pipelines();
  Pipelines(const Pipelines&) = delete;
  Pipelines& operator=(const Pipelines&) = delete;

  // Throws Error(internal) with the compiler's message when the shader is not accepted.
  const Pipeline& get(const Specialisation& specialisation, const std::string& bindings);
  // The same out of any WGSL; `label` is its name in messages and must tell it from every other.
  const Pipeline& make(const std::string& label, const std::string& source, const std::string& entry,
                       const std::vector<std::pair<std::string, double>>& constants,
                       const std::string& bindings);
  size_t count() const { return made_.size(); }

 private:
  GpuDevice& device_;
  std::map<std::string, Pipeline> made_;
};

// A part of a buffer. Not given: a few bytes that nobody reads or writes stand for it.
struct Binding {
  WGPUBuffer buffer = nullptr;
  uint64_t offset = 0;
  uint64_t size = 0;  // 0: to the end of the buffer
};

// One command encoder: dispatches run in the order in which they were recorded.
class Commands {
 public:
  explicit Commands(GpuDevice& device);
  ~Commands();
  Commands(const Commands&) = delete;
  Commands& operator=(const Commands&) = delete;

  // A scratch buffer that lives until the device is done with these commands.
  WGPUBuffer scratch(uint64_t bytes);
  void copy(WGPUBuffer from, uint64_t from_offset, WGPUBuffer to, uint64_t to_offset, uint64_t bytes);
  void clear(WGPUBuffer buffer);
  // `bindings` follow the uniform parameters, which become binding 0.
  void dispatch(const Pipeline& pipeline, const void* params, size_t params_bytes,
                const std::vector<Binding>& bindings, uint32_t x, uint32_t y, uint32_t z);
  void submit();

  // Timestamps at the beginning of the first dispatch and at the end of the last, where the adapter has them.
  void measure();
  double measured_seconds();  // after submit(); waits for the device

 private:
  void begin_pass();
  void end_pass();

  GpuDevice& device_;
  WGPUCommandEncoder encoder_ = nullptr;
  WGPUComputePassEncoder pass_ = nullptr;
  std::vector<WGPUBuffer> buffers_;
  std::vector<WGPUBindGroup> groups_;
  WGPUQuerySet queries_ = nullptr;
  WGPUBuffer timestamps_ = nullptr;
  bool submitted_ = false;
};

}  // namespace attnspan::webgpu
