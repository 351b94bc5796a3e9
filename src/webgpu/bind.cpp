#include "webgpu/bind.hpp"

#include <algorithm>

#include "core/validation.hpp"
#include "kv/format.hpp"

namespace attnspan::webgpu {
namespace {

constexpr int64_t kFar = int64_t{1} << 29;  // further than any position; sums of three fit int32

int32_t clamped(int64_t value) { return static_cast<int32_t>(std::clamp<int64_t>(value, -kFar, kFar)); }

// Strides of extents of 1 are never used, whatever they say.
int64_t used(int64_t stride, int64_t extent) { return extent > 1 ? stride : 0; }

// Binds `bytes` from `byte_offset` on.
Binding bind_bytes(GpuDevice& device, void* handle, uint64_t byte_offset, uint64_t bytes, const char* name,
                   uint32_t& base) {
  const Capabilities& c = device.capabilities();
  Binding binding;
  binding.buffer = static_cast<WGPUBuffer>(handle);
  binding.offset = byte_offset / c.offset_alignment * c.offset_alignment;
  base = static_cast<uint32_t>(byte_offset - binding.offset);
  binding.size = (base + bytes + 15) / 16 * 16;  // shaders read 16 bytes at a time
  if (binding.size > c.binding_bytes) {
    throw Error(ErrorCode::unsupported, name,
                "found " + std::to_string(bytes) + " bytes, expected at most " +
                    std::to_string(c.binding_bytes) + ", what this adapter binds at once");
  }
  const uint64_t size = device.api().BufferGetSize(binding.buffer);
  require(
      binding.offset + binding.size <= size, name, "a WebGPU buffer of " + std::to_string(size) + " bytes",
      std::to_string(binding.offset + binding.size) + " or more (a multiple of 16 that holds the tensor)");
  return binding;
}

Loader loader_of(DType dtype, const RowsParams& p, int64_t dim) {
  const uint32_t bits = p.base | p.batch | p.head | p.row;
  const bool vec = dim % 4 == 0 && bits % (dtype == DType::f32 ? 16 : 8) == 0;
  switch (dtype) {
    case DType::f16:
      return vec ? Loader::f16_vec : Loader::f16_any;
    case DType::bf16:
      return vec ? Loader::bf16_vec : Loader::bf16_any;
    default:
      return vec ? Loader::f32_vec : Loader::f32_any;
  }
}

BoundRows bind_strided(GpuDevice& device, const Rows& rows, const Extent& e, int64_t size, const char* name) {
  BoundRows bound;
  if (!rows || e.batch == 0 || e.heads == 0 || e.rows == 0) {
    bound.params.base = kNone;
    return bound;
  }
  const int64_t batch = size * used(rows.batch_stride, e.batch),
                head = size * used(rows.head_stride, e.heads), row = size * used(rows.row_stride, e.rows);
  bound.binding = bind_bytes(device, rows.data, static_cast<uint64_t>(rows.byte_offset),
                             static_cast<uint64_t>(bytes_of(rows, e, size)), name, bound.params.base);
  bound.params.batch = static_cast<uint32_t>(batch);
  bound.params.head = static_cast<uint32_t>(head);
  bound.params.row = static_cast<uint32_t>(row);
  return bound;
}

// One side input: words of a buffer, and the parameter that says where they lie.
struct SidePiece {
  void* handle;
  int64_t byte_offset;
  int64_t words;
  uint32_t* place;
};

std::vector<SidePiece> side_pieces(const Problem& problem, Params& p) {
  std::vector<SidePiece> pieces;
  const auto add = [&](const void* handle, int64_t byte_offset, int64_t words, uint32_t& place) {
    if (handle != nullptr && words > 0)
      pieces.push_back({const_cast<void*>(handle), byte_offset, words, &place});
  };
  const auto add_tensor = [&](const Tensor& t, uint32_t& place) {
    int64_t words = t ? 1 : 0;
    for (int i = 0; i < t.rank; ++i) words = t.shape[i] == 0 ? 0 : words + (t.shape[i] - 1) * t.stride[i];
    add(t ? t.data : nullptr, t.byte_offset, words, place);
  };
  const int64_t batch = problem.batch;
  add(problem.cu_seqlens_q, 0, batch + 1, p.cu_seqlens_q);
  add(problem.cu_seqlens_k, 0, batch + 1, p.cu_seqlens_k);
  add(problem.seqused_k, 0, batch, p.seqlens);
  p.seqlens_stride = 1;
  if (problem.cache != nullptr) {
    const KvView& cache = *problem.cache;
    add_tensor(cache.seqlens, p.seqlens);
    p.seqlens_stride = static_cast<uint32_t>(cache.seqlens.stride[0]);
    add_tensor(cache.first_position, p.first_position);
    p.first_stride = static_cast<uint32_t>(cache.first_position.stride[0]);
    add_tensor(cache.block_table, p.block_table);
    p.block_table_row = static_cast<uint32_t>(cache.block_table.stride[0]);
    p.block_table_column = static_cast<uint32_t>(cache.block_table.stride[1]);
    p.page_size = static_cast<uint32_t>(cache.page_size);
    while ((int64_t{2} << p.page_shift) <= cache.page_size) ++p.page_shift;
  }
  const auto per_batch = [&](int64_t stride, int64_t words) {
    return stride != 0 ? (batch - 1) * stride + words : words;
  };
  add(problem.key_start.data, problem.key_start.byte_offset,
      per_batch(problem.key_start.batch_stride, problem.seqlen_q), p.key_start);
  p.key_start_batch = static_cast<uint32_t>(problem.key_start.batch_stride);
  add(problem.key_end.data, problem.key_end.byte_offset,
      per_batch(problem.key_end.batch_stride, problem.seqlen_q), p.key_end);
  p.key_end_batch = static_cast<uint32_t>(problem.key_end.batch_stride);
  add(problem.alibi_slopes.data, problem.alibi_slopes.byte_offset,
      per_batch(problem.alibi_slopes.batch_stride, problem.heads), p.alibi);
  p.alibi_batch = static_cast<uint32_t>(problem.alibi_slopes.batch_stride);
  add(problem.sinks, 0, problem.heads, p.sinks);
  const Bias& bias = problem.bias;
  if (bias.data != nullptr && problem.seqlen_q > 0 && problem.seqlen_k > 0) {
    add(bias.data, bias.byte_offset,
        1 + (batch - 1) * bias.batch_stride + (problem.heads - 1) * bias.head_stride +
            (problem.seqlen_q - 1) * bias.row_stride + (problem.seqlen_k - 1) * bias.key_stride,
        p.bias);
    p.bias_batch = static_cast<uint32_t>(bias.batch_stride);
    p.bias_head = static_cast<uint32_t>(bias.head_stride);
    p.bias_row = static_cast<uint32_t>(bias.row_stride);
    p.bias_key = static_cast<uint32_t>(bias.key_stride);
  }
  return pieces;
}

}  // namespace

int64_t bytes_of(const Rows& rows, const Extent& e, int64_t size) {
  if (!rows || e.batch == 0 || e.heads == 0 || e.rows == 0) return 0;
  return size *
         ((e.batch - 1) * used(rows.batch_stride, e.batch) + (e.heads - 1) * used(rows.head_stride, e.heads) +
          (e.rows - 1) * used(rows.row_stride, e.rows) + e.dim);
}

int64_t code_bytes_of(const KvView& cache, const KvRows& rows) {
  return (cache.num_pages - 1) * rows.page_stride + (cache.kv_heads - 1) * rows.head_stride +
         (cache.page_size - 1) * rows.token_stride + ops_of(rows.format).row_code_bytes(rows.dim);
}

int64_t side_bytes(const Problem& problem) {
  Params unused;
  int64_t words = 0;
  for (const SidePiece& piece : side_pieces(problem, unused)) words += piece.words;
  return 4 * words;
}

BoundRows bind_rows(GpuDevice& device, const Rows& rows, const Extent& extent, DType dtype,
                    const char* name) {
  BoundRows bound = bind_strided(device, rows, extent, size_of(dtype), name);
  if (bound.binding.buffer != nullptr) bound.loader = loader_of(dtype, bound.params, extent.dim);
  return bound;
}

BoundRows bind_lse(GpuDevice& device, const Rows& rows, const Extent& extent, const char* name) {
  return bind_strided(device, rows, {extent.batch, extent.heads, extent.rows, 1}, 4, name);
}

BoundRows bind_cache_rows(GpuDevice& device, const KvView& cache, const KvRows& rows, const char* name) {
  BoundRows bound;
  if (rows.codes == nullptr || cache.num_pages == 0) return bound;
  bound.binding = bind_bytes(device, rows.codes, static_cast<uint64_t>(rows.codes_byte_offset),
                             static_cast<uint64_t>(code_bytes_of(cache, rows)), name, bound.params.base);
  bound.params.batch = static_cast<uint32_t>(used(rows.page_stride, cache.num_pages));
  bound.params.head = static_cast<uint32_t>(used(rows.head_stride, cache.kv_heads));
  bound.params.row = static_cast<uint32_t>(used(rows.token_stride, cache.page_size));
  const uint32_t bits = bound.params.base | bound.params.batch | bound.params.head | bound.params.row;
  switch (rows.format) {
    case KvFormat::f32:
      bound.loader = loader_of(DType::f32, bound.params, rows.dim);
      break;
    case KvFormat::f16:
      bound.loader = loader_of(DType::f16, bound.params, rows.dim);
      break;
    case KvFormat::bf16:
      bound.loader = loader_of(DType::bf16, bound.params, rows.dim);
      break;
    case KvFormat::q8:
    case KvFormat::tbq4:
      bound.loader = rows.format == KvFormat::q8 ? Loader::q8 : Loader::tbq4;
      require(bits % kRowAlignment == 0, name, "rows of codes at odd addresses",
              "strides and offsets that are multiples of " + std::to_string(kRowAlignment) + " bytes");
      break;
  }
  return bound;
}

BoundRows bind_cache_scales(GpuDevice& device, const KvView& cache, const KvRows& rows, const char* name) {
  BoundRows bound;
  if (rows.scales == nullptr || cache.num_pages == 0) return bound;
  const int64_t elements =
      (cache.num_pages - 1) * rows.scale_page_stride + (cache.kv_heads - 1) * rows.scale_head_stride +
      (cache.page_size - 1) * rows.scale_token_stride + ops_of(rows.format).row_scales(rows.dim);
  bound.binding = bind_bytes(device, rows.scales, static_cast<uint64_t>(rows.scales_byte_offset),
                             static_cast<uint64_t>(2 * elements), name, bound.params.base);
  bound.params.batch = static_cast<uint32_t>(2 * used(rows.scale_page_stride, cache.num_pages));
  bound.params.head = static_cast<uint32_t>(2 * used(rows.scale_head_stride, cache.kv_heads));
  bound.params.row = static_cast<uint32_t>(2 * used(rows.scale_token_stride, cache.page_size));
  return bound;
}

Loader plain_loader(DType dtype) {
  return dtype == DType::f32 ? Loader::f32_vec : dtype == DType::f16 ? Loader::f16_vec : Loader::bf16_vec;
}

Params base_params(const Problem& problem) {
  Params p;
  p.batch = static_cast<uint32_t>(problem.batch);
  p.heads = static_cast<uint32_t>(problem.heads);
  p.kv_heads = static_cast<uint32_t>(problem.kv_heads);
  p.group = static_cast<uint32_t>(problem.group());
  p.seqlen_q = static_cast<uint32_t>(problem.seqlen_q);
  p.seqlen_k = static_cast<uint32_t>(problem.seqlen_k);
  p.head_dim = static_cast<uint32_t>(problem.head_dim);
  p.head_dim_v = static_cast<uint32_t>(problem.head_dim_v);
  p.diagonal_kind = static_cast<uint32_t>(problem.diagonal.kind);
  p.diagonal = problem.diagonal.kind == Diagonal::Kind::offset ? clamped(problem.diagonal.value) : 0;
  p.window_left = clamped(problem.window_left);
  p.window_right = clamped(problem.window_right);
  p.softmax_scale = problem.softmax_scale;
  p.softcap = problem.softcap;
  return p;
}

Binding bind_side(GpuDevice& device, Commands& commands, const Problem& problem, Params& p) {
  const std::vector<SidePiece> pieces = side_pieces(problem, p);
  if (pieces.empty()) return {};
  int64_t words = 0;
  for (const SidePiece& piece : pieces) words += piece.words;
  require(
      static_cast<uint64_t>(words) * 4 <= device.capabilities().binding_bytes, "bias",
      std::to_string(words * 4) + " bytes of side inputs",
      "at most " + std::to_string(device.capabilities().binding_bytes) + ", what this adapter binds at once");
  if (pieces.size() == 1) {
    const SidePiece& only = pieces[0];
    const uint64_t alignment = device.capabilities().offset_alignment;
    const uint64_t offset = static_cast<uint64_t>(only.byte_offset) / alignment * alignment;
    *only.place = static_cast<uint32_t>((static_cast<uint64_t>(only.byte_offset) - offset) / 4);
    return {static_cast<WGPUBuffer>(only.handle), offset,
            (*only.place + static_cast<uint64_t>(only.words)) * 4};
  }
  Binding side;
  side.buffer = commands.scratch(static_cast<uint64_t>(words) * 4);
  int64_t at = 0;
  for (const SidePiece& piece : pieces) {
    commands.copy(static_cast<WGPUBuffer>(piece.handle), static_cast<uint64_t>(piece.byte_offset),
                  side.buffer, static_cast<uint64_t>(at) * 4, static_cast<uint64_t>(piece.words) * 4);
    *piece.place = static_cast<uint32_t>(at);
    at += piece.words;
  }
  return side;
}

void require_distinct(const BoundRows& written, const char* name, const std::vector<BoundRows>& read) {
  for (const BoundRows& other : read) {
    require(written.binding.buffer == nullptr || written.binding.buffer != other.binding.buffer, name,
            "a WebGPU buffer that is also read by this call", "a buffer of its own");
  }
}

}  // namespace attnspan::webgpu
