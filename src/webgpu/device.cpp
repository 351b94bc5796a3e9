#include "webgpu/device.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <thread>

#include "attnspan/error.hpp"

namespace attnspan::webgpu {

// The callbacks of webgpu.h: plain functions with two pointers.
struct DeviceCallbacks {
  struct Request {
    bool done = false;
    void* handle = nullptr;
    std::string message;
  };

  static void adapter(WGPURequestAdapterStatus status, WGPUAdapter adapter, WGPUStringView message, void* to,
                      void*) {
    auto& request = *static_cast<Request*>(to);
    request.done = true;
    request.message = text_of(message);
    if (status == WGPURequestAdapterStatus_Success) request.handle = adapter;
  }
  static void device(WGPURequestDeviceStatus status, WGPUDevice device, WGPUStringView message, void* to,
                     void*) {
    auto& request = *static_cast<Request*>(to);
    request.done = true;
    request.message = text_of(message);
    if (status == WGPURequestDeviceStatus_Success) request.handle = device;
  }
  static void mapped(WGPUMapAsyncStatus status, WGPUStringView message, void* to, void*) {
    auto& request = *static_cast<Request*>(to);
    request.done = true;
    if (status != WGPUMapAsyncStatus_Success) request.message = "mapping failed: " + text_of(message);
  }
  static void work_done(WGPUQueueWorkDoneStatus, WGPUStringView, void* to, void*) {
    static_cast<Request*>(to)->done = true;
  }
  static void error(WGPUDevice const*, WGPUErrorType, WGPUStringView message, void* to, void*) {
    auto& device = *static_cast<GpuDevice*>(to);
    const std::lock_guard lock(device.error_mutex_);
    if (device.error_.empty()) device.error_ = text_of(message);
  }
  static void lost(WGPUDevice const*, WGPUDeviceLostReason reason, WGPUStringView message, void* to, void*) {
    if (reason == WGPUDeviceLostReason_Destroyed) return;
    auto& device = *static_cast<GpuDevice*>(to);
    const std::lock_guard lock(device.error_mutex_);
    device.error_ = "the device was lost: " + text_of(message);
  }
};

namespace {

uint64_t padded(uint64_t bytes) { return (bytes + 15) / 16 * 16; }  // shaders read 16 bytes at a time

#ifdef ATTNSPAN_WEBGPU_DAWN
// Subgroup matrices are experimental, f16 on NVIDIA is behind a toggle, and shader loops here keep their own
// bounds.
const char* const kDawnToggles[] = {"allow_unsafe_apis", "vulkan_enable_f16_on_nvidia", "disable_robustness"};

// Quantised timestamps hide kernels below 0.1 ms. Scratch memory is written before it is read: clearing it
// costs a step of decode a fifth of its time.
const char* const kDawnDisabledToggles[] = {"timestamp_quantization", "lazy_clear_resource_on_first_use"};

WGPUDawnTogglesDescriptor dawn_toggles() {
  WGPUDawnTogglesDescriptor toggles{};
  toggles.disabledToggleCount = std::size(kDawnDisabledToggles);
  toggles.disabledToggles = kDawnDisabledToggles;
  toggles.chain.sType = WGPUSType_DawnTogglesDescriptor;
  toggles.enabledToggleCount = std::getenv("ATTNSPAN_WEBGPU_ROBUST") != nullptr ? 2 : 3;
  toggles.enabledToggles = kDawnToggles;
  return toggles;
}
#endif

}  // namespace

std::unique_ptr<GpuDevice> GpuDevice::open(std::string& reason) {
  const Api* api = load_api(reason);
  if (api == nullptr) return nullptr;
  std::unique_ptr<GpuDevice> device(new GpuDevice(*api));
  if (!device->request_adapter(reason) || !device->request_device(reason)) return nullptr;
  return device;
}

bool GpuDevice::request_adapter(std::string& reason) {
  WGPUInstanceDescriptor descriptor{};
  if (api_.DevicePoll == nullptr) {
    static const WGPUInstanceFeatureName timed = WGPUInstanceFeatureName_TimedWaitAny;
    descriptor.requiredFeatureCount = 1;
    descriptor.requiredFeatures = &timed;
  }
  instance_ = api_.CreateInstance(&descriptor);
  if (instance_ == nullptr) {
    reason = "wgpuCreateInstance of " + api_.library + " failed";
    return false;
  }
  WGPURequestAdapterOptions options{};
  options.featureLevel = WGPUFeatureLevel_Core;
  options.powerPreference = WGPUPowerPreference_HighPerformance;
#ifdef ATTNSPAN_WEBGPU_DAWN
  WGPUDawnTogglesDescriptor toggles = dawn_toggles();
  options.nextInChain = &toggles.chain;
#endif
  DeviceCallbacks::Request request;
  WGPURequestAdapterCallbackInfo callback{};
  callback.mode = WGPUCallbackMode_AllowProcessEvents;
  callback.callback = DeviceCallbacks::adapter;
  callback.userdata1 = &request;
  wait(api_.InstanceRequestAdapter(instance_, &options, callback), request.done);
  adapter_ = static_cast<WGPUAdapter>(request.handle);
  if (adapter_ == nullptr) {
    reason = "no WebGPU adapter: " + request.message;
    return false;
  }
  // Dawn's stand-in for a missing driver: it accepts everything and computes nothing.
  WGPUAdapterInfo info{};
  api_.AdapterGetInfo(adapter_, &info);
  const bool computes = info.backendType != WGPUBackendType_Null;
  api_.AdapterInfoFreeMembers(info);
  if (!computes) reason = "no WebGPU adapter: " + api_.library + " found no driver, only its null backend";
  return computes;
}

void GpuDevice::read_capabilities() {
  WGPUAdapterInfo info{};
  api_.AdapterGetInfo(adapter_, &info);
  capabilities_.adapter = text_of(info.device);
  capabilities_.driver = text_of(info.description);
  capabilities_.software = info.adapterType == WGPUAdapterType_CPU;
  capabilities_.subgroup_min = info.subgroupMinSize;
  capabilities_.subgroup_max = info.subgroupMaxSize;
  api_.AdapterInfoFreeMembers(info);
  const auto has = [&](WGPUFeatureName feature) { return api_.AdapterHasFeature(adapter_, feature) != 0; };
  capabilities_.f16 = has(WGPUFeatureName_ShaderF16);
  capabilities_.subgroups = has(WGPUFeatureName_Subgroups);
  capabilities_.timestamps = has(WGPUFeatureName_TimestampQuery);
#ifdef ATTNSPAN_WEBGPU_DAWN
  if (has(WGPUFeatureName_ChromiumExperimentalSubgroupMatrix)) read_matrix_shapes();
#endif
}

// Square shapes of f16 factors and f32 sums, where every subgroup of the device has the same size.
void GpuDevice::read_matrix_shapes() {
#ifdef ATTNSPAN_WEBGPU_DAWN
  if (!capabilities_.f16 || !capabilities_.subgroups ||
      capabilities_.subgroup_min != capabilities_.subgroup_max)
    return;
  WGPUAdapterPropertiesSubgroupMatrixConfigs shapes{};
  shapes.chain.sType = WGPUSType_AdapterPropertiesSubgroupMatrixConfigs;
  WGPUAdapterInfo info{};
  info.nextInChain = &shapes.chain;
  api_.AdapterGetInfo(adapter_, &info);
  for (size_t i = 0; i < shapes.configCount; ++i) {
    const WGPUSubgroupMatrixConfig& shape = shapes.configs[i];
    if (shape.componentType != WGPUSubgroupMatrixComponentType_F16 ||
        shape.resultComponentType != WGPUSubgroupMatrixComponentType_F32 || shape.M != shape.N ||
        shape.M != shape.K)
      continue;
    if (shape.M <= capabilities_.subgroup_min) capabilities_.matrix = std::max(capabilities_.matrix, shape.M);
  }
  if (api_.AdapterPropertiesSubgroupMatrixConfigsFreeMembers != nullptr)
    api_.AdapterPropertiesSubgroupMatrixConfigsFreeMembers(shapes);
  api_.AdapterInfoFreeMembers(info);
#endif
}

bool GpuDevice::request_device(std::string& reason) {
  read_capabilities();
  Capabilities& c = capabilities_;
  WGPULimits limits{};
  api_.AdapterGetLimits(adapter_, &limits);
  limits.nextInChain = nullptr;
  c.workgroup_storage = limits.maxComputeWorkgroupStorageSize;
  c.workgroup_threads = limits.maxComputeInvocationsPerWorkgroup;
  c.storage_buffers = limits.maxStorageBuffersPerShaderStage;
  c.workgroups = limits.maxComputeWorkgroupsPerDimension;
  c.binding_bytes =
      std::min<uint64_t>(limits.maxStorageBufferBindingSize, 0xfffffff0U);  // shaders count in u32
  c.buffer_bytes = limits.maxBufferSize;
  c.offset_alignment = limits.minStorageBufferOffsetAlignment;

  std::vector<WGPUFeatureName> features;
  if (c.f16) features.push_back(WGPUFeatureName_ShaderF16);
  if (c.subgroups) features.push_back(WGPUFeatureName_Subgroups);
  if (c.timestamps) features.push_back(WGPUFeatureName_TimestampQuery);
#ifdef ATTNSPAN_WEBGPU_DAWN
  if (c.matrix > 0) features.push_back(WGPUFeatureName_ChromiumExperimentalSubgroupMatrix);
#endif
  WGPUDeviceDescriptor descriptor{};
  descriptor.requiredFeatureCount = features.size();
  descriptor.requiredFeatures = features.data();
  descriptor.requiredLimits = &limits;
#ifdef ATTNSPAN_WEBGPU_DAWN
  WGPUDawnTogglesDescriptor toggles = dawn_toggles();
  descriptor.nextInChain = &toggles.chain;
#endif
  descriptor.uncapturedErrorCallbackInfo.callback = DeviceCallbacks::error;
  descriptor.uncapturedErrorCallbackInfo.userdata1 = this;
  descriptor.deviceLostCallbackInfo.mode = WGPUCallbackMode_AllowProcessEvents;
  descriptor.deviceLostCallbackInfo.callback = DeviceCallbacks::lost;
  descriptor.deviceLostCallbackInfo.userdata1 = this;
  DeviceCallbacks::Request request;
  WGPURequestDeviceCallbackInfo callback{};
  callback.mode = WGPUCallbackMode_AllowProcessEvents;
  callback.callback = DeviceCallbacks::device;
  callback.userdata1 = &request;
  wait(api_.AdapterRequestDevice(adapter_, &descriptor, callback), request.done);
  device_ = static_cast<WGPUDevice>(request.handle);
  if (device_ == nullptr) {
    reason = "the adapter " + c.adapter + " gave no device: " + request.message;
    return false;
  }
  queue_ = api_.DeviceGetQueue(device_);
  return true;
}

GpuDevice::~GpuDevice() {
  if (queue_ != nullptr) api_.QueueRelease(queue_);
  if (device_ != nullptr) {
    api_.DeviceDestroy(device_);
    api_.DeviceRelease(device_);
  }
  if (adapter_ != nullptr) api_.AdapterRelease(adapter_);
  if (instance_ != nullptr) api_.InstanceRelease(instance_);
}

// wgpu-native runs callbacks while a device is polled; elsewhere the instance's events are processed until
// the callback has come.
void GpuDevice::wait(WGPUFuture, const bool& done) {
  while (!done) {
    if (device_ != nullptr && api_.DevicePoll != nullptr) api_.DevicePoll(device_, 1, nullptr);
    api_.InstanceProcessEvents(instance_);
    if (!done) std::this_thread::yield();
  }
}

void GpuDevice::wait_idle() {
  DeviceCallbacks::Request request;
  WGPUQueueWorkDoneCallbackInfo callback{};
  callback.mode = WGPUCallbackMode_AllowProcessEvents;
  callback.callback = DeviceCallbacks::work_done;
  callback.userdata1 = &request;
  wait(api_.QueueOnSubmittedWorkDone(queue_, callback), request.done);
}

void GpuDevice::check(const char* what) {
  const std::lock_guard lock(error_mutex_);
  if (error_.empty()) return;
  std::string message;
  message.swap(error_);
  for (char& c : message) {
    if (c == '\n') c = ' ';
  }
  throw Error(ErrorCode::internal, "webgpu", std::string(what) + ": " + message);
}

WGPUBuffer GpuDevice::create_buffer(uint64_t bytes, WGPUBufferUsage usage) {
  WGPUBufferDescriptor descriptor{};
  descriptor.size = padded(bytes > 0 ? bytes : 16);
  descriptor.usage = usage;
  if (descriptor.size > capabilities_.buffer_bytes) {
    throw Error(ErrorCode::out_of_memory, "webgpu",
                "a buffer of " + std::to_string(descriptor.size) + " bytes is over the adapter's limit of " +
                    std::to_string(capabilities_.buffer_bytes));
  }
  const WGPUBuffer buffer = api_.DeviceCreateBuffer(device_, &descriptor);
  if (buffer == nullptr) throw Error(ErrorCode::out_of_memory, "webgpu", "no memory for a buffer");
  return buffer;
}

void GpuDevice::write(WGPUBuffer buffer, uint64_t offset, const void* data, size_t bytes) {
  const size_t whole = bytes / 4 * 4;  // writes are multiples of 4 bytes
  if (whole > 0) api_.QueueWriteBuffer(queue_, buffer, offset, data, whole);
  if (whole == bytes) return;
  uint32_t tail = 0;
  std::memcpy(&tail, static_cast<const char*>(data) + whole, bytes - whole);
  api_.QueueWriteBuffer(queue_, buffer, offset + whole, &tail, 4);
}

void GpuDevice::read(WGPUBuffer buffer, uint64_t offset, void* to, size_t bytes) {
  const uint64_t begin = offset / 4 * 4;
  const uint64_t size = (offset + bytes + 3) / 4 * 4 - begin;
  const WGPUBuffer copy = create_buffer(size, WGPUBufferUsage_MapRead | WGPUBufferUsage_CopyDst);
  const WGPUCommandEncoder encoder = api_.DeviceCreateCommandEncoder(device_, nullptr);
  api_.CommandEncoderCopyBufferToBuffer(encoder, buffer, begin, copy, 0, size);
  const WGPUCommandBuffer commands = api_.CommandEncoderFinish(encoder, nullptr);
  api_.QueueSubmit(queue_, 1, &commands);
  api_.CommandBufferRelease(commands);
  api_.CommandEncoderRelease(encoder);
  DeviceCallbacks::Request request;
  WGPUBufferMapCallbackInfo callback{};
  callback.mode = WGPUCallbackMode_AllowProcessEvents;
  callback.callback = DeviceCallbacks::mapped;
  callback.userdata1 = &request;
  wait(api_.BufferMapAsync(copy, WGPUMapMode_Read, 0, size, callback), request.done);
  if (request.message.empty()) {
    const void* mapped = api_.BufferGetConstMappedRange(copy, 0, size);
    std::memcpy(to, static_cast<const char*>(mapped) + (offset - begin), bytes);
    api_.BufferUnmap(copy);
  }
  api_.BufferRelease(copy);
  check("reading a buffer");
  if (!request.message.empty()) throw Error(ErrorCode::internal, "webgpu", request.message);
}

void* GpuDevice::allocate(size_t bytes) {
  return create_buffer(bytes, WGPUBufferUsage_Storage | WGPUBufferUsage_CopyDst | WGPUBufferUsage_CopySrc);
}
void GpuDevice::release(void* address) { api_.BufferRelease(static_cast<WGPUBuffer>(address)); }
void GpuDevice::upload(void* to, const void* from, size_t bytes) {
  write(static_cast<WGPUBuffer>(to), 0, from, bytes);
}
void GpuDevice::download(void* to, const void* from, size_t bytes) {
  read(static_cast<WGPUBuffer>(const_cast<void*>(from)), 0, to, bytes);
}

}  // namespace attnspan::webgpu
