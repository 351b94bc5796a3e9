#include "capi/convert.hpp"

#include <algorithm>
#include <cstring>

#include "capi/structs.hpp"
#include "core/validation.hpp"

namespace attnspan::capi {
namespace {

// The numbers of attnspan.h are those of the C++ enumerations.
static_assert(ATTNSPAN_INTERNAL == static_cast<int>(ErrorCode::internal));
static_assert(ATTNSPAN_UNSUPPORTED == static_cast<int>(ErrorCode::unsupported));
static_assert(ATTNSPAN_I32 == static_cast<int>(DType::i32) && ATTNSPAN_BF16 == static_cast<int>(DType::bf16));
static_assert(ATTNSPAN_METAL == static_cast<int>(Device::metal) &&
              ATTNSPAN_CUDA == static_cast<int>(Device::cuda));
static_assert(ATTNSPAN_OFFSET == static_cast<int>(Diagonal::Kind::offset));
static_assert(ATTNSPAN_KV_TBQ4 == static_cast<int>(KvFormat::tbq4) &&
              ATTNSPAN_KV_Q8 == static_cast<int>(KvFormat::q8));

void copy_text(const std::string& text, char* to, size_t size) {
  const size_t length = std::min(text.size(), size - 1);
  std::memcpy(to, text.data(), length);
  to[length] = '\0';
}

Tensor to_tensor(const attnspan_tensor& from, const char* name) {
  Tensor tensor;
  if (from.rank == 0) return tensor;
  require(from.rank > 0 && from.rank <= kMaxRank, name, "rank " + std::to_string(from.rank), "0 to 4");
  tensor.data = from.data;
  tensor.byte_offset = from.byte_offset;
  tensor.dtype = checked_enum<DType>(from.dtype, ATTNSPAN_I32, name, "dtype");
  tensor.device = checked_enum<Device>(from.device, ATTNSPAN_METAL, name, "device");
  tensor.rank = from.rank;
  for (int i = 0; i < from.rank; ++i) {
    require(from.shape[i] >= 0, name, "extent " + std::to_string(from.shape[i]), "0 or more");
    tensor.shape[i] = from.shape[i];
    tensor.stride[i] = from.stride[i];
  }
  return tensor;
}

attnspan_tensor from_tensor(const Tensor& tensor) {
  attnspan_tensor to{};
  to.data = tensor.data;
  to.byte_offset = tensor.byte_offset;
  to.dtype = static_cast<int32_t>(tensor.dtype);
  to.device = static_cast<int32_t>(tensor.device);
  to.rank = tensor.rank;
  for (int i = 0; i < tensor.rank; ++i) {
    to.shape[i] = tensor.shape[i];
    to.stride[i] = tensor.stride[i];
  }
  return to;
}

AttentionOptions to_options(const attnspan_options* from) {
  if (from == nullptr) return {};
  const attnspan_options o = load(from, "options", attnspan_options_init());
  AttentionOptions options;
  options.softmax_scale = o.softmax_scale;
  options.softcap = o.softcap;
  options.causal = o.causal != 0;
  options.nan_guard = o.nan_guard != 0;
  options.diagonal.kind = checked_enum<Diagonal::Kind>(o.diagonal_kind, ATTNSPAN_OFFSET, "diagonal", "kind");
  options.diagonal.value = o.diagonal_offset;
  options.window_left = o.window_left;
  options.window_right = o.window_right;
  options.key_start = to_tensor(o.key_start, "key_start");
  options.key_end = to_tensor(o.key_end, "key_end");
  options.cu_seqlens_q = to_tensor(o.cu_seqlens_q, "cu_seqlens_q");
  options.cu_seqlens_k = to_tensor(o.cu_seqlens_k, "cu_seqlens_k");
  options.seqused_k = to_tensor(o.seqused_k, "seqused_k");
  options.bias = to_tensor(o.bias, "bias");
  options.alibi_slopes = to_tensor(o.alibi_slopes, "alibi_slopes");
  options.sinks = to_tensor(o.sinks, "sinks");
  return options;
}

KvRows to_rows(const attnspan_kv_rows& from) {
  KvRows rows;
  rows.format = checked_enum<KvFormat>(from.format, ATTNSPAN_KV_TBQ4, "cache", "format");
  rows.dim = from.dim;
  rows.codes = from.codes;
  rows.codes_byte_offset = from.codes_byte_offset;
  rows.page_stride = from.page_stride;
  rows.head_stride = from.head_stride;
  rows.token_stride = from.token_stride;
  rows.scales = from.scales;
  rows.scales_byte_offset = from.scales_byte_offset;
  rows.scale_page_stride = from.scale_page_stride;
  rows.scale_head_stride = from.scale_head_stride;
  rows.scale_token_stride = from.scale_token_stride;
  return rows;
}

attnspan_kv_rows from_rows(const KvRows& rows) {
  attnspan_kv_rows to{};
  to.format = static_cast<int32_t>(rows.format);
  to.dim = rows.dim;
  to.codes = rows.codes;
  to.codes_byte_offset = rows.codes_byte_offset;
  to.page_stride = rows.page_stride;
  to.head_stride = rows.head_stride;
  to.token_stride = rows.token_stride;
  to.scales = rows.scales;
  to.scales_byte_offset = rows.scales_byte_offset;
  to.scale_page_stride = rows.scale_page_stride;
  to.scale_head_stride = rows.scale_head_stride;
  to.scale_token_stride = rows.scale_token_stride;
  return to;
}

KvView to_view(const attnspan_kv_view* from) {
  const attnspan_kv_view v = load(from, "cache", attnspan_kv_view_init());
  KvView view;
  view.device = checked_enum<Device>(v.device, ATTNSPAN_METAL, "cache", "device");
  view.batch = v.batch;
  view.kv_heads = v.kv_heads;
  view.page_size = v.page_size;
  view.num_pages = v.num_pages;
  view.max_seqlen = v.max_seqlen;
  view.key = to_rows(v.key);
  view.value = to_rows(v.value);
  view.block_table = to_tensor(v.block_table, "block_table");
  view.seqlens = to_tensor(v.seqlens, "seqlens");
  view.first_position = to_tensor(v.first_position, "first_position");
  return view;
}

}  // namespace

Converted<ForwardArgs> convert(const attnspan_forward_args* from) {
  const attnspan_forward_args a = load(from, "args", attnspan_forward_args_init());
  Converted<ForwardArgs> to;
  to.args.query = to_tensor(a.query, "query");
  to.args.key = to_tensor(a.key, "key");
  to.args.value = to_tensor(a.value, "value");
  if (a.cache != nullptr) to.cache = std::make_unique<KvView>(to_view(a.cache));
  to.args.cache = to.cache.get();
  to.args.out = to_tensor(a.out, "out");
  to.args.lse = to_tensor(a.lse, "lse");
  to.args.probs = to_tensor(a.probs, "probs");
  to.args.options = to_options(a.options);
  return to;
}

Converted<BackwardArgs> convert(const attnspan_backward_args* from) {
  const attnspan_backward_args a = load(from, "args", attnspan_backward_args_init());
  Converted<BackwardArgs> to;
  to.args.query = to_tensor(a.query, "query");
  to.args.key = to_tensor(a.key, "key");
  to.args.value = to_tensor(a.value, "value");
  to.args.out = to_tensor(a.out, "out");
  to.args.lse = to_tensor(a.lse, "lse");
  to.args.dout = to_tensor(a.dout, "dout");
  to.args.dlse = to_tensor(a.dlse, "dlse");
  to.args.dq = to_tensor(a.dq, "dq");
  to.args.dk = to_tensor(a.dk, "dk");
  to.args.dv = to_tensor(a.dv, "dv");
  to.args.d_sinks = to_tensor(a.d_sinks, "d_sinks");
  to.args.options = to_options(a.options);
  return to;
}

Converted<MergeArgs> convert(const attnspan_merge_args* from) {
  const attnspan_merge_args a = load(from, "args", attnspan_merge_args_init());
  Converted<MergeArgs> to;
  to.args.out_a = to_tensor(a.out_a, "out_a");
  to.args.lse_a = to_tensor(a.lse_a, "lse_a");
  to.args.out_b = to_tensor(a.out_b, "out_b");
  to.args.lse_b = to_tensor(a.lse_b, "lse_b");
  to.args.out = to_tensor(a.out, "out");
  to.args.lse = to_tensor(a.lse, "lse");
  return to;
}

Execution convert(const attnspan_execution* from) {
  Execution execution;
  if (from == nullptr) return execution;
  const attnspan_execution e = load(from, "execution", attnspan_execution_init());
  if (e.backend != nullptr) execution.backend = e.backend;
  require(e.threads >= 0, "threads", std::to_string(e.threads), "0 (all) or more");
  execution.threads = e.threads;
  execution.stream = e.stream;
  execution.workspace = e.workspace;
  execution.workspace_bytes = e.workspace_bytes;
  return execution;
}

Tensor convert(const attnspan_tensor* tensor, const char* name) {
  require(tensor != nullptr, name, "a null pointer", "a tensor");
  return to_tensor(*tensor, name);
}

void store(const KvView& from, attnspan_kv_view* to) {
  attnspan_kv_view view = attnspan_kv_view_init();
  view.device = static_cast<int32_t>(from.device);
  view.batch = from.batch;
  view.kv_heads = from.kv_heads;
  view.page_size = from.page_size;
  view.num_pages = from.num_pages;
  view.max_seqlen = from.max_seqlen;
  view.key = from_rows(from.key);
  view.value = from_rows(from.value);
  view.block_table = from_tensor(from.block_table);
  view.seqlens = from_tensor(from.seqlens);
  view.first_position = from_tensor(from.first_position);
  save(view, to, "view");
}

void store(const Result& from, attnspan_result* to) {
  if (to == nullptr) return;
  attnspan_result result = attnspan_result_init();
  copy_text(from.backend, result.backend, sizeof result.backend);
  result.nonfinite_replaced = from.nonfinite_replaced;
  save(result, to, "result");
}

void store(const BackendInfo& from, attnspan_backend_info* to) {
  attnspan_backend_info info = attnspan_backend_info_init();
  copy_text(from.name, info.name, sizeof info.name);
  copy_text(from.description, info.description, sizeof info.description);
  info.available = from.available ? 1 : 0;
  info.device = static_cast<int32_t>(from.device);
  save(info, to, "info");
}

}  // namespace attnspan::capi
