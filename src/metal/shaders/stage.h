#pragma once
// Tiles in threadgroup memory. A simdgroup stages a row at a time, so that its lanes read neighbours.

#include <metal_simdgroup_matrix>

#include "rotate.h"
#include "score.h"

// Who this thread is.
struct Place {
  int index;      // in the threadgroup
  int lane;       // in its simdgroup
  int simdgroup;  // in the threadgroup
};

inline int whole_blocks(int columns) { return (columns + 7) / 8 * 8; }

// Offsets of the next 32 keys and values: code and scale of the key, code and scale of the value. -1: no such key.
enum AddressKind { kKeyCode = 0, kKeyScale = 32, kValueCode = 64, kValueScale = 96 };

inline void locate_keys(constant AttentionTensors& t, constant AttentionParams& p, Sequence s, int kv_head, int first,
                        int end, threadgroup long* addresses, Place at) {
  if (at.index >= ATTNSPAN_STREAMED_ROWS) return;
  const int key = first + at.index;
  long page = s.batch;
  int token = s.k_row0 + key - s.key_begin;
  if (HAS_BLOCK_TABLE && key < end) {
    page = t.block_table[s.batch * p.block_table_batch + token / p.page_size * p.block_table_page];
    token = token % p.page_size;
  }
  const bool exists = key < end;
  const KvStrides k = p.key;
  const KvStrides v = p.value;
  addresses[kKeyCode + at.index] = exists ? page * k.page + kv_head * k.head + token * k.token : -1;
  addresses[kKeyScale + at.index] = page * k.scale_page + kv_head * k.scale_head + token * k.scale_token;
  addresses[kValueCode + at.index] = exists ? page * v.page + kv_head * v.head + token * v.token : -1;
  addresses[kValueScale + at.index] = page * v.scale_page + kv_head * v.scale_head + token * v.scale_token;
}

// Columns [first, first + columns) of 32 keys, decoded; zeros for rows and columns that do not exist.
template <typename Tile>
inline void stage_keys(constant AttentionTensors& t, threadgroup const long* addresses, int first, int columns,
                       threadgroup Tile* to, int stride, Place at) {
  for (int r = at.simdgroup; r < ATTNSPAN_STREAMED_ROWS; r += ATTNSPAN_SIMDGROUPS) {
    const long code = addresses[kKeyCode + r];
    const long scale = addresses[kKeyScale + r];
    for (int c = at.lane; c < columns; c += 32) {
      const bool exists = code >= 0 && first + c < KEY_WIDTH;
      to[r * stride + c] = Tile(
          exists ? decode(KEY_FORMAT, KEY_BLOCK, t.key_codes + code, t.key_scales + scale, first + c) : 0.0f);
    }
  }
}

template <typename Tile>
inline void stage_values(constant AttentionTensors& t, threadgroup const long* addresses, int first, int columns,
                         threadgroup Tile* to, int stride, Place at) {
  for (int r = at.simdgroup; r < ATTNSPAN_STREAMED_ROWS; r += ATTNSPAN_SIMDGROUPS) {
    const long code = addresses[kValueCode + r];
    const long scale = addresses[kValueScale + r];
    for (int c = at.lane; c < columns; c += 32) {
      const bool exists = code >= 0 && first + c < VALUE_WIDTH;
      to[r * stride + c] = Tile(
          exists ? decode(VALUE_FORMAT, VALUE_BLOCK, t.value_codes + code, t.value_scales + scale, first + c) : 0.0f);
    }
  }
}

// Columns [first, first + columns) of `count` packed rows of a query-side tensor of width `dim`.
template <typename Tile>
inline void stage_rows(device const uchar* tensor, RowStrides strides, int dim, Sequence s, int kv_head, int first_row,
                       int count, int first, int columns, threadgroup Tile* to, int stride, Place at) {
  const int rows = s.seqlen_q * GROUP;
  for (int r = at.simdgroup; r < count; r += ATTNSPAN_SIMDGROUPS) {
    const bool exists = first_row + r < rows;
    const long row = exists ? query_index(strides, s, kv_head, first_row + r) : 0;
    for (int c = at.lane; c < columns; c += 32) {
      to[r * stride + c] = Tile(exists && first + c < dim ? load_element(tensor, row + first + c) : 0.0f);
    }
  }
}

// result[n] += a b^T over `columns` columns: 8 rows of a, and the 8 rows n of b that belong to this column group.
template <typename Tile, int COLUMN_GROUPS>
inline void multiply_transposed(thread simdgroup_float8x8* result, threadgroup const Tile* a, int stride_a,
                                threadgroup const Tile* b, int stride_b, int columns, int column_group) {
  for (int c = 0; c < columns; c += 8) {
    simdgroup_matrix<Tile, 8, 8> left;
    simdgroup_load(left, a + c, stride_a);
    ATTNSPAN_UNROLL
    for (int n = 0; n < 4 / COLUMN_GROUPS; ++n) {
      simdgroup_matrix<Tile, 8, 8> right;
      const int row = (n * COLUMN_GROUPS + column_group) * 8;
      simdgroup_load(right, b + row * stride_b + c, stride_b, ulong2{0, 0}, true);
      simdgroup_multiply_accumulate(result[n], left, right, result[n]);
    }
  }
}

template <int COLUMN_GROUPS>
inline void store_scores(thread const simdgroup_float8x8* scores, threadgroup float* rows, int stride,
                         int column_group) {
  ATTNSPAN_UNROLL
  for (int n = 0; n < 4 / COLUMN_GROUPS; ++n) {
    simdgroup_store(scores[n], rows + (n * COLUMN_GROUPS + column_group) * 8, stride);
  }
}

// Orders the memory of the simdgroups that share 8 rows.
template <int COLUMN_GROUPS>
inline void row_group_barrier() {
  if (COLUMN_GROUPS == 1) {
    simdgroup_barrier(mem_flags::mem_threadgroup);
  } else {
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
}

// The result blocks of this simdgroup, as rows of f32 in threadgroup memory.
template <int COLUMN_GROUPS, int BLOCKS>
inline void stage_result(thread const simdgroup_float8x8* result, int width, threadgroup float* rows, int stride,
                         Place at) {
  const int row = at.simdgroup / COLUMN_GROUPS * 8;
  ATTNSPAN_UNROLL
  for (int i = 0; i < BLOCKS; ++i) {
    const int column = (i * COLUMN_GROUPS + at.simdgroup % COLUMN_GROUPS) * 8;
    if (column < width) simdgroup_store(result[i], rows + row * stride + column, stride);
  }
}
