#pragma once
// The online softmax over a tile of scores in threadgroup memory. A row is kept by 4 * COLUMN_GROUPS lanes, so that
// every lane knows one row only.

#include "stage.h"

constant float kLowest = -3.402823466e+38f;  // where a maximum starts; never an answer: emptiness is l == 0

struct SoftmaxRow {
  bool exists;
  KeySpan span;
  ScoreRow score;
  float m, l;  // (m, l) of the online softmax; empty while l == 0
};

// Which row of the tile a lane keeps, and its first column.
template <int COLUMN_GROUPS>
inline int kept_row(Place at) {
  const int rows_per_simdgroup = 8 / COLUMN_GROUPS;
  return at.simdgroup / COLUMN_GROUPS * 8 + at.simdgroup % COLUMN_GROUPS * rows_per_simdgroup +
         at.lane / (4 * COLUMN_GROUPS);
}
template <int COLUMN_GROUPS>
inline int kept_column(Place at) {
  return at.lane % (4 * COLUMN_GROUPS);
}

inline SoftmaxRow make_softmax_row(constant AttentionTensors& t, constant AttentionParams& p, Sequence s, int kv_head,
                                   int packed_row) {
  SoftmaxRow row;
  row.exists = packed_row < s.seqlen_q * GROUP;
  row.m = 0.0f;
  row.l = 0.0f;
  row.span = {0, 0};
  row.score = {0, 0, 0.0f};
  if (row.exists) {
    row.span = row_span(t, p, s, query_row(packed_row));
    row.score = make_score_row(t, p, s, query_head(packed_row, kv_head), query_row(packed_row));
  }
  return row;
}

template <int COLUMN_GROUPS>
inline float row_max(float value) {
  for (int mask = 1; mask < 4 * COLUMN_GROUPS; mask *= 2) value = max(value, simd_shuffle_xor(value, ushort(mask)));
  return value;
}
template <int COLUMN_GROUPS>
inline float row_sum(float value) {
  for (int mask = 1; mask < 4 * COLUMN_GROUPS; mask *= 2) value += simd_shuffle_xor(value, ushort(mask));
  return value;
}

// Scores of one row of the tile -> exp(score - m), 0 where the row does not look; m and l move on, and `factor`
// is what the row's result so far is multiplied by. Keys [first_key, first_key + 32); `edge`: some row's span begins
// or ends inside. Splits are whole tiles, so that the end of a split is no edge.
template <int COLUMN_GROUPS>
inline void softmax_row(constant AttentionTensors& t, constant AttentionParams& p, thread SoftmaxRow& row,
                        threadgroup float* scores, threadgroup float* factor, int first_key, bool edge, Place at) {
  constexpr int kColumns = 8 / COLUMN_GROUPS;
  float x[kColumns];
  bool seen[kColumns];
  float largest = kLowest;
  ATTNSPAN_UNROLL
  for (int n = 0; n < kColumns; ++n) {
    const int column = kept_column<COLUMN_GROUPS>(at) + n * 4 * COLUMN_GROUPS;
    const int key = first_key + column;
    seen[n] = row.exists && (!edge || (key >= row.span.begin && key < row.span.end));
    x[n] = scores[column];
    if (seen[n]) {
      const Score score = make_score(t, p, row.score, key, x[n]);
      seen[n] = !score.masked;
      x[n] = score.value;
    }
    if (seen[n]) largest = max(largest, x[n]);
  }
  largest = row_max<COLUMN_GROUPS>(largest);
  const float before = row.m;
  const bool was_empty = row.l == 0.0f;  // then m says nothing, and may be kLowest
  row.m = was_empty ? largest : max(row.m, largest);
  const float rescale = was_empty ? 0.0f : precise::exp(before - row.m);
  float sum = 0.0f;
  ATTNSPAN_UNROLL
  for (int n = 0; n < kColumns; ++n) {
    const float probability = seen[n] ? precise::exp(x[n] - row.m) : 0.0f;
    scores[kept_column<COLUMN_GROUPS>(at) + n * 4 * COLUMN_GROUPS] = probability;
    sum += probability;
  }
  row.l = row.l * rescale + row_sum<COLUMN_GROUPS>(sum);
  if (kept_column<COLUMN_GROUPS>(at) == 0) factor[0] = rescale;
}

// What turns a state into an answer: out = scale * o. A sink is one more logit of the denominator.
struct Finished {
  float scale, lse;
};
inline Finished finish(constant AttentionTensors& t, int head, float m, float l) {
  if (HAS_SINKS && is_finite(t.sinks[head])) {
    const float sink = t.sinks[head];
    const float top = l == 0.0f ? sink : max(m, sink);
    const float weight = l == 0.0f ? 0.0f : precise::exp(m - top);
    const float total = l * weight + precise::exp(sink - top);
    return {weight / total, top + precise::log(total)};
  }
  if (l == 0.0f) return {0.0f, negative_infinity()};
  return {1.0f / l, m + precise::log(l)};
}
