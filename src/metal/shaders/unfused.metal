// Attention with its probabilities kept, N x N in f32: the path that returns probs, and an oracle on the device
// itself. Plain loops, no simdgroup matrices, no online softmax: it shares only spans, scores and formats with the
// tiled kernels. Forward and backward walk query rows; dk and dv walk KV rows; no atomics.

#include "softmax.h"

// One threadgroup per row: places in its threadgroup memory, in floats.
enum UnfusedLayout { kRowA = 0, kRowB = 576, kReduced = 1152, kUnfusedFloats = 1160 };

inline float sum_over_threads(float value, threadgroup float* reduced, Place at) {
  value = simd_sum(value);
  threadgroup_barrier(mem_flags::mem_threadgroup);  // the last reduction is read
  if (at.lane == 0) reduced[at.simdgroup] = value;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float sum = 0.0f;
  for (int i = 0; i < ATTNSPAN_SIMDGROUPS; ++i) sum += reduced[i];
  return sum;
}
// The first reduction of its kernel: nothing else is still being read.
inline float max_over_threads(float value, threadgroup float* reduced, Place at) {
  value = simd_max(value);
  if (at.lane == 0) reduced[at.simdgroup] = value;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float largest = reduced[0];
  for (int i = 1; i < ATTNSPAN_SIMDGROUPS; ++i) largest = max(largest, reduced[i]);
  return largest;
}

// Offsets of one key: codes of key and value in bytes, scales in elements.
struct KeyAddress {
  long key, key_scale, value, value_scale;
};
inline KeyAddress locate_key(constant AttentionTensors& t, constant AttentionParams& p, Sequence s, int kv_head,
                             int key) {
  long page = s.batch;
  int token = s.k_row0 + key - s.key_begin;
  if (HAS_BLOCK_TABLE) {
    page = t.block_table[s.batch * p.block_table_batch + token / p.page_size * p.block_table_page];
    token = token % p.page_size;
  }
  KeyAddress a;
  a.key = page * p.key.page + kv_head * p.key.head + token * p.key.token;
  a.key_scale = page * p.key.scale_page + kv_head * p.key.scale_head + token * p.key.scale_token;
  a.value = page * p.value.page + kv_head * p.value.head + token * p.value.token;
  a.value_scale = page * p.value.scale_page + kv_head * p.value.scale_head + token * p.value.scale_token;
  return a;
}

// row . key, by one simdgroup; every lane gets the sum.
inline float dot_key(constant AttentionTensors& t, KeyAddress a, threadgroup const float* row, int lane) {
  float sum = 0.0f;
  for (int d = lane; d < KEY_WIDTH; d += 32) {
    sum += row[d] * decode(KEY_FORMAT, KEY_BLOCK, t.key_codes + a.key, t.key_scales + a.key_scale, d);
  }
  return simd_sum(sum);
}
inline float dot_value(constant AttentionTensors& t, KeyAddress a, threadgroup const float* row, int lane) {
  float sum = 0.0f;
  for (int d = lane; d < VALUE_WIDTH; d += 32) {
    sum += row[d] * decode(VALUE_FORMAT, VALUE_BLOCK, t.value_codes + a.value, t.value_scales + a.value_scale, d);
  }
  return simd_sum(sum);
}

// A row of query or dout as f32, `width` values wide.
inline void stage_row(device const uchar* tensor, long from, int dim, int width, threadgroup float* to, Place at) {
  for (int d = at.index; d < width; d += ATTNSPAN_THREADS) to[d] = d < dim ? load_element(tensor, from + d) : 0.0f;
}

inline long probs_index(constant AttentionParams& p, int batch, int head, int row) {
  return batch * p.probs_batch + head * p.probs_head + row * p.probs_row;
}

inline bool is_masked(float score) { return as_type<uint>(score) == 0xff800000u; }

// Logits of one row into probs; -inf, a bit pattern that is never computed with, where a bias masks.
inline void score_keys(constant AttentionTensors& t, constant AttentionParams& p, Sequence s, int head, int row,
                       KeySpan span, threadgroup const float* query, Place at) {
  const ScoreRow score_row = make_score_row(t, p, s, head, row);
  const long probs = probs_index(p, s.batch, head, row);
  for (int key = span.begin + at.simdgroup; key < span.end; key += ATTNSPAN_SIMDGROUPS) {
    const float qk = dot_key(t, locate_key(t, p, s, head / GROUP, key), query, at.lane);
    const Score score = make_score(t, p, score_row, key, qk);
    if (at.lane == 0) t.probs[probs + key * p.probs_key] = score.masked ? negative_infinity() : score.value;
  }
}

// Logits -> exp(logit - base) * scale, zeros outside the span.
inline void exponentiate(constant AttentionTensors& t, constant AttentionParams& p, KeySpan span, long probs,
                         float base, float scale, Place at) {
  for (int key = at.index; key < p.seqlen_k; key += ATTNSPAN_THREADS) {
    float probability = 0.0f;
    if (key >= span.begin && key < span.end) {
      const float score = t.probs[probs + key * p.probs_key];
      if (!is_masked(score)) probability = precise::exp(score - base) * scale;
    }
    t.probs[probs + key * p.probs_key] = probability;
  }
}

// out[d] = sum of p value[d]: a thread per d, over the keys in order.
inline void sum_values(constant AttentionTensors& t, constant AttentionParams& p, Sequence s, int head, KeySpan span,
                       long probs, threadgroup float* row, Place at) {
  for (int d = at.index; d < VALUE_WIDTH; d += ATTNSPAN_THREADS) {
    float sum = 0.0f;
    for (int key = span.begin; key < span.end; ++key) {
      const float probability = t.probs[probs + key * p.probs_key];
      if (probability == 0.0f) continue;
      const KeyAddress a = locate_key(t, p, s, head / GROUP, key);
      sum += probability *
             decode(VALUE_FORMAT, VALUE_BLOCK, t.value_codes + a.value, t.value_scales + a.value_scale, d);
    }
    row[d] = sum;
  }
}

// (m, l) of the logits in probs.
struct RowState {
  float m, l;
};
inline RowState reduce_logits(constant AttentionTensors& t, constant AttentionParams& p, KeySpan span, long probs,
                              threadgroup float* reduced, Place at) {
  float largest = kLowest;
  float count = 0.0f;
  for (int key = span.begin + at.index; key < span.end; key += ATTNSPAN_THREADS) {
    const float score = t.probs[probs + key * p.probs_key];
    if (is_masked(score)) continue;
    largest = max(largest, score);
    count += 1.0f;
  }
  RowState state;
  state.m = max_over_threads(largest, reduced, at);
  const bool empty = sum_over_threads(count, reduced, at) == 0.0f;
  float sum = 0.0f;
  for (int key = span.begin + at.index; key < span.end && !empty; key += ATTNSPAN_THREADS) {
    const float score = t.probs[probs + key * p.probs_key];
    if (!is_masked(score)) sum += precise::exp(score - state.m);
  }
  state.l = sum_over_threads(sum, reduced, at);
  return state;
}

kernel void unfused_probs(constant AttentionTensors& t [[buffer(0)]],
                          constant AttentionParams& p [[buffer(1)]],
                          threadgroup float* shared [[threadgroup(0)]],
                          uint3 group [[threadgroup_position_in_grid]],
                          uint thread_index [[thread_index_in_threadgroup]],
                          uint lane [[thread_index_in_simdgroup]],
                          uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  const Place at = {int(thread_index), int(lane), int(simdgroup)};
  const int row = group.x;
  const int head = group.y;
  const Sequence s = make_sequence(t, p, group.z);
  const KeySpan span = row_span(t, p, s, row);
  const long probs = probs_index(p, s.batch, head, row);
  threadgroup float* query = shared + int(kRowA);
  threadgroup float* out = shared + int(kRowB);
  stage_row(t.query, index_of(p.query, s.batch, head, row), HEAD_DIM, KEY_WIDTH, query, at);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (KEY_FORMAT == kTbq4 && at.simdgroup == 0) rotate_row(query, KEY_WIDTH, KEY_BLOCK, at.lane);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  score_keys(t, p, s, head, row, span, query, at);
  threadgroup_barrier(mem_flags::mem_device);
  if (!WRITE_OUT) {
    const float lse = t.lse[index_of(p.lse, s.batch, head, row)];
    exponentiate(t, p, span, probs, is_masked(lse) ? 0.0f : lse, is_masked(lse) ? 0.0f : 1.0f, at);
    return;
  }
  const RowState state = reduce_logits(t, p, span, probs, shared + int(kReduced), at);
  const Finished finished = finish(t, head, state.m, state.l);
  // All logits are read: each went into the sums, at whose barriers every thread has been.
  exponentiate(t, p, span, probs, state.l == 0.0f ? 0.0f : state.m, finished.scale, at);
  threadgroup_barrier(mem_flags::mem_device);
  sum_values(t, p, s, head, span, probs, out, at);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (VALUE_FORMAT == kTbq4 && at.simdgroup == 0) unrotate_row(out, VALUE_WIDTH, VALUE_BLOCK, at.lane);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const long to = index_of(p.out, s.batch, head, row);
  for (int d = at.index; d < HEAD_DIM_V; d += ATTNSPAN_THREADS) store_element(t.out, to + d, out[d], t.nonfinite);
  if (HAS_LSE && at.index == 0) t.lse[index_of(p.lse, s.batch, head, row)] = finished.lse;
}
ATTNSPAN_KERNEL(unfused_probs)

// ds = p (dout . value - delta) d s / d qk of one row, kept for unfused_dkv, and dq = sum of ds key.
kernel void unfused_dq(constant AttentionTensors& t [[buffer(0)]],
                       constant AttentionParams& p [[buffer(1)]],
                       threadgroup float* shared [[threadgroup(0)]],
                       uint3 group [[threadgroup_position_in_grid]],
                       uint thread_index [[thread_index_in_threadgroup]],
                       uint lane [[thread_index_in_simdgroup]],
                       uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  const Place at = {int(thread_index), int(lane), int(simdgroup)};
  const int row = group.x;
  const int head = group.y;
  const Sequence s = make_sequence(t, p, group.z);
  const KeySpan span = row_span(t, p, s, row);
  const long probs = probs_index(p, s.batch, head, row);
  const float delta = t.delta[index_of(p.delta, s.batch, head, row)];
  threadgroup float* query = shared + int(kRowA);
  threadgroup float* dout = shared + int(kRowB);
  stage_row(t.query, index_of(p.query, s.batch, head, row), HEAD_DIM, KEY_WIDTH, query, at);
  stage_row(t.dout, index_of(p.dout, s.batch, head, row), HEAD_DIM_V, VALUE_WIDTH, dout, at);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const ScoreRow score_row = make_score_row(t, p, s, head, row);
  for (int key = span.begin + at.simdgroup; key < span.end; key += ATTNSPAN_SIMDGROUPS) {
    const KeyAddress a = locate_key(t, p, s, head / GROUP, key);
    const float dp = dot_value(t, a, dout, at.lane);
    float derivative = 1.0f;
    if (HAS_SOFTCAP) derivative = make_score(t, p, score_row, key, dot_key(t, a, query, at.lane)).derivative;
    const float probability = t.probs[probs + key * p.probs_key];
    if (at.lane == 0) {
      t.dscores[probs + key * p.probs_key] = probability * (dp - delta) * derivative * p.softmax_scale;
    }
  }
  threadgroup_barrier(mem_flags::mem_device);
  const long to = index_of(p.dq, s.batch, head, row);
  for (int d = at.index; d < HEAD_DIM; d += ATTNSPAN_THREADS) {
    float sum = 0.0f;
    for (int key = span.begin; key < span.end; ++key) {
      const KeyAddress a = locate_key(t, p, s, head / GROUP, key);
      sum += t.dscores[probs + key * p.probs_key] *
             decode(KEY_FORMAT, KEY_BLOCK, t.key_codes + a.key, t.key_scales + a.key_scale, d);
    }
    store_element(t.dq, to + d, sum, t.nonfinite);
  }
}
ATTNSPAN_KERNEL(unfused_dq)

// One KV row: dk = sum of ds query, dv = sum of p dout over all rows of all query heads that look at it.
kernel void unfused_dkv(constant AttentionTensors& t [[buffer(0)]],
                        constant AttentionParams& p [[buffer(1)]],
                        uint3 group [[threadgroup_position_in_grid]],
                        uint thread_index [[thread_index_in_threadgroup]]) {
  const int key = group.x;
  const int kv_head = group.y;
  const Sequence s = make_sequence(t, p, group.z);
  const long dk = index_of(p.dk, s.batch, kv_head, key);
  const long dv = index_of(p.dv, s.batch, kv_head, key);
  for (int d = thread_index; d < max(HEAD_DIM, HEAD_DIM_V); d += ATTNSPAN_THREADS) {
    float sum_k = 0.0f;
    float sum_v = 0.0f;
    for (int packed_row = 0; packed_row < s.seqlen_q * GROUP; ++packed_row) {
      const int row = query_row(packed_row);
      const int head = query_head(packed_row, kv_head);
      const KeySpan span = row_span(t, p, s, row);
      if (key < span.begin || key >= span.end) continue;
      const long probs = probs_index(p, s.batch, head, row) + key * p.probs_key;
      if (d < HEAD_DIM) {
        sum_k += t.dscores[probs] * load_element(t.query, index_of(p.query, s.batch, head, row) + d);
      }
      if (d < HEAD_DIM_V) sum_v += t.probs[probs] * load_element(t.dout, index_of(p.dout, s.batch, head, row) + d);
    }
    if (d < HEAD_DIM) store_element(t.dk, dk + d, sum_k, t.nonfinite);
    if (d < HEAD_DIM_V) store_element(t.dv, dv + d, sum_v, t.nonfinite);
  }
}
ATTNSPAN_KERNEL(unfused_dkv)
