#include "cuda/make_params.hpp"

#include <bit>

#include "kv/format.hpp"
#include "kv/tbq4_constants.hpp"

namespace attnspan::cuda {
namespace {

const void* address_of(const Tensor& tensor) {
  return tensor ? static_cast<const char*>(tensor.data) + tensor.byte_offset : nullptr;
}

bool is_multiple(int64_t a, int64_t b, int64_t c, const void* base, int64_t of) {
  return a % of == 0 && b % of == 0 && c % of == 0 && reinterpret_cast<uintptr_t>(base) % of == 0;
}

// A dense tensor as a plane: "page" = batch entry, token = row.
KvPlane plane_of(const Rows& rows, DType dtype, int64_t dim) {
  KvPlane plane;
  const int64_t size = size_of(dtype);
  plane.codes = static_cast<const uint8_t*>(rows.data);
  plane.format = dtype == DType::f32 ? Format::f32 : dtype == DType::f16 ? Format::f16 : Format::bf16;
  plane.dim = plane.stored_dim = static_cast<int32_t>(dim);
  plane.page_stride = rows.batch_stride * size;
  plane.head_stride = rows.head_stride * size;
  plane.token_stride = rows.row_stride * size;
  plane.aligned = is_multiple(plane.page_stride, plane.head_stride, plane.token_stride, plane.codes, 16);
  return plane;
}

KvPlane plane_of(const KvView& view, KvSide side) {
  const KvRows& rows = rows_of(view, side);
  KvPlane plane;
  plane.codes = static_cast<const uint8_t*>(rows.codes) + rows.codes_byte_offset;
  plane.format = static_cast<Format>(rows.format);
  plane.dim = plane.stored_dim = static_cast<int32_t>(rows.dim);
  if (rows.format == KvFormat::tbq4) {
    const int64_t block = tbq4::block_size(encoded_dim(view, side));
    plane.block = static_cast<int32_t>(block);
    plane.stored_dim = static_cast<int32_t>((rows.dim + block - 1) / block * block);
  }
  plane.page_stride = rows.page_stride;
  plane.head_stride = rows.head_stride;
  plane.token_stride = rows.token_stride;
  plane.aligned = is_multiple(plane.page_stride, plane.head_stride, plane.token_stride, plane.codes, 16);
  if (rows.scales != nullptr) {
    plane.scales =
        reinterpret_cast<const uint16_t*>(static_cast<const uint8_t*>(rows.scales) + rows.scales_byte_offset);
    plane.scale_page_stride = rows.scale_page_stride;
    plane.scale_head_stride = rows.scale_head_stride;
    plane.scale_token_stride = rows.scale_token_stride;
  }
  return plane;
}

void set_cache(Params& p, const KvView& view) {
  p.has_pages = true;
  p.shared_rows = shares_rows(view);
  p.key = plane_of(view, KvSide::key);
  p.value = plane_of(view, KvSide::value);
  p.page_size = static_cast<int32_t>(view.page_size);
  p.page_shift = std::has_single_bit(static_cast<uint64_t>(view.page_size))
                     ? std::countr_zero(static_cast<uint64_t>(view.page_size))
                     : -1;
  p.cache_seqlens = static_cast<const int32_t*>(address_of(view.seqlens));
  p.cache_seqlens_stride = view.seqlens.stride[0];
  p.block_table = static_cast<const int32_t*>(address_of(view.block_table));
  p.block_table_stride = view.block_table.stride[0];
  p.block_table_page_stride = view.block_table.stride[1];
  p.first_position = static_cast<const int32_t*>(address_of(view.first_position));
  p.first_position_stride = view.first_position.stride[0];
}

}  // namespace

DeviceRows device_rows(const Rows& rows) {
  return {rows.data, rows.batch_stride, rows.head_stride, rows.row_stride};
}

Params make_params(const Problem& problem) {
  Params p;
  p.dtype = static_cast<int32_t>(problem.dtype);
  p.batch = static_cast<int32_t>(problem.batch);
  p.heads = static_cast<int32_t>(problem.heads);
  p.kv_heads = static_cast<int32_t>(problem.kv_heads);
  p.group = static_cast<int32_t>(problem.group());
  p.head_dim = static_cast<int32_t>(problem.head_dim);
  p.head_dim_v = static_cast<int32_t>(problem.head_dim_v);
  p.seqlen_q = static_cast<int32_t>(problem.seqlen_q);
  p.seqlen_k = static_cast<int32_t>(problem.seqlen_k);
  p.softmax_scale = problem.softmax_scale;
  p.softcap = problem.softcap;
  p.diagonal_kind = static_cast<int32_t>(problem.diagonal.kind);
  p.diagonal_value = problem.diagonal.value;
  p.window_left = problem.window_left;
  p.window_right = problem.window_right;
  p.key_start = {problem.key_start.data, problem.key_start.batch_stride};
  p.key_end = {problem.key_end.data, problem.key_end.batch_stride};
  p.cu_seqlens_q = problem.cu_seqlens_q;
  p.cu_seqlens_k = problem.cu_seqlens_k;
  p.seqused_k = problem.seqused_k;
  p.bias = {problem.bias.data, problem.bias.batch_stride, problem.bias.head_stride, problem.bias.row_stride,
            problem.bias.key_stride};
  p.alibi_slopes = {problem.alibi_slopes.data, problem.alibi_slopes.batch_stride};
  p.sinks = problem.sinks;
  p.query = device_rows(problem.query);
  p.out = device_rows(problem.out);
  p.lse = device_rows(problem.lse);
  if (problem.cache != nullptr) {
    set_cache(p, *problem.cache);
  } else {
    p.key = plane_of(problem.key, problem.dtype, problem.head_dim);
    p.value = plane_of(problem.value, problem.dtype, problem.head_dim_v);
  }
  p.nan_guard = problem.nan_guard;
  return p;
}

AppendParams make_append_params(const DeviceAppendArgs& args) {
  AppendParams a;
  set_cache(a.cache, *args.cache);
  a.cache.batch = static_cast<int32_t>(args.cache->batch);
  a.cache.kv_heads = static_cast<int32_t>(args.cache->kv_heads);
  const auto rows = [](const Tensor& t) {
    return DeviceRows{const_cast<void*>(address_of(t)), t.stride[0], t.stride[2], t.stride[1]};
  };
  a.key = rows(args.key);
  a.value = rows(args.value);
  a.dtype = static_cast<int32_t>(args.key.dtype);
  a.tokens = static_cast<int32_t>(args.key.shape[1]);
  a.start = static_cast<const int32_t*>(address_of(args.start));
  a.start_stride = args.start.stride[0];
  a.quality = args.encode_mode == EncodeMode::quality;
  a.saturated = static_cast<int32_t*>(const_cast<void*>(address_of(args.saturated)));
  return a;
}

MergeParams make_merge_params(const MergeProblem& problem) {
  MergeParams p;
  p.dtype = static_cast<int32_t>(problem.dtype);
  p.batch = static_cast<int32_t>(problem.batch);
  p.heads = static_cast<int32_t>(problem.heads);
  p.rows = static_cast<int32_t>(problem.rows);
  p.head_dim_v = static_cast<int32_t>(problem.head_dim_v);
  p.out_a = device_rows(problem.out_a);
  p.lse_a = device_rows(problem.lse_a);
  p.out_b = device_rows(problem.out_b);
  p.lse_b = device_rows(problem.lse_b);
  p.out = device_rows(problem.out);
  p.lse = device_rows(problem.lse);
  return p;
}

}  // namespace attnspan::cuda
