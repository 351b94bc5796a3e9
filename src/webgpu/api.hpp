#pragma once
// webgpu.h, loaded at run time: libattnspan has no link-time dependency on an implementation, so that it
// starts on machines that have none. docs/decisions has the reasons.

#include <webgpu/webgpu.h>

#include <string>
#include <string_view>

namespace attnspan::webgpu {

// The calls that this backend makes, without their prefix.
#define ATTNSPAN_WEBGPU_CALLS(CALL)          \
  CALL(CreateInstance)                       \
  CALL(InstanceRequestAdapter)               \
  CALL(InstanceProcessEvents)                \
  CALL(InstanceRelease)                      \
  CALL(AdapterGetInfo)                       \
  CALL(AdapterInfoFreeMembers)               \
  CALL(AdapterGetLimits)                     \
  CALL(AdapterHasFeature)                    \
  CALL(AdapterRequestDevice)                 \
  CALL(AdapterRelease)                       \
  CALL(DeviceGetQueue)                       \
  CALL(DeviceCreateBuffer)                   \
  CALL(DeviceCreateShaderModule)             \
  CALL(DeviceCreateBindGroupLayout)          \
  CALL(DeviceCreatePipelineLayout)           \
  CALL(DeviceCreateComputePipeline)          \
  CALL(DeviceCreateBindGroup)                \
  CALL(DeviceCreateCommandEncoder)           \
  CALL(DeviceCreateQuerySet)                 \
  CALL(DevicePushErrorScope)                 \
  CALL(DevicePopErrorScope)                  \
  CALL(DeviceDestroy)                        \
  CALL(DeviceRelease)                        \
  CALL(BufferGetSize)                        \
  CALL(BufferMapAsync)                       \
  CALL(BufferGetConstMappedRange)            \
  CALL(BufferUnmap)                          \
  CALL(BufferRelease)                        \
  CALL(CommandEncoderBeginComputePass)       \
  CALL(CommandEncoderCopyBufferToBuffer)     \
  CALL(CommandEncoderClearBuffer)            \
  CALL(CommandEncoderResolveQuerySet)        \
  CALL(CommandEncoderFinish)                 \
  CALL(CommandEncoderRelease)                \
  CALL(ComputePassEncoderSetPipeline)        \
  CALL(ComputePassEncoderSetBindGroup)       \
  CALL(ComputePassEncoderDispatchWorkgroups) \
  CALL(ComputePassEncoderEnd)                \
  CALL(ComputePassEncoderRelease)            \
  CALL(QueueSubmit)                          \
  CALL(QueueWriteBuffer)                     \
  CALL(QueueOnSubmittedWorkDone)             \
  CALL(QueueRelease)                         \
  CALL(CommandBufferRelease)                 \
  CALL(BindGroupRelease)                     \
  CALL(BindGroupLayoutRelease)               \
  CALL(PipelineLayoutRelease)                \
  CALL(ComputePipelineRelease)               \
  CALL(ShaderModuleRelease)                  \
  CALL(QuerySetRelease)

struct Api {
#define ATTNSPAN_WEBGPU_MEMBER(name) WGPUProc##name name = nullptr;
  ATTNSPAN_WEBGPU_CALLS(ATTNSPAN_WEBGPU_MEMBER)
#undef ATTNSPAN_WEBGPU_MEMBER
  // wgpu-native's own: runs the callbacks of a device, and waits for its work. Null in other implementations.
  uint32_t (*DevicePoll)(WGPUDevice device, uint32_t wait, const uint64_t* submission) = nullptr;

#ifdef ATTNSPAN_WEBGPU_DAWN
  WGPUProcAdapterPropertiesSubgroupMatrixConfigsFreeMembers
      AdapterPropertiesSubgroupMatrixConfigsFreeMembers = nullptr;
#endif

  std::string library;  // the file that was loaded
};

// Null with `reason` set when no implementation is on this machine. Loaded once, and never unloaded: its
// threads may outlive any moment at which that would be safe. ATTNSPAN_WEBGPU_LIBRARY names another file.
const Api* load_api(std::string& reason);

inline WGPUStringView view_of(std::string_view text) { return {text.data(), text.size()}; }
inline std::string text_of(WGPUStringView view) {
  if (view.data == nullptr) return "";
  return view.length == WGPU_STRLEN ? std::string(view.data) : std::string(view.data, view.length);
}

}  // namespace attnspan::webgpu
