#pragma once
// Where the keys, or the values, of one sequence and KV head lie: dense tensor or cache, paged or not.
// Kernels see runs of rows at a fixed stride and decode them (loader-inl.hpp); nothing else knows about
// pages.

#include <algorithm>
#include <cstdint>

#include "core/problem.hpp"
#include "kv/format.hpp"

namespace attnspan::cpu {

// Consecutive keys in one page.
struct RowRun {
  const char* codes = nullptr;
  int64_t code_stride = 0;  // bytes from row to row
  const uint16_t* scales = nullptr;
  int64_t scale_stride = 0;  // elements from row to row
  int64_t count = 0;
};

class KvSource {
 public:
  static KvSource keys(const Problem& problem, const Sequence& sequence, int64_t kv_head) {
    if (problem.cache != nullptr) return {*problem.cache, KvSide::key, sequence.batch, kv_head};
    return {problem, problem.key, problem.head_dim, sequence, kv_head};
  }
  static KvSource values(const Problem& problem, const Sequence& sequence, int64_t kv_head) {
    if (problem.cache != nullptr) return {*problem.cache, KvSide::value, sequence.batch, kv_head};
    return {problem, problem.value, problem.head_dim_v, sequence, kv_head};
  }

  KvFormat format() const { return format_; }
  // Width of a row as the caller sees it, as it was encoded (values inside MLA keys are narrower than that)
  // and as the kernels see it, in the format's own domain.
  size_t dim() const { return static_cast<size_t>(dim_); }
  size_t encoded_dim() const { return static_cast<size_t>(encoded_dim_); }
  size_t stored_dim() const { return rotated() ? stored_dim_of(encoded_dim_) : dim(); }
  size_t row_bytes() const { return static_cast<size_t>(ops_of(format_).row_code_bytes(encoded_dim_)); }
  bool rotated() const { return ops_of(format_).rotated; }

  // Into that domain and back. Only where rotated(); the buffers hold stored_dim() floats and do not overlap.
  void enter_domain(const float* values, float* stored) const {
    ops_of(format_).enter_domain(values, encoded_dim_, stored);
  }
  void leave_domain(const float* stored, float* values) const {
    ops_of(format_).leave_domain(stored, encoded_dim_, values);
  }

  // The keys from `key` on that lie in one page, `key_end` at most.
  RowRun run(int64_t key, int64_t key_end) const {
    const int64_t index = key - first_position_;
    const int64_t slot = index / page_size_;
    const int64_t row = index % page_size_;
    const int64_t page =
        block_table_ != nullptr ? block_table_[slot * block_table_stride_] : page_of_sequence_ + slot;
    return {codes_ + page * page_stride_ + row * token_stride_, token_stride_,
            scales_ + page * scale_page_stride_ + row * scale_token_stride_, scale_token_stride_,
            std::min(key_end - key, page_size_ - row)};
  }

 private:
  KvSource(const Problem& problem, const Rows& rows, int64_t dim, const Sequence& sequence, int64_t kv_head)
      : format_(problem.dtype == DType::f32   ? KvFormat::f32
                : problem.dtype == DType::f16 ? KvFormat::f16
                                              : KvFormat::bf16),
        dim_(dim),
        encoded_dim_(dim),
        codes_(static_cast<const char*>(rows.data) +
               rows.index(sequence.batch, kv_head, sequence.k_row0) * size_of(problem.dtype)),
        token_stride_(rows.row_stride * size_of(problem.dtype)) {}

  KvSource(const KvView& cache, KvSide side, int64_t batch, int64_t kv_head)
      : KvSource(cache, rows_of(cache, side), attnspan::encoded_dim(cache, side), batch, kv_head) {}

  KvSource(const KvView& cache, const KvRows& rows, int64_t encoded_dim, int64_t batch, int64_t kv_head)
      : format_(rows.format),
        dim_(rows.dim),
        encoded_dim_(encoded_dim),
        codes_(static_cast<const char*>(rows.codes) + rows.codes_byte_offset + kv_head * rows.head_stride),
        token_stride_(rows.token_stride),
        page_stride_(rows.page_stride),
        page_size_(cache.page_size),
        page_of_sequence_(batch) {
    if (rows.scales != nullptr) {
      scales_ =
          reinterpret_cast<const uint16_t*>(static_cast<const char*>(rows.scales) + rows.scales_byte_offset) +
          kv_head * rows.scale_head_stride;
      scale_token_stride_ = rows.scale_token_stride;
      scale_page_stride_ = rows.scale_page_stride;
    }
    if (cache.block_table) {
      block_table_ = int32_data(cache.block_table) + batch * cache.block_table.stride[0];
      block_table_stride_ = cache.block_table.stride[1];
    }
    if (cache.first_position) {
      first_position_ = int32_data(cache.first_position)[batch * cache.first_position.stride[0]];
    }
  }

  size_t stored_dim_of(int64_t dim) const { return static_cast<size_t>(ops_of(format_).stored_dim(dim)); }

  static const int32_t* int32_data(const Tensor& tensor) {
    return reinterpret_cast<const int32_t*>(static_cast<const char*>(tensor.data) + tensor.byte_offset);
  }

  KvFormat format_;
  int64_t dim_;
  int64_t encoded_dim_;
  const char* codes_;
  int64_t token_stride_;
  int64_t page_stride_ = 0;
  const uint16_t* scales_ = nullptr;
  int64_t scale_token_stride_ = 0;
  int64_t scale_page_stride_ = 0;
  int64_t page_size_ = kUnlimited;  // a dense tensor is one endless page
  int64_t page_of_sequence_ = 0;
  int64_t first_position_ = 0;
  const int32_t* block_table_ = nullptr;
  int64_t block_table_stride_ = 1;  // elements from page to page
};

}  // namespace attnspan::cpu
