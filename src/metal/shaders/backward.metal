// Backward without N x N memory and without atomics: delta once per row, then dq by query tile and dk, dv by key
// tile, each owning its result, so that every sum has one order. Products are recomputed in both: 7 instead of 5
// matrix products are the price of needing no other workgroup's result.

#include "backward.h"

// delta = rowsum(dout * out) - dlse, one simdgroup per row.
kernel void attention_delta(constant AttentionTensors& t [[buffer(0)]],
                            constant AttentionParams& p [[buffer(1)]],
                            uint3 group [[threadgroup_position_in_grid]],
                            uint lane [[thread_index_in_simdgroup]],
                            uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  const Sequence s = make_sequence(t, p, group.z);
  const int head = group.y;
  const int row = int(group.x) * ATTNSPAN_SIMDGROUPS + int(simdgroup);
  if (row >= s.seqlen_q) return;
  const int i = s.q_row0 + row;
  const long out = index_of(p.out, s.batch, head, i);
  const long dout = index_of(p.dout, s.batch, head, i);
  float sum = 0.0f;
  for (int d = lane; d < HEAD_DIM_V; d += 32) {
    sum += load_element(t.dout, dout + d) * load_element((device const uchar*)(t.out), out + d);
  }
  sum = simd_sum(sum);
  if (HAS_DLSE) sum -= t.dlse[index_of(p.dlse, s.batch, head, i)];
  if (lane == 0) t.delta[index_of(p.delta, s.batch, head, i)] = sum;
}
ATTNSPAN_KERNEL(attention_delta)

// d_sinks[head] = -sum over rows of exp(sink - lse) delta, one threadgroup per head.
kernel void attention_d_sinks(constant AttentionTensors& t [[buffer(0)]],
                              constant AttentionParams& p [[buffer(1)]],
                              threadgroup float* shared [[threadgroup(0)]],
                              uint3 group [[threadgroup_position_in_grid]],
                              uint thread_index [[thread_index_in_threadgroup]],
                              uint lane [[thread_index_in_simdgroup]],
                              uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  const int head = group.x;
  const float sink = t.sinks[head];
  float sum = 0.0f;
  for (int batch = 0; batch < p.batch && is_finite(sink); ++batch) {
    const Sequence s = make_sequence(t, p, batch);
    for (int row = thread_index; row < s.seqlen_q; row += ATTNSPAN_THREADS) {
      const int i = s.q_row0 + row;
      sum -= precise::exp(sink - t.lse[index_of(p.lse, batch, head, i)]) * t.delta[index_of(p.delta, batch, head, i)];
    }
  }
  sum = simd_sum(sum);
  if (lane == 0) shared[simdgroup] = sum;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (thread_index != 0) return;
  float total = 0.0f;
  for (int i = 0; i < ATTNSPAN_SIMDGROUPS; ++i) total += shared[i];
  if (NAN_GUARD && !is_finite(total)) {
    total = 0.0f;
    atomic_fetch_add_explicit(t.nonfinite, 1u, memory_order_relaxed);
  }
  t.d_sinks[head] = total;
}
ATTNSPAN_KERNEL(attention_d_sinks)

// One query tile: dq = sum over key tiles of ds key.
template <typename Tile, int MAX_DIM, int ROW_GROUPS, int COLUMN_GROUPS, int BLOCKS>
kernel void attention_dq(constant AttentionTensors& t [[buffer(0)]],
                         constant AttentionParams& p [[buffer(1)]],
                         threadgroup uchar* shared [[threadgroup(0)]],
                         uint3 group [[threadgroup_position_in_grid]],
                         uint thread_index [[thread_index_in_threadgroup]],
                         uint lane [[thread_index_in_simdgroup]],
                         uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  constexpr int kRows = 8 * ROW_GROUPS;
  constexpr int kChunk = chunk_columns(MAX_DIM, sizeof(Tile));
  constexpr int kScoreStride = padded_row(ATTNSPAN_STREAMED_ROWS, 4);
  constexpr int kResultStride = padded_row(MAX_DIM, 4);
  constexpr BackwardLayout layout = backward_layout(MAX_DIM, kRows, sizeof(Tile));
  const Place at = {int(thread_index), int(lane), int(simdgroup)};
  const int kv_head = group.y;
  const Sequence s = make_sequence(t, p, group.z);
  const int first_row = int(group.x) * kRows;
  const int rows = s.seqlen_q * GROUP;
  if (first_row >= rows) return;
  const KeySpan hull = hull_span(t, p, s, query_row(first_row), query_row(min(first_row + kRows, rows) - 1));

  threadgroup Tile* stationary = (threadgroup Tile*)(shared);
  threadgroup Tile* streamed = (threadgroup Tile*)(shared + layout.streamed);
  threadgroup float* scores = (threadgroup float*)(shared + layout.scores);
  threadgroup float* dscores = (threadgroup float*)(shared + layout.dscores);
  const int group_row = at.simdgroup / COLUMN_GROUPS * 8 * kScoreStride;
  const int my_row = kept_row<COLUMN_GROUPS>(at);
  const GradientRow row = make_gradient_row(t, p, s, kv_head, first_row + my_row);
  const PackedRows query = {t.query, p.query, s, kv_head, first_row, HEAD_DIM};
  const PackedRows dout = {t.dout, p.dout, s, kv_head, first_row, HEAD_DIM_V};
  simdgroup_float8x8 dq[BLOCKS];
  ATTNSPAN_UNROLL
  for (int i = 0; i < BLOCKS; ++i) dq[i] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);

  for (int key = hull.begin; key < hull.end; key += ATTNSPAN_STREAMED_ROWS) {
    KeyRows keys = key_rows(t.key_codes, p.key, HEAD_DIM, s, kv_head, key);
    KeyRows values = key_rows(t.value_codes, p.value, HEAD_DIM_V, s, kv_head, key);
    keys.count = min(keys.count, hull.end - key);
    values.count = keys.count;
    product_tile<Tile, kChunk, ROW_GROUPS, COLUMN_GROUPS>(query, keys, stationary, streamed, scores + group_row,
                                                          kScoreStride, at);
    product_tile<Tile, kChunk, ROW_GROUPS, COLUMN_GROUPS>(dout, values, stationary, streamed, dscores + group_row,
                                                          kScoreStride, at);
    row_group_barrier<COLUMN_GROUPS>();
    for (int column = kept_column<COLUMN_GROUPS>(at); column < ATTNSPAN_STREAMED_ROWS; column += 4 * COLUMN_GROUPS) {
      const int place = my_row * kScoreStride + column;
      dscores[place] = make_gradient(t, p, row, key + column, scores[place], dscores[place]).dscore;
    }
    row_group_barrier<COLUMN_GROUPS>();
    gradient_tile<Tile, kChunk, COLUMN_GROUPS, BLOCKS>((threadgroup const float*)(dscores + group_row), kScoreStride,
                                                       keys, streamed, dq, at);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);  // everything is read: its memory now takes the finished rows
  threadgroup float* staged = (threadgroup float*)(shared);
  stage_result<COLUMN_GROUPS, BLOCKS>(dq, HEAD_DIM, staged, kResultStride, at);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int r = at.simdgroup; r < min(kRows, rows - first_row); r += ATTNSPAN_SIMDGROUPS) {
    const long to = query_index(p.dq, s, kv_head, first_row + r);
    for (int d = at.lane; d < HEAD_DIM; d += 32) {
      store_element(t.dq, to + d, staged[r * kResultStride + d], t.nonfinite);
    }
  }
}

// lse, delta and span of the streamed query rows, for the lanes that keep keys: 32 floats or ints each.
struct RowStatistics {
  threadgroup float* lse;
  threadgroup float* delta;
  threadgroup int* begin;
  threadgroup int* end;
};
inline RowStatistics row_statistics(threadgroup float* shared) {
  RowStatistics statistics;
  statistics.lse = shared;
  statistics.delta = shared + ATTNSPAN_STREAMED_ROWS;
  statistics.begin = (threadgroup int*)(shared + 2 * ATTNSPAN_STREAMED_ROWS);
  statistics.end = (threadgroup int*)(shared + 3 * ATTNSPAN_STREAMED_ROWS);
  return statistics;
}

inline void stage_statistics(constant AttentionTensors& t, constant AttentionParams& p, Sequence s, int kv_head,
                             int first_row, RowStatistics to, Place at) {
  if (at.index >= ATTNSPAN_STREAMED_ROWS) return;
  const GradientRow row = make_gradient_row(t, p, s, kv_head, first_row + at.index);
  to.lse[at.index] = row.lse;
  to.delta[at.index] = row.delta;
  to.begin[at.index] = row.span.begin;
  to.end[at.index] = row.span.end;
}

// p and ds of one key against the 32 streamed rows, in place of qk and dp.
template <int COLUMN_GROUPS>
inline void key_gradients(constant AttentionTensors& t, constant AttentionParams& p, Sequence s, int kv_head, int key,
                          int first_row, RowStatistics statistics, threadgroup float* scores,
                          threadgroup float* dscores, Place at) {
  for (int column = kept_column<COLUMN_GROUPS>(at); column < ATTNSPAN_STREAMED_ROWS; column += 4 * COLUMN_GROUPS) {
    const int packed_row = first_row + column;
    GradientRow row;
    row.exists = packed_row < s.seqlen_q * GROUP;
    row.span = {statistics.begin[column], statistics.end[column]};
    row.lse = statistics.lse[column];
    row.delta = statistics.delta[column];
    row.score = {0, 0, 0.0f};
    if (row.exists) row.score = make_score_row(t, p, s, query_head(packed_row, kv_head), query_row(packed_row));
    const Gradient gradient = make_gradient(t, p, row, key, scores[column], dscores[column]);
    scores[column] = gradient.probability;
    dscores[column] = gradient.dscore;
  }
}

// The finished rows of dk or dv of one key tile.
template <int ROWS, int COLUMN_GROUPS, int BLOCKS>
inline void store_key_gradient(thread const simdgroup_float8x8* result, device uchar* tensor, RowStrides strides,
                               int width, Sequence s, int kv_head, int first_key, int count,
                               device atomic_uint* nonfinite, threadgroup float* staged, int stride, Place at) {
  threadgroup_barrier(mem_flags::mem_threadgroup);  // what this memory held is read
  stage_result<COLUMN_GROUPS, BLOCKS>(result, width, staged, stride, at);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int r = at.simdgroup; r < min(ROWS, count); r += ATTNSPAN_SIMDGROUPS) {
    const long to = index_of(strides, s.batch, kv_head, s.k_row0 + first_key + r);
    for (int d = at.lane; d < width; d += 32) store_element(tensor, to + d, staged[r * stride + d], nonfinite);
  }
}

// One key tile: dv = sum over rows of p^T dout, dk = sum of ds^T query, over all query heads of the KV head.
template <typename Tile, int MAX_DIM, int ROW_GROUPS, int COLUMN_GROUPS, int BLOCKS>
kernel void attention_dkv(constant AttentionTensors& t [[buffer(0)]],
                          constant AttentionParams& p [[buffer(1)]],
                          threadgroup uchar* shared [[threadgroup(0)]],
                          uint3 group [[threadgroup_position_in_grid]],
                          uint thread_index [[thread_index_in_threadgroup]],
                          uint lane [[thread_index_in_simdgroup]],
                          uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  constexpr int kKeys = 8 * ROW_GROUPS;
  constexpr int kChunk = chunk_columns(MAX_DIM, sizeof(Tile));
  constexpr int kScoreStride = padded_row(ATTNSPAN_STREAMED_ROWS, 4);
  constexpr int kResultStride = padded_row(MAX_DIM, 4);
  constexpr BackwardLayout layout = backward_layout(MAX_DIM, kKeys, sizeof(Tile));
  const Place at = {int(thread_index), int(lane), int(simdgroup)};
  const int kv_head = group.y;
  const Sequence s = make_sequence(t, p, group.z);
  const int first_key = int(group.x) * kKeys;
  const int key_count = (PACKED ? s.seqlen_k : p.seqlen_k) - first_key;  // rows beyond seqused_k get zeros
  if (key_count <= 0) return;
  const int rows = s.seqlen_q * GROUP;

  threadgroup Tile* stationary = (threadgroup Tile*)(shared);
  threadgroup Tile* streamed = (threadgroup Tile*)(shared + layout.streamed);
  threadgroup float* scores = (threadgroup float*)(shared + layout.scores);
  threadgroup float* dscores = (threadgroup float*)(shared + layout.dscores);
  const RowStatistics statistics = row_statistics((threadgroup float*)(shared + layout.statistics));
  const int group_row = at.simdgroup / COLUMN_GROUPS * 8 * kScoreStride;
  const int my_key = kept_row<COLUMN_GROUPS>(at);
  const KeyRows keys = key_rows(t.key_codes, p.key, HEAD_DIM, s, kv_head, first_key);
  const KeyRows values = key_rows(t.value_codes, p.value, HEAD_DIM_V, s, kv_head, first_key);
  simdgroup_float8x8 dk[BLOCKS];
  simdgroup_float8x8 dv[BLOCKS];
  ATTNSPAN_UNROLL
  for (int i = 0; i < BLOCKS; ++i) {
    dk[i] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    dv[i] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  }

  for (int first_row = 0; first_row < rows; first_row += ATTNSPAN_STREAMED_ROWS) {
    const int last_row = min(first_row + ATTNSPAN_STREAMED_ROWS, rows) - 1;
    const KeySpan hull = hull_span(t, p, s, query_row(first_row), query_row(last_row));
    if (hull.begin >= hull.end || hull.end <= first_key || hull.begin >= first_key + kKeys) continue;
    const PackedRows query = {t.query, p.query, s, kv_head, first_row, HEAD_DIM};
    const PackedRows dout = {t.dout, p.dout, s, kv_head, first_row, HEAD_DIM_V};
    // The barriers of gradient_tile came after the statistics of the last rows were read.
    stage_statistics(t, p, s, kv_head, first_row, statistics, at);
    product_tile<Tile, kChunk, ROW_GROUPS, COLUMN_GROUPS>(keys, query, stationary, streamed, scores + group_row,
                                                          kScoreStride, at);
    product_tile<Tile, kChunk, ROW_GROUPS, COLUMN_GROUPS>(values, dout, stationary, streamed, dscores + group_row,
                                                          kScoreStride, at);
    row_group_barrier<COLUMN_GROUPS>();
    key_gradients<COLUMN_GROUPS>(t, p, s, kv_head, first_key + my_key, first_row, statistics,
                                 scores + my_key * kScoreStride, dscores + my_key * kScoreStride, at);
    row_group_barrier<COLUMN_GROUPS>();
    gradient_tile<Tile, kChunk, COLUMN_GROUPS, BLOCKS>((threadgroup const float*)(scores + group_row), kScoreStride,
                                                       dout, streamed, dv, at);
    gradient_tile<Tile, kChunk, COLUMN_GROUPS, BLOCKS>((threadgroup const float*)(dscores + group_row), kScoreStride,
                                                       query, streamed, dk, at);
  }
  threadgroup float* staged = (threadgroup float*)(shared);
  store_key_gradient<kKeys, COLUMN_GROUPS, BLOCKS>(dk, t.dk, p.dk, HEAD_DIM, s, kv_head, first_key, key_count,
                                                   t.nonfinite, staged, kResultStride, at);
  store_key_gradient<kKeys, COLUMN_GROUPS, BLOCKS>(dv, t.dv, p.dv, HEAD_DIM_V, s, kv_head, first_key, key_count,
                                                   t.nonfinite, staged, kResultStride, at);
}

#define ATTNSPAN_BACKWARD(NAME, MAX_DIM, ROW_GROUPS, COLUMN_GROUPS, BLOCKS)                                   \
  ATTNSPAN_INSTANTIATE("attention_dq_" #NAME "_f32", attention_dq<float, MAX_DIM, ROW_GROUPS, COLUMN_GROUPS, BLOCKS>) \
  ATTNSPAN_INSTANTIATE("attention_dq_" #NAME "_f16", attention_dq<half, MAX_DIM, ROW_GROUPS, COLUMN_GROUPS, BLOCKS>)  \
  ATTNSPAN_INSTANTIATE("attention_dq_" #NAME "_bf16",                                                         \
                       attention_dq<bfloat, MAX_DIM, ROW_GROUPS, COLUMN_GROUPS, BLOCKS>)                      \
  ATTNSPAN_INSTANTIATE("attention_dkv_" #NAME "_f32",                                                         \
                       attention_dkv<float, MAX_DIM, ROW_GROUPS, COLUMN_GROUPS, BLOCKS>)                      \
  ATTNSPAN_INSTANTIATE("attention_dkv_" #NAME "_f16",                                                         \
                       attention_dkv<half, MAX_DIM, ROW_GROUPS, COLUMN_GROUPS, BLOCKS>)                       \
  ATTNSPAN_INSTANTIATE("attention_dkv_" #NAME "_bf16",                                                        \
                       attention_dkv<bfloat, MAX_DIM, ROW_GROUPS, COLUMN_GROUPS, BLOCKS>)
ATTNSPAN_ROW_TILES(ATTNSPAN_BACKWARD)
