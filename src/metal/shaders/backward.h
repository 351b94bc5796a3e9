#pragma once
// What the gradients of queries and of keys share: rows staged chunk by chunk on both sides, and
//   p = exp(s - lse),  ds = p (dp - delta) d s / d qk.

#include "softmax.h"

// Packed query rows of a query-side tensor (query, dout): row r is first_row + r.
struct PackedRows {
  device const uchar* tensor;
  RowStrides strides;
  Sequence s;
  int kv_head, first_row, width;

  bool exists(int r) const { return first_row + r < s.seqlen_q * GROUP; }
  long index(int r) const { return query_index(strides, s, kv_head, first_row + r); }
};

// Rows of keys or values of one KV head: row r is key first_key + r.
struct KeyRows {
  device const uchar* tensor;
  long first, stride;  // in elements
  int count, width;

  bool exists(int r) const { return r < count; }
  long index(int r) const { return first + r * stride; }
};

inline int element_bytes() { return DTYPE == kF32 ? 4 : 2; }

inline KeyRows key_rows(device const uchar* tensor, KvStrides strides, int width, Sequence s, int kv_head,
                        int first_key) {
  KeyRows rows;
  rows.tensor = tensor;
  const long bytes = s.batch * strides.page + kv_head * strides.head + (s.k_row0 + long(first_key)) * strides.token;
  rows.first = bytes / element_bytes();
  rows.stride = strides.token / element_bytes();
  rows.count = s.seqlen_k - first_key;
  rows.width = width;
  return rows;
}

// Columns [first, first + columns) of `count` rows; zeros for rows and columns that do not exist.
template <typename Tile, typename Rows>
inline void stage_chunk(thread const Rows& rows, int count, int first, int columns, threadgroup Tile* to, int stride,
                        Place at) {
  for (int r = at.simdgroup; r < count; r += ATTNSPAN_SIMDGROUPS) {
    const bool exists = rows.exists(r);
    const long row = exists ? rows.index(r) : 0;
    for (int c = at.lane; c < columns; c += 32) {
      to[r * stride + c] =
          Tile(exists && first + c < rows.width ? load_element(rows.tensor, row + first + c) : 0.0f);
    }
  }
}

// Into `product_rows`: stationary streamed^T, chunk by chunk of their common width.
template <typename Tile, int CHUNK, int ROW_GROUPS, int COLUMN_GROUPS, typename Stationary, typename Streamed>
inline void product_tile(thread const Stationary& stationary, thread const Streamed& streamed,
                         threadgroup Tile* stationary_chunk, threadgroup Tile* streamed_chunk,
                         threadgroup float* product_rows, int product_stride, Place at) {
  constexpr int kStride = padded_row(CHUNK, sizeof(Tile));
  const int column_group = at.simdgroup % COLUMN_GROUPS;
  const int group_row = at.simdgroup / COLUMN_GROUPS * 8;
  simdgroup_float8x8 product[4 / COLUMN_GROUPS];
  ATTNSPAN_UNROLL
  for (int n = 0; n < 4 / COLUMN_GROUPS; ++n) product[n] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  for (int first = 0; first < streamed.width; first += CHUNK) {
    const int columns = min(CHUNK, whole_blocks(streamed.width - first));
    threadgroup_barrier(mem_flags::mem_threadgroup);  // what the chunks held is read
    stage_chunk(stationary, 8 * ROW_GROUPS, first, columns, stationary_chunk, kStride, at);
    stage_chunk(streamed, ATTNSPAN_STREAMED_ROWS, first, columns, streamed_chunk, kStride, at);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    multiply_transposed<Tile, COLUMN_GROUPS>(product, (threadgroup const Tile*)(stationary_chunk + group_row * kStride),
                                             kStride, (threadgroup const Tile*)(streamed_chunk), kStride, columns,
                                             column_group);
  }
  store_scores<COLUMN_GROUPS>(product, product_rows, product_stride, column_group);
}

// result += weights streamed, for the blocks of this simdgroup; `weights` are the 32 columns of its 8 rows.
template <typename Tile, int CHUNK, int COLUMN_GROUPS, int BLOCKS, typename Streamed>
inline void gradient_tile(threadgroup const float* weights, int weight_stride, thread const Streamed& streamed,
                          threadgroup Tile* chunk, thread simdgroup_float8x8* result, Place at) {
  constexpr int kStride = padded_row(CHUNK, sizeof(Tile));
  constexpr int kBlocksPerChunk = CHUNK / 8 / COLUMN_GROUPS;
  simdgroup_float8x8 weight[4];
  ATTNSPAN_UNROLL
  for (int k = 0; k < 4; ++k) simdgroup_load(weight[k], weights + k * 8, weight_stride);
  ATTNSPAN_UNROLL
  for (int i = 0; i < BLOCKS; ++i) {
    const int first = i / kBlocksPerChunk * CHUNK;
    if (i % kBlocksPerChunk == 0 && first < streamed.width) {
      threadgroup_barrier(mem_flags::mem_threadgroup);  // what the chunk held is read
      stage_chunk(streamed, ATTNSPAN_STREAMED_ROWS, first, min(CHUNK, whole_blocks(streamed.width - first)), chunk,
                  kStride, at);
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    const int column = (i * COLUMN_GROUPS + at.simdgroup % COLUMN_GROUPS) * 8;
    if (column >= streamed.width) continue;
    ATTNSPAN_UNROLL
    for (int k = 0; k < 4; ++k) {
      simdgroup_matrix<Tile, 8, 8> value;
      simdgroup_load(value, chunk + (k * 8 * kStride + column - first), kStride);
      simdgroup_multiply_accumulate(result[i], weight[k], value, result[i]);
    }
  }
}

// What backward knows of a query row.
struct GradientRow {
  bool exists;
  KeySpan span;
  ScoreRow score;
  float lse, delta;
};

inline GradientRow make_gradient_row(constant AttentionTensors& t, constant AttentionParams& p, Sequence s,
                                     int kv_head, int packed_row) {
  GradientRow row;
  row.exists = packed_row < s.seqlen_q * GROUP;
  row.span = {0, 0};
  row.score = {0, 0, 0.0f};
  row.lse = 0.0f;
  row.delta = 0.0f;
  if (row.exists) {
    row.span = row_span(t, p, s, query_row(packed_row));
    row.score = make_score_row(t, p, s, query_head(packed_row, kv_head), query_row(packed_row));
    row.lse = t.lse[query_index(p.lse, s, kv_head, packed_row)];
    row.delta = t.delta[query_index(p.delta, s, kv_head, packed_row)];
  }
  return row;
}

struct Gradient {
  float probability, dscore;  // p and ds; both 0 where the row does not look
};
inline Gradient make_gradient(constant AttentionTensors& t, constant AttentionParams& p, GradientRow row, int key,
                              float qk, float dp) {
  if (!row.exists || key < row.span.begin || key >= row.span.end) return {0.0f, 0.0f};
  const Score score = make_score(t, p, row.score, key, qk);
  if (score.masked) return {0.0f, 0.0f};
  const float probability = precise::exp(score.value - row.lse);
  return {probability, probability * (dp - row.delta) * score.derivative * p.softmax_scale};
}
