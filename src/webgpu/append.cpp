// Host side of kv_append.wgsl, and the handles of attnspan/webgpu.hpp.

#include <algorithm>

#include "attnspan/webgpu.hpp"
#include "core/validation.hpp"
#include "kv/format.hpp"
#include "kv/tbq4_constants.hpp"
#include "registry/registry.hpp"
#include "webgpu/backend.hpp"

namespace attnspan::webgpu {
namespace {

WebgpuBackend& backend() {
  for (const RegisteredBackend& entry : backends("webgpu")) {
    if (auto* found = dynamic_cast<WebgpuBackend*>(entry.backend)) return *found;
    throw Error(ErrorCode::unavailable, "backend", "webgpu is not available: " + entry.reason);
  }
  throw Error(ErrorCode::unavailable, "backend", "webgpu is not in this build");
}

Loader stored_as(KvFormat format) {
  switch (format) {
    case KvFormat::f32:
      return Loader::f32_vec;
    case KvFormat::f16:
      return Loader::f16_vec;
    case KvFormat::bf16:
      return Loader::bf16_vec;
    case KvFormat::q8:
      return Loader::q8;
    case KvFormat::tbq4:
      return Loader::tbq4;
  }
  return Loader::runtime;
}

// positions, first_position and block_table in one buffer; their word offsets go to `p`.
Binding bind_places(Commands& commands, const KvView& cache, const Tensor& positions, AppendParams& p) {
  struct Piece {
    const Tensor& tensor;
    int64_t words;
    uint32_t* place;
  };
  std::vector<Piece> pieces = {{positions, cache.batch, &p.positions}};
  if (cache.first_position) pieces.push_back({cache.first_position, cache.batch, &p.first_position});
  if (cache.block_table) {
    const Tensor& table = cache.block_table;
    pieces.push_back({table,
                      (table.shape[0] - 1) * table.stride[0] + (table.shape[1] - 1) * table.stride[1] + 1,
                      &p.block_table});
    p.block_table_row = static_cast<uint32_t>(table.stride[0]);
    p.block_table_column = static_cast<uint32_t>(table.stride[1]);
  }
  int64_t words = 0;
  for (const Piece& piece : pieces) words += piece.words;
  const Binding side{commands.scratch(static_cast<uint64_t>(4 * words)), 0, 0};
  uint32_t at = 0;
  for (const Piece& piece : pieces) {
    commands.copy(static_cast<WGPUBuffer>(piece.tensor.data), static_cast<uint64_t>(piece.tensor.byte_offset),
                  side.buffer, 4 * at, static_cast<uint64_t>(4 * piece.words));
    *piece.place = at;
    at += static_cast<uint32_t>(piece.words);
  }
  return side;
}

void record_append(Context& context, Commands& commands, const KvView& cache, const Tensor& tensor,
                   const KvRows& stored, const Binding& side, AppendParams p, WGPUBuffer saturated,
                   const char* name) {
  GpuDevice& device = context.device;
  const Extent extent{cache.batch, cache.kv_heads, tensor.shape[1], stored.dim};
  Rows rows;
  rows.data = tensor.data;
  rows.byte_offset = tensor.byte_offset;
  rows.batch_stride = tensor.stride[0], rows.row_stride = tensor.stride[1],
  rows.head_stride = tensor.stride[2];
  const BoundRows from = bind_rows(device, rows, extent, tensor.dtype, name);
  const BoundRows codes = bind_cache_rows(device, cache, stored, "cache");
  const BoundRows scales = bind_cache_scales(device, cache, stored, "cache");
  p.rows = from.params, p.codes = codes.params, p.scales = scales.params;
  p.batch = static_cast<uint32_t>(cache.batch);
  p.heads = static_cast<uint32_t>(cache.kv_heads);
  p.tokens = static_cast<uint32_t>(tensor.shape[1]);
  p.dim = static_cast<uint32_t>(stored.dim);
  const int64_t block = stored.format == KvFormat::tbq4 ? tbq4::block_size(stored.dim)
                        : stored.format == KvFormat::q8 ? 32
                                                        : 1;
  p.block = static_cast<uint32_t>(block);
  p.width = static_cast<uint32_t>((stored.dim + block - 1) / block * block);
  p.in_format = plain_loader(tensor.dtype);
  p.out_format = stored_as(stored.format);
  p.page_size = static_cast<uint32_t>(cache.page_size);
  const int64_t groups = extent.batch * extent.heads * extent.rows;
  if (groups == 0) return;
  p.grid_x = static_cast<uint32_t>(std::min<int64_t>(groups, kGridWidth));
  commands.dispatch(context.pipelines.get({"kv_append", "append", "", {}}, "urrwww"), &p, sizeof(p),
                    {from.binding, side, codes.binding, scales.binding, {saturated, 0, 0}}, p.grid_x,
                    static_cast<uint32_t>((groups + p.grid_x - 1) / p.grid_x), 1);
}

}  // namespace

Handles handles() {
  GpuDevice& device = backend().gpu();
  return {device.instance(), device.handle(), device.queue()};
}

void WebgpuBackend::append(const DeviceAppendArgs& args, const Execution&) {
  run([&](Context& context, Commands& commands) -> WGPUBuffer {
    const KvView& cache = *args.cache;
    AppendParams p;
    p.quality = args.encode_mode == EncodeMode::quality ? 1 : 0;
    const Binding side = bind_places(commands, cache, args.start, p);
    WGPUBuffer saturated = nullptr;
    if (args.saturated) {
      require(args.saturated.byte_offset == 0, "saturated",
              "byte_offset " + std::to_string(args.saturated.byte_offset), "0 for buffer handles");
      saturated = static_cast<WGPUBuffer>(args.saturated.data);
    } else {
      saturated = commands.scratch(16);
    }
    record_append(context, commands, cache, args.key, cache.key, side, p, saturated, "key");
    if (args.value)
      record_append(context, commands, cache, args.value, cache.value, side, p, saturated, "value");
    return nullptr;
  });
}

}  // namespace attnspan::webgpu
