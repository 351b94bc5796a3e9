#pragma once
/// WebGPU beyond the common calls. This exists in builds that have the WebGPU backend, and throws
/// Error(unavailable) where the machine has no adapter.
///
/// Tensors with Device::webgpu hold a WGPUBuffer of the device below, with usage Storage | CopySrc | CopyDst,
/// of a size that is a multiple of 16 bytes. WebGPU tracks whole buffers: what a call writes must not lie in
/// a buffer that it also reads (but for merge_states).

namespace attnspan::webgpu {

/// WGPUInstance, WGPUDevice and WGPUQueue of the backend, owned by it.
struct Handles {
  void* instance = nullptr;
  void* device = nullptr;
  void* queue = nullptr;
};
Handles handles();

}  // namespace attnspan::webgpu
