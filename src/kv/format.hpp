#pragma once
// The formats of a KV cache behind one small interface: a new format is one file and one row of the table in
// format.cpp. Host memory only; device kernels restate decode_stored_row for their own tiles.
//
// A format may store a row in another domain than the caller's (tbq4: rotated, padded to whole blocks):
//   query . key  = enter_domain(query) . decode_stored_row(key)
//   sum p value  = leave_domain(sum p decode_stored_row(value))
// so a kernel enters once per query row and leaves once per output row. Elsewhere both are copies.

#include <cstdint>
#include <optional>
#include <string_view>

#include "attnspan/kv_view.hpp"

namespace attnspan {

// Codes of a row are read and written through 16-byte vectors: rows of a cache start at multiples of this.
inline constexpr int64_t kRowAlignment = 16;
// The widest stored row: head dims end at 576, which is nine whole blocks of 64.
inline constexpr int64_t kMaxStoredDim = 576;

struct KvFormatOps {
  KvFormat format;
  const char* name;
  bool rotated;  // the stored domain differs from the caller's

  int64_t (*row_code_bytes)(int64_t dim);
  int64_t (*row_scales)(int64_t dim);  // f16 elements
  int64_t (*stored_dim)(int64_t dim);  // width of a row in the stored domain; >= dim

  // values[dim] -> codes[row_code_bytes], scales[row_scales]. Returns how many scales were beyond f16 (or not
  // a number) and were stored as 65504. The same bytes whatever the machine and the neighbours of the row.
  int64_t (*encode_row)(const float* values, int64_t dim, EncodeMode mode, uint8_t* codes, uint16_t* scales);
  // -> values[stored_dim] in the stored domain
  void (*decode_stored_row)(const uint8_t* codes, const uint16_t* scales, int64_t dim, float* values);
  // values[dim] -> stored[stored_dim], and back. The buffers must not overlap.
  void (*enter_domain)(const float* values, int64_t dim, float* stored);
  void (*leave_domain)(const float* stored, int64_t dim, float* values);
};

const KvFormatOps& ops_of(KvFormat format);
std::optional<KvFormat> parse_kv_format(std::string_view name);
inline constexpr const char* kKvFormatNames = "f32, f16, bf16, q8 or tbq4";

// Codes and scales -> values[dim] in the caller's domain.
void decode_row(const KvFormatOps& ops, const uint8_t* codes, const uint16_t* scales, int64_t dim,
                float* values);

// ---- rows of a view in host memory

struct RowAddress {
  const uint8_t* codes = nullptr;
  const uint16_t* scales = nullptr;  // null without scales
};

// Which of its two planes a view is asked for.
enum class KvSide { key, value };

inline const KvRows& rows_of(const KvView& view, KvSide side) {
  return side == KvSide::key ? view.key : view.value;
}
// Values that are the first value.dim of the key (MLA) lie in rows that were encoded as keys.
inline bool shares_rows(const KvView& view) {
  return view.value.codes == view.key.codes && view.value.codes_byte_offset == view.key.codes_byte_offset;
}
// The dim with which a row was encoded: it decides tbq4's block size.
inline int64_t encoded_dim(const KvView& view, KvSide side) {
  return side == KvSide::value && shares_rows(view) ? view.key.dim : rows_of(view, side).dim;
}

int64_t seqlen_of(const KvView& view, int64_t batch);
int64_t first_position_of(const KvView& view, int64_t batch);

RowAddress row_address(const KvView& view, KvSide side, int64_t batch, int64_t head, int64_t position);
// One row, decoded: `values` has rows_of(view, side).dim elements.
void read_row(const KvView& view, KvSide side, int64_t batch, int64_t head, int64_t position, float* values);

}  // namespace attnspan
