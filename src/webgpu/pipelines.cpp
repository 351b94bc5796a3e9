#include "webgpu/pipelines.hpp"

#include "webgpu/shaders.hpp"

namespace attnspan::webgpu {
namespace {

const char* source_of(const std::string& name) {
  for (const Shader& shader : shaders()) {
    if (name == shader.name) return shader.source;
  }
  throw Error(ErrorCode::internal, "webgpu", "no shader named " + name);
}

WGPUBindGroupLayout make_layout(GpuDevice& device, const std::string& bindings) {
  std::vector<WGPUBindGroupLayoutEntry> entries(bindings.size());
  for (size_t i = 0; i < bindings.size(); ++i) {
    entries[i].binding = static_cast<uint32_t>(i);
    entries[i].visibility = WGPUShaderStage_Compute;
    entries[i].buffer.type = bindings[i] == 'u'   ? WGPUBufferBindingType_Uniform
                             : bindings[i] == 'r' ? WGPUBufferBindingType_ReadOnlyStorage
                                                  : WGPUBufferBindingType_Storage;
  }
  WGPUBindGroupLayoutDescriptor descriptor{};
  descriptor.entryCount = entries.size();
  descriptor.entries = entries.data();
  return device.api().DeviceCreateBindGroupLayout(device.handle(), &descriptor);
}

}  // namespace

std::string Specialisation::key() const {
  std::string text = shader + "/" + entry + "/" + prelude;
  for (const auto& [name, value] : constants) text += "/" + name + "=" + std::to_string(value);
  return text;
}

Pipelines::~Pipelines() {
  for (auto& [key, made] : made_) {
    device_.api().ComputePipelineRelease(made.pipeline);
    device_.api().BindGroupLayoutRelease(made.layout);
  }
}

const Pipeline& Pipelines::get(const Specialisation& s, const std::string& bindings) {
  const std::string key = s.key();
  if (const auto found = made_.find(key); found != made_.end()) return found->second;
  return make(key, s.prelude + source_of(s.shader), s.entry, s.constants, bindings);
}

const Pipeline& Pipelines::make(const std::string& label, const std::string& source, const std::string& entry,
                                const std::vector<std::pair<std::string, double>>& constants,
                                const std::string& bindings) {
  const Api& api = device_.api();
  WGPUShaderSourceWGSL wgsl{};
  wgsl.chain.sType = WGPUSType_ShaderSourceWGSL;
  wgsl.code = view_of(source);
  WGPUShaderModuleDescriptor module_descriptor{};
  module_descriptor.nextInChain = &wgsl.chain;
  module_descriptor.label = view_of(label);
  const WGPUShaderModule module = api.DeviceCreateShaderModule(device_.handle(), &module_descriptor);

  Pipeline made;
  made.bindings = bindings;
  made.layout = make_layout(device_, bindings);
  WGPUPipelineLayoutDescriptor layout_descriptor{};
  layout_descriptor.bindGroupLayoutCount = 1;
  layout_descriptor.bindGroupLayouts = &made.layout;
  const WGPUPipelineLayout layout = api.DeviceCreatePipelineLayout(device_.handle(), &layout_descriptor);
  std::vector<WGPUConstantEntry> entries(constants.size());
  for (size_t i = 0; i < entries.size(); ++i) {
    entries[i].key = view_of(constants[i].first);
    entries[i].value = constants[i].second;
  }
  WGPUComputePipelineDescriptor descriptor{};
  descriptor.label = view_of(label);
  descriptor.layout = layout;
  descriptor.compute.module = module;
  descriptor.compute.entryPoint = view_of(entry);
  descriptor.compute.constantCount = entries.size();
  descriptor.compute.constants = entries.data();
  made.pipeline = api.DeviceCreateComputePipeline(device_.handle(), &descriptor);
  api.PipelineLayoutRelease(layout);
  api.ShaderModuleRelease(module);
  device_.check(label.c_str());
  return made_.emplace(label, made).first->second;
}

Commands::Commands(GpuDevice& device) : device_(device) {
  encoder_ = device.api().DeviceCreateCommandEncoder(device.handle(), nullptr);
}

Commands::~Commands() {
  const Api& api = device_.api();
  end_pass();
  for (const WGPUBindGroup group : groups_) api.BindGroupRelease(group);
  for (const WGPUBuffer buffer : buffers_) api.BufferRelease(buffer);
  if (queries_ != nullptr) api.QuerySetRelease(queries_);
  api.CommandEncoderRelease(encoder_);
}

WGPUBuffer Commands::scratch(uint64_t bytes) {
  const WGPUBuffer buffer = device_.create_buffer(
      bytes, WGPUBufferUsage_Storage | WGPUBufferUsage_CopyDst | WGPUBufferUsage_CopySrc);
  buffers_.push_back(buffer);
  return buffer;
}

void Commands::begin_pass() {
  if (pass_ != nullptr) return;
  WGPUComputePassDescriptor descriptor{};
  WGPUPassTimestampWrites writes{};
  if (queries_ != nullptr) {
    writes.querySet = queries_;
    writes.beginningOfPassWriteIndex = 0;
    writes.endOfPassWriteIndex = 1;
    descriptor.timestampWrites = &writes;
  }
  pass_ = device_.api().CommandEncoderBeginComputePass(encoder_, &descriptor);
}

void Commands::end_pass() {
  if (pass_ == nullptr) return;
  device_.api().ComputePassEncoderEnd(pass_);
  device_.api().ComputePassEncoderRelease(pass_);
  pass_ = nullptr;
}

void Commands::copy(WGPUBuffer from, uint64_t from_offset, WGPUBuffer to, uint64_t to_offset,
                    uint64_t bytes) {
  end_pass();
  device_.api().CommandEncoderCopyBufferToBuffer(encoder_, from, from_offset, to, to_offset, bytes);
}

void Commands::clear(WGPUBuffer buffer) {
  end_pass();
  device_.api().CommandEncoderClearBuffer(encoder_, buffer, 0, device_.api().BufferGetSize(buffer));
}

void Commands::dispatch(const Pipeline& pipeline, const void* params, size_t params_bytes,
                        const std::vector<Binding>& bindings, uint32_t x, uint32_t y, uint32_t z) {
  if (x == 0 || y == 0 || z == 0) return;
  const Api& api = device_.api();
  const WGPUBuffer uniform =
      device_.create_buffer(params_bytes, WGPUBufferUsage_Uniform | WGPUBufferUsage_CopyDst);
  buffers_.push_back(uniform);
  device_.write(uniform, 0, params, params_bytes);

  std::vector<WGPUBindGroupEntry> entries(bindings.size() + 1);
  entries[0].buffer = uniform;
  entries[0].size = api.BufferGetSize(uniform);
  for (size_t i = 0; i < bindings.size(); ++i) {
    WGPUBindGroupEntry& entry = entries[i + 1];
    entry.binding = static_cast<uint32_t>(i + 1);
    entry.buffer = bindings[i].buffer != nullptr ? bindings[i].buffer : scratch(16);
    entry.offset = bindings[i].buffer != nullptr ? bindings[i].offset : 0;
    entry.size = bindings[i].size != 0 ? bindings[i].size : api.BufferGetSize(entry.buffer) - entry.offset;
  }
  WGPUBindGroupDescriptor descriptor{};
  descriptor.layout = pipeline.layout;
  descriptor.entryCount = entries.size();
  descriptor.entries = entries.data();
  const WGPUBindGroup group = api.DeviceCreateBindGroup(device_.handle(), &descriptor);
  groups_.push_back(group);

  begin_pass();
  api.ComputePassEncoderSetPipeline(pass_, pipeline.pipeline);
  api.ComputePassEncoderSetBindGroup(pass_, 0, group, 0, nullptr);
  api.ComputePassEncoderDispatchWorkgroups(pass_, x, y, z);
}

void Commands::measure() {
  if (!device_.capabilities().timestamps) return;
  WGPUQuerySetDescriptor descriptor{};
  descriptor.type = WGPUQueryType_Timestamp;
  descriptor.count = 2;
  queries_ = device_.api().DeviceCreateQuerySet(device_.handle(), &descriptor);
  timestamps_ = device_.create_buffer(16, WGPUBufferUsage_QueryResolve | WGPUBufferUsage_CopySrc);
  buffers_.push_back(timestamps_);
}

void Commands::submit() {
  const Api& api = device_.api();
  end_pass();
  if (queries_ != nullptr) api.CommandEncoderResolveQuerySet(encoder_, queries_, 0, 2, timestamps_, 0);
  const WGPUCommandBuffer commands = api.CommandEncoderFinish(encoder_, nullptr);
  api.QueueSubmit(device_.queue(), 1, &commands);
  api.CommandBufferRelease(commands);
  submitted_ = true;
  device_.check("submitting work");
}

double Commands::measured_seconds() {
  if (queries_ == nullptr || !submitted_) return 0;
  uint64_t ticks[2] = {};
  device_.read(timestamps_, 0, ticks, sizeof(ticks));
  return 1e-9 * static_cast<double>(ticks[1] - ticks[0]);
}

}  // namespace attnspan::webgpu
