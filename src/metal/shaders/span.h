#pragma once
// One sequence of the batch, and the span of keys of a row: the shader's side of core/key_span.hpp. Nothing
// else here knows a mask.

#include "element.h"
#include "tiles.h"

struct Sequence {
  int batch;
  int q_row0, k_row0;  // first rows in packed tensors
  int seqlen_q, seqlen_k;
  int key_begin;  // keys exist in [key_begin, seqlen_k)
  long diagonal;
};

inline Sequence make_sequence(constant AttentionTensors& t, constant AttentionParams& p, int batch) {
  Sequence s;
  s.batch = batch;
  s.q_row0 = PACKED ? t.cu_seqlens_q[batch] : 0;
  s.k_row0 = PACKED ? t.cu_seqlens_k[batch] : 0;
  s.seqlen_q = PACKED ? t.cu_seqlens_q[batch + 1] - s.q_row0 : p.seqlen_q;
  s.seqlen_k = PACKED ? t.cu_seqlens_k[batch + 1] - s.k_row0 : p.seqlen_k;
  if (HAS_LENGTHS) s.seqlen_k = t.lengths[batch * p.lengths_batch];
  s.key_begin = HAS_FIRST_POSITION ? t.first_position[batch * p.first_position_batch] : 0;
  s.diagonal = p.diagonal;                                           // Kind::offset
  if (p.diagonal_kind == 0) s.diagonal = s.seqlen_k - s.seqlen_q;  // Kind::bottom_right
  if (p.diagonal_kind == 1) s.diagonal = 0;                          // Kind::top_left
  return s;
}

// Keys [begin, end) of the sequence; begin >= end where the row sees none.
struct KeySpan {
  int begin, end;
};

inline KeySpan row_span(constant AttentionTensors& t, constant AttentionParams& p, Sequence s, int row) {
  const long position = row + s.diagonal;
  long begin = max(position - p.window_left, long(s.key_begin));
  long end = min(position + p.window_right + 1, long(s.seqlen_k));
  if (HAS_KEY_START) begin = max(begin, long(t.key_start[s.batch * p.key_start_batch + row]));
  if (HAS_KEY_END) end = min(end, long(t.key_end[s.batch * p.key_end_batch + row]));
  // Clamped to the sequence, so that ints hold them: an empty span stays empty.
  return {int(min(begin, long(s.seqlen_k))), int(max(end, long(s.key_begin)))};
}

// The keys that any row of [first, last] sees, and those that every row sees: both ends never decrease.
inline KeySpan hull_span(constant AttentionTensors& t, constant AttentionParams& p, Sequence s, int first, int last) {
  return {row_span(t, p, s, first).begin, row_span(t, p, s, last).end};
}
inline KeySpan core_span(constant AttentionTensors& t, constant AttentionParams& p, Sequence s, int first, int last) {
  return {row_span(t, p, s, last).begin, row_span(t, p, s, first).end};
}

// Rows of all query heads of one KV head, interleaved: row r is query row r / GROUP of head r % GROUP of the
// group. They share every staged key, and spans still never decrease with r.
inline int query_row(int packed_row) { return packed_row / GROUP; }
inline int query_head(int packed_row, int kv_head) { return kv_head * GROUP + packed_row % GROUP; }

inline long index_of(RowStrides strides, int batch, int head, int row) {
  return batch * strides.batch + head * strides.head + row * strides.row;
}
// lse, dlse and delta index rows of packed batches by their place in the whole batch.
inline long query_index(RowStrides strides, Sequence s, int kv_head, int packed_row) {
  return index_of(strides, s.batch, query_head(packed_row, kv_head), s.q_row0 + query_row(packed_row));
}

// Which keys of a row tile one split takes: equal parts of its hull in whole tiles, from the hull alone, so that
// a sequence's answer never depends on its batchmates.
struct SplitRange {
  int begin, end, count;
};
inline SplitRange split_range(KeySpan hull, int split) {
  if (!SPLIT) return {hull.begin, hull.end, 1};
  const int keys = max(hull.end - hull.begin, 0);
  const int count = max(min((keys + ATTNSPAN_SPLIT_KEYS - 1) / ATTNSPAN_SPLIT_KEYS, ATTNSPAN_MAX_SPLITS), 1);
  const int share = (keys + count - 1) / count;
  const int whole = (share + ATTNSPAN_STREAMED_ROWS - 1) / ATTNSPAN_STREAMED_ROWS * ATTNSPAN_STREAMED_ROWS;
  const int begin = hull.begin + split * whole;
  return {begin, min(begin + whole, hull.end), count};
}

// Where the state of a packed row lies among those of all splits, heads and sequences.
inline long partial_index(constant AttentionParams& p, Sequence s, int kv_head, int packed_row, int split) {
  const long rows = p.partial_pitch > 0 ? long(p.batch) * p.partial_pitch : p.seqlen_q;
  const long first = p.partial_pitch > 0 ? long(s.batch) * p.partial_pitch : s.q_row0;
  return (split * rows + first) * p.heads + kv_head * GROUP * long(s.seqlen_q) + packed_row;
}
