#include "check/cache_builder.hpp"

#include <algorithm>

#include "kv/format.hpp"

namespace attnspan::check {
namespace {

int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

}  // namespace

BuiltCache::BuiltCache(const Buffer& key, const Buffer& value, const std::vector<int64_t>& seqlens,
                       KvFormat k_format, KvFormat v_format, int64_t page_size, Random& random) {
  const Tensor& k = key.tensor();
  view_.batch = k.shape[0];
  view_.max_seqlen = k.shape[1];
  view_.kv_heads = k.shape[2];
  const int64_t pages = (view_.max_seqlen + page_size - 1) / page_size;
  view_.page_size = page_size;
  view_.num_pages = view_.batch * pages + 1;  // one page belongs to nobody
  for (int64_t page = 0; page < view_.num_pages; ++page) block_table_.push_back(static_cast<int32_t>(page));
  std::shuffle(block_table_.begin(), block_table_.end(), random);
  view_.block_table = contiguous(block_table_.data(), DType::i32, {view_.batch, pages});
  for (int64_t length : seqlens) seqlens_.push_back(static_cast<int32_t>(length));
  view_.seqlens = contiguous(seqlens_.data(), DType::i32, {view_.batch});
  place(view_.key, key_codes_, key_scales_, k_format, k.shape[3]);
  place(view_.value, value_codes_, value_scales_, v_format, value.tensor().shape[3]);
  encode(view_.key, key, seqlens);
  encode(view_.value, value, seqlens);
}

void BuiltCache::place(KvRows& rows, std::vector<uint8_t>& codes, std::vector<uint16_t>& scales,
                       KvFormat format, int64_t dim) {
  const KvFormatOps& ops = ops_of(format);
  rows.format = format;
  rows.dim = dim;
  rows.token_stride = round_up(ops.row_code_bytes(dim), kRowAlignment);
  rows.head_stride = rows.token_stride * view_.page_size;
  rows.page_stride = rows.head_stride * view_.kv_heads;
  rows.scale_token_stride = ops.row_scales(dim);
  rows.scale_head_stride = rows.scale_token_stride * view_.page_size;
  rows.scale_page_stride = rows.scale_head_stride * view_.kv_heads;
  // 0xff is NaN in f32, f16 and bf16, and a scale of 0xffff is NaN whatever the codes.
  codes.assign(static_cast<size_t>(rows.page_stride * view_.num_pages + kRowAlignment), 0xff);
  scales.assign(static_cast<size_t>(rows.scale_page_stride * view_.num_pages), 0xffff);
  const int64_t misaligned = reinterpret_cast<intptr_t>(codes.data()) % kRowAlignment;
  rows.codes = codes.data();
  rows.codes_byte_offset = misaligned == 0 ? 0 : kRowAlignment - misaligned;
  rows.scales = scales.empty() ? nullptr : scales.data();
}

void BuiltCache::encode(const KvRows& rows, const Buffer& values, const std::vector<int64_t>& seqlens) {
  const KvFormatOps& ops = ops_of(rows.format);
  std::vector<float> row(static_cast<size_t>(rows.dim));
  for (int64_t b = 0; b < view_.batch; ++b) {
    for (int64_t j = 0; j < seqlens[b]; ++j) {
      for (int64_t h = 0; h < view_.kv_heads; ++h) {
        const int64_t first = ((b * view_.max_seqlen + j) * view_.kv_heads + h) * rows.dim;
        for (int64_t d = 0; d < rows.dim; ++d) row[d] = values.get(first + d);
        const int64_t page = block_table_[b * view_.block_table.shape[1] + j / view_.page_size];
        const int64_t token = j % view_.page_size;
        uint8_t* codes = static_cast<uint8_t*>(rows.codes) + rows.codes_byte_offset +
                         page * rows.page_stride + h * rows.head_stride + token * rows.token_stride;
        uint16_t* scales = rows.scales == nullptr
                               ? nullptr
                               : static_cast<uint16_t*>(rows.scales) + page * rows.scale_page_stride +
                                     h * rows.scale_head_stride + token * rows.scale_token_stride;
        ops.encode_row(row.data(), rows.dim, EncodeMode::quality, codes, scales);
      }
    }
  }
}

}  // namespace attnspan::check
