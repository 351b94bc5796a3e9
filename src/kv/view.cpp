// Views of caches that somebody else owns, and the host's way to read rows of any view.

#include <array>

#include "attnspan/error.hpp"
#include "core/dtype.hpp"
#include "kv/format.hpp"

namespace attnspan {
namespace {

[[noreturn]] void refuse(const char* argument, const std::string& detail) {
  throw Error(ErrorCode::invalid_argument, argument, detail);
}

KvFormat format_of(const Tensor& tensor, const char* argument) {
  switch (tensor.dtype) {
    case DType::f32:
      return KvFormat::f32;
    case DType::f16:
      return KvFormat::f16;
    case DType::bf16:
      return KvFormat::bf16;
    default:
      refuse(argument, std::string("found dtype ") + name_of(tensor.dtype) + ", expected f32, f16 or bf16");
  }
}

// `[pages, tokens, kv_heads, dim]`, any strides but the last
KvRows rows_from(const Tensor& tensor, const char* argument) {
  if (tensor.rank != 4) {
    refuse(argument,
           "found shape " + tensor.shape_text() + ", expected rank 4 [pages, tokens, kv_heads, dim]");
  }
  if (tensor.shape[3] > 1 && tensor.stride[3] != 1) {
    refuse(argument,
           "found stride " + std::to_string(tensor.stride[3]) + " in the last dimension, expected 1");
  }
  KvRows rows;
  rows.format = format_of(tensor, argument);
  rows.dim = tensor.shape[3];
  rows.codes = tensor.data;
  rows.codes_byte_offset = tensor.byte_offset;
  const int64_t element = size_of(tensor.dtype);
  rows.page_stride = tensor.stride[0] * element;
  rows.token_stride = tensor.stride[1] * element;
  rows.head_stride = tensor.stride[2] * element;
  return rows;
}

void require_device_of_key(const Tensor& tensor, const char* argument, const Tensor& key) {
  if (tensor.device == key.device) return;
  refuse(argument, std::string("found device ") + name_of(tensor.device) + ", expected the key's, " +
                       name_of(key.device));
}

KvView view_of(const Tensor& key, const Tensor& value, const Tensor& seqlens) {
  KvView view;
  view.key = rows_from(key, "key");
  view.value = rows_from(value, "value");
  for (int i = 0; i < 3; ++i) {
    if (key.shape[i] != value.shape[i]) {
      refuse("value", "found shape " + value.shape_text() + ", expected " + key.shape_text() +
                          " in all dimensions but the last");
    }
  }
  require_device_of_key(value, "value", key);
  require_device_of_key(seqlens, "seqlens", key);
  if (seqlens.rank != 1 || seqlens.dtype != DType::i32) {
    refuse("seqlens", "found " + std::string(name_of(seqlens.dtype)) + " " + seqlens.shape_text() +
                          ", expected int32 [batch]");
  }
  view.device = key.device;
  view.num_pages = key.shape[0];
  view.page_size = key.shape[1];
  view.kv_heads = key.shape[2];
  view.batch = seqlens.shape[0];
  view.seqlens = seqlens;
  return view;
}

int32_t load_i32(const Tensor& tensor, int64_t index) {
  const auto* base = static_cast<const uint8_t*>(tensor.data) + tensor.byte_offset;
  return reinterpret_cast<const int32_t*>(base)[index];
}

}  // namespace

KvView dense_cache(const Tensor& key, const Tensor& value, const Tensor& seqlens) {
  KvView view = view_of(key, value, seqlens);
  if (view.batch != view.num_pages) {
    refuse("seqlens", "found shape " + seqlens.shape_text() + ", expected [" +
                          std::to_string(view.num_pages) + "], the key's batch");
  }
  view.max_seqlen = view.page_size;
  return view;
}

KvView paged_cache(const Tensor& key, const Tensor& value, const Tensor& block_table, const Tensor& seqlens) {
  KvView view = view_of(key, value, seqlens);
  if (block_table.rank != 2 || block_table.dtype != DType::i32 || block_table.shape[0] != view.batch) {
    refuse("block_table", "found " + std::string(name_of(block_table.dtype)) + " " +
                              block_table.shape_text() + ", expected int32 [" + std::to_string(view.batch) +
                              ", pages per sequence]");
  }
  require_device_of_key(block_table, "block_table", key);
  view.block_table = block_table;
  view.max_seqlen = block_table.shape[1] * view.page_size;
  return view;
}

int64_t seqlen_of(const KvView& view, int64_t batch) {
  return load_i32(view.seqlens, batch * view.seqlens.stride[0]);
}

int64_t first_position_of(const KvView& view, int64_t batch) {
  return view.first_position ? load_i32(view.first_position, batch * view.first_position.stride[0]) : 0;
}

RowAddress row_address(const KvView& view, KvSide side, int64_t batch, int64_t head, int64_t position) {
  const int64_t offset = position - first_position_of(view, batch);
  int64_t page = batch;
  if (view.block_table) {
    page = load_i32(view.block_table, batch * view.block_table.stride[0] +
                                          offset / view.page_size * view.block_table.stride[1]);
  }
  const int64_t token = offset % view.page_size;
  const KvRows& rows = rows_of(view, side);
  RowAddress address;
  address.codes = static_cast<const uint8_t*>(rows.codes) + rows.codes_byte_offset + page * rows.page_stride +
                  head * rows.head_stride + token * rows.token_stride;
  if (rows.scales != nullptr) {
    const auto* base = static_cast<const uint8_t*>(rows.scales) + rows.scales_byte_offset;
    address.scales = reinterpret_cast<const uint16_t*>(base) + page * rows.scale_page_stride +
                     head * rows.scale_head_stride + token * rows.scale_token_stride;
  }
  return address;
}

void read_row(const KvView& view, KvSide side, int64_t batch, int64_t head, int64_t position, float* values) {
  const RowAddress row = row_address(view, side, batch, head, position);
  const int64_t dim = rows_of(view, side).dim;
  const int64_t whole = encoded_dim(view, side);
  const KvFormatOps& ops = ops_of(rows_of(view, side).format);
  if (dim == whole) {
    decode_row(ops, row.codes, row.scales, dim, values);
    return;
  }
  std::array<float, kMaxStoredDim> key;
  decode_row(ops, row.codes, row.scales, whole, key.data());
  for (int64_t i = 0; i < dim; ++i) values[i] = key[i];
}

}  // namespace attnspan
