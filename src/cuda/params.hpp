#pragma once
// What the kernels see of a problem: plain data, passed by value. Lengths, tables and offsets stay device
// pointers, so that a captured graph serves growing caches.

#include <cstdint>

#include "core/key_span.hpp"

namespace attnspan::cuda {

// A tensor indexed by (batch, head, row); strides in elements, last dimension contiguous.
struct DeviceRows {
  void* data = nullptr;
  int64_t batch_stride = 0, head_stride = 0, row_stride = 0;

  ATTNSPAN_HOST_DEVICE int64_t index(int64_t batch, int64_t head, int64_t row) const {
    return batch * batch_stride + head * head_stride + row * row_stride;
  }
};

// The storage formats of KvFormat, by the same numbers. Dense tensors are planes of their dtype's format.
enum class Format : int32_t { f32 = 0, f16 = 1, bf16 = 2, q8 = 3, tbq4 = 4 };

// Keys, or values: rows in pages (see KvRows). Strides of codes are bytes, of scales f16 elements.
struct KvPlane {
  const uint8_t* codes = nullptr;
  const uint16_t* scales = nullptr;
  Format format = Format::f16;
  int32_t dim = 0;         // values of a row in the caller's domain
  int32_t stored_dim = 0;  // in the stored one (tbq4: whole blocks)
  int32_t block = 0;       // tbq4: values per norm; it follows the dim with which the row was encoded
  bool aligned = false;    // every row starts at a multiple of 16 bytes
  int64_t page_stride = 0, head_stride = 0, token_stride = 0;
  int64_t scale_page_stride = 0, scale_head_stride = 0, scale_token_stride = 0;
};

struct DeviceBias {
  const float* data = nullptr;
  int64_t batch_stride = 0, head_stride = 0, row_stride = 0, key_stride = 0;
};

template <typename T>
struct DeviceVector {
  const T* data = nullptr;
  int64_t batch_stride = 0;
};

struct Params {
  int32_t dtype = 0;  // DType of query, out and gradients
  int32_t batch = 0, heads = 0, kv_heads = 0, group = 1;
  int32_t head_dim = 0, head_dim_v = 0;
  int32_t seqlen_q = 0;  // of every sequence; packed: the sum, an upper bound
  int32_t seqlen_k = 0;

  float softmax_scale = 1, softcap = 0;
  int32_t diagonal_kind = 0;
  int64_t diagonal_value = 0;
  int64_t window_left = kUnlimited, window_right = kUnlimited;
  DeviceVector<int32_t> key_start, key_end;
  const int32_t* cu_seqlens_q = nullptr;
  const int32_t* cu_seqlens_k = nullptr;
  const int32_t* seqused_k = nullptr;
  int64_t seqused_k_stride = 1;
  DeviceBias bias;
  DeviceVector<float> alibi_slopes;
  const float* sinks = nullptr;

  DeviceRows query, out, lse;
  KvPlane key, value;
  bool has_pages = false;    // key and value are planes of a cache
  bool shared_rows = false;  // MLA: a value is the first head_dim_v of its key
  const int32_t* block_table = nullptr;
  int64_t block_table_stride = 0, block_table_page_stride = 1;
  const int32_t* cache_seqlens = nullptr;
  int64_t cache_seqlens_stride = 1;
  const int32_t* first_position = nullptr;
  int64_t first_position_stride = 1;
  int32_t page_size = 0;
  int32_t page_shift = -1;  // log2(page_size) where it is a power of two

  // Decode: the keys of a sequence are dealt to max_splits partial states (split.hpp).
  int32_t max_splits = 1;
  int32_t split_target = 1;      // splits that fill this device for one sequence
  int32_t min_split_keys = 256;  // fewer are not worth a split
  float* partial_out = nullptr;  // [splits][batch][heads][seqlen_q][head_dim_v]
  float* partial_lse = nullptr;  // [splits][batch][heads][seqlen_q]

  bool nan_guard = false;
  unsigned long long* replaced = nullptr;  // counter of nan_guard
};

// Tiles of rows of all sequences together, at most: known on the host for packed sequences too.
inline int64_t max_row_tiles(const Params& p, int64_t rows_per_tile, int64_t packing) {
  const int64_t rows = static_cast<int64_t>(p.seqlen_q) * packing;
  if (p.cu_seqlens_q == nullptr) return (rows + rows_per_tile - 1) / rows_per_tile * p.batch;
  return rows / rows_per_tile + p.batch;  // a sequence wastes less than one tile
}

// Of a query row. lse is +inf where the row sees nothing or does not exist: every weight becomes 0.
struct alignas(8) RowStat {
  float lse, delta;
};
inline constexpr int kStatRows = 128;  // statistics are padded to tiles of so many rows

struct BackwardParams {
  Params forward;
  DeviceRows dout, dq, dk, dv, dlse;
  float* d_sinks = nullptr;
  RowStat* stats = nullptr;  // [heads][padded row of all sequences]
  int64_t stat_rows = 0;     // padded rows of a head
};

}  // namespace attnspan::cuda
