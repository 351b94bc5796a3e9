// The one file that calls Metal: buffers, pipelines by function constants, and dispatches of a launch plan.
// It decides nothing. Needs macOS 14 (Metal 3.1 for bfloat, gpuAddress of buffers) and a GPU of family Apple
// 7 or later (M1), which has simdgroup matrices.

#import <Foundation/Foundation.h>
#import <Metal/Metal.h>

#include <cstring>
#include <map>
#include <mutex>

#include "attnspan/error.hpp"
#include "metal/backend.hpp"
#include "metal/tiles.hpp"
#include "registry/make_backends.hpp"

extern "C" const char attnspan_metal_library[];
extern "C" const char attnspan_metal_library_end[];

namespace attnspan::metal {
namespace {

[[noreturn]] void fail(const std::string& what, NSError* error) {
  const char* detail = error != nil ? error.localizedDescription.UTF8String : "no detail given";
  throw Error(ErrorCode::internal, "metal", what + ": " + detail);
}

id<MTLBuffer> buffer_of(const void* handle) { return (__bridge id<MTLBuffer>)const_cast<void*>(handle); }

// One pipeline per kernel and set of function constants, compiled at its first use.
class Pipelines {
 public:
  Pipelines(id<MTLDevice> device, id<MTLLibrary> library) : device_(device), library_(library) {}

  id<MTLComputePipelineState> get(const Launch& launch) {
    const std::lock_guard<std::mutex> lock(mutex_);
    __strong id<MTLComputePipelineState>& pipeline = pipelines_[{launch.kernel, launch.constants}];
    if (pipeline == nil) pipeline = make(launch);
    return pipeline;
  }

 private:
  id<MTLComputePipelineState> make(const Launch& launch) {
    MTLFunctionConstantValues* values = [MTLFunctionConstantValues new];
    for (int i = 0; i < kFunctionConstants; ++i) {
      const bool truth = launch.constants[i] != 0;
      const void* value = is_bool(i) ? static_cast<const void*>(&truth) : &launch.constants[i];
      [values setConstantValue:value
                          type:is_bool(i) ? MTLDataTypeBool : MTLDataTypeInt
                       atIndex:static_cast<NSUInteger>(i)];
    }
    NSError* error = nil;
    id<MTLFunction> function = [library_ newFunctionWithName:@(launch.kernel.c_str())
                                              constantValues:values
                                                       error:&error];
    if (function == nil) fail("kernel " + launch.kernel, error);
    id<MTLComputePipelineState> pipeline = [device_ newComputePipelineStateWithFunction:function
                                                                                  error:&error];
    if (pipeline == nil) fail("pipeline of " + launch.kernel, error);
    if (pipeline.threadExecutionWidth != 32 || pipeline.maxTotalThreadsPerThreadgroup < launch.threads) {
      throw Error(ErrorCode::unsupported, "metal",
                  launch.kernel + " gets " + std::to_string(pipeline.maxTotalThreadsPerThreadgroup) +
                      " threads in simdgroups of " + std::to_string(pipeline.threadExecutionWidth) +
                      " on this GPU, needs " + std::to_string(launch.threads) + " in simdgroups of 32");
    }
    return pipeline;
  }

  id<MTLDevice> device_;
  id<MTLLibrary> library_;
  std::mutex mutex_;
  std::map<std::pair<std::string, FunctionConstants>, id<MTLComputePipelineState>> pipelines_;
};

class AppleDevice final : public MetalDevice {
 public:
  AppleDevice(id<MTLDevice> device, id<MTLLibrary> library)
      : device_(device), queue_([device newCommandQueue]), pipelines_(device, library) {}

  std::string description() const override {
    @autoreleasepool {
      return std::string(device_.name.UTF8String) + ", " +
             std::to_string(device_.maxThreadgroupMemoryLength / 1024) +
             " KiB of threadgroup memory, unified memory";
    }
  }

  // Shared storage: host and GPU see the same bytes, so uploads and downloads are plain copies.
  void* allocate(size_t bytes) override {
    id<MTLBuffer> buffer = [device_ newBufferWithLength:bytes options:MTLResourceStorageModeShared];
    if (buffer == nil) {
      throw Error(ErrorCode::out_of_memory, "metal", "no buffer of " + std::to_string(bytes) + " bytes");
    }
    return (__bridge_retained void*)buffer;
  }
  void release(void* handle) override { (void)(__bridge_transfer id<MTLBuffer>)handle; }
  void upload(void* to, const void* from, size_t bytes) override {
    @autoreleasepool {
      std::memcpy(buffer_of(to).contents, from, bytes);
    }
  }
  void download(void* to, const void* from, size_t bytes) override {
    @autoreleasepool {
      std::memcpy(to, buffer_of(from).contents, bytes);
    }
  }

  void run(const Plan& plan, void* scratch) override {
    if (plan.launches.empty()) return;
    @autoreleasepool {
      id<MTLCommandBuffer> commands = [queue_ commandBuffer];
      id<MTLComputeCommandEncoder> encoder =
          [commands computeCommandEncoderWithDispatchType:MTLDispatchTypeSerial];
      for (const Launch& launch : plan.launches) {
        encode(encoder, launch, scratch);
        // Buffers are reached through addresses, which Metal does not track.
        [encoder memoryBarrierWithScope:MTLBarrierScopeBuffers];
      }
      [encoder endEncoding];
      [commands commit];
      [commands waitUntilCompleted];
      if (commands.status == MTLCommandBufferStatusError) fail(plan.launches[0].kernel, commands.error);
    }
  }

 private:
  void encode(id<MTLComputeCommandEncoder> encoder, const Launch& launch, void* scratch) {
    [encoder setComputePipelineState:pipelines_.get(launch)];
    std::vector<uint64_t> addresses;
    for (const TensorSlot& slot : launch.tensors) {
      const void* handle = slot.scratch ? scratch : slot.buffer;
      if (handle == nullptr) {
        addresses.push_back(0);
        continue;
      }
      id<MTLBuffer> buffer = buffer_of(handle);
      [encoder useResource:buffer usage:MTLResourceUsageRead | MTLResourceUsageWrite];
      addresses.push_back(buffer.gpuAddress + static_cast<uint64_t>(slot.byte_offset));
    }
    [encoder setBytes:addresses.data() length:addresses.size() * sizeof(uint64_t) atIndex:0];
    [encoder setBytes:launch.params.data() length:launch.params.size() atIndex:1];
    // Lengths are multiples of 16.
    if (launch.threadgroup_bytes > 0) {
      [encoder setThreadgroupMemoryLength:(launch.threadgroup_bytes + 15) / 16 * 16 atIndex:0];
    }
    [encoder dispatchThreadgroups:MTLSizeMake(launch.groups[0], launch.groups[1], launch.groups[2])
            threadsPerThreadgroup:MTLSizeMake(launch.threads, 1, 1)];
  }

  id<MTLDevice> device_;
  id<MTLCommandQueue> queue_;
  Pipelines pipelines_;
};

}  // namespace

BackendOrReason make_backend() {
  @autoreleasepool {
    id<MTLDevice> device = MTLCreateSystemDefaultDevice();
    if (device == nil) return {nullptr, "this machine has no Metal device"};
    if (![device supportsFamily:MTLGPUFamilyApple7]) {
      return {nullptr,
              std::string(device.name.UTF8String) + " has no simdgroup matrices (M1 and later have)"};
    }
    if (device.maxThreadgroupMemoryLength < kThreadgroupBytes) {
      return {nullptr, "threadgroup memory of " + std::to_string(device.maxThreadgroupMemoryLength) +
                           " bytes, needs " + std::to_string(kThreadgroupBytes)};
    }
    const size_t bytes = static_cast<size_t>(attnspan_metal_library_end - attnspan_metal_library);
    dispatch_data_t data = dispatch_data_create(attnspan_metal_library, bytes, nullptr,
                                                ^{
                                                });
    NSError* error = nil;
    id<MTLLibrary> library = [device newLibraryWithData:data error:&error];
    if (library == nil) {
      return {nullptr,
              std::string("the shader library does not load: ") + error.localizedDescription.UTF8String};
    }
    return make_backend(std::make_unique<AppleDevice>(device, library));
  }
}

}  // namespace attnspan::metal
