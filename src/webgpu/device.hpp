#pragma once
// The WebGPU device that everything of this backend runs on: instance, adapter, limits, buffers, submissions.

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "registry/backend.hpp"
#include "webgpu/api.hpp"

namespace attnspan::webgpu {

// What the tiles and the checks need to know of the adapter.
struct Capabilities {
  std::string adapter, driver;
  bool software = false;  // a CPU plays the GPU: pipelines cost more than the time they save
  uint32_t workgroup_storage = 16384;
  uint32_t workgroup_threads = 256;
  uint32_t storage_buffers = 8;
  uint32_t workgroups = 65535;  // per dimension of a dispatch
  uint64_t binding_bytes = 0;
  uint64_t buffer_bytes = 0;
  uint32_t offset_alignment = 256;
  uint32_t subgroup_min = 0, subgroup_max = 0;
  bool f16 = false, subgroups = false, timestamps = false;
  uint32_t matrix = 0;  // side of a square subgroup matrix, f16 factors and f32 sums; 0 = none
};

class GpuDevice final : public DeviceMemory {
 public:
  // Null with `reason` set when this machine has no adapter.
  static std::unique_ptr<GpuDevice> open(std::string& reason);
  ~GpuDevice() override;

  const Api& api() const { return api_; }
  const Capabilities& capabilities() const { return capabilities_; }
  WGPUInstance instance() const { return instance_; }
  WGPUDevice handle() const { return device_; }
  WGPUQueue queue() const { return queue_; }

  WGPUBuffer create_buffer(uint64_t bytes, WGPUBufferUsage usage);
  void write(WGPUBuffer buffer, uint64_t offset, const void* data, size_t bytes);
  void read(WGPUBuffer buffer, uint64_t offset, void* to, size_t bytes);  // waits for the device
  void wait_idle();
  // Throws what the implementation reported since the last call.
  void check(const char* what);

  // DeviceMemory: an address is a WGPUBuffer
  void* allocate(size_t bytes) override;
  void release(void* address) override;
  void upload(void* to, const void* from, size_t bytes) override;
  void download(void* to, const void* from, size_t bytes) override;

 private:
  explicit GpuDevice(const Api& api) : api_(api) {}
  bool request_adapter(std::string& reason);
  bool request_device(std::string& reason);
  void read_capabilities();
  void read_matrix_shapes();
  void wait(WGPUFuture future, const bool& done);

  const Api& api_;
  WGPUInstance instance_ = nullptr;
  WGPUAdapter adapter_ = nullptr;
  WGPUDevice device_ = nullptr;
  WGPUQueue queue_ = nullptr;
  Capabilities capabilities_;
  std::mutex error_mutex_;
  std::string error_;

  friend struct DeviceCallbacks;
};

}  // namespace attnspan::webgpu
