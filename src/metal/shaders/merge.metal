// Joins partial states: those of the key splits of one call, and two results of merge_states. Both use
// lse = m + log(sum of l exp(m_i - m)), out = sum of o_i exp(m_i - m) over that sum.

#include "softmax.h"

// Rows of decode tiles, whose hull decided the splits.
constant int kSplitRows = 8;

// One simdgroup per packed row: the splits of attention_forward, the sink, and the rotation back.
kernel void attention_merge(constant AttentionTensors& t [[buffer(0)]],
                            constant AttentionParams& p [[buffer(1)]],
                            threadgroup uchar* shared [[threadgroup(0)]],
                            uint3 group [[threadgroup_position_in_grid]],
                            uint lane [[thread_index_in_simdgroup]],
                            uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  const int kv_head = group.y;
  const Sequence s = make_sequence(t, p, group.z);
  const int rows = s.seqlen_q * GROUP;
  const int packed_row = int(group.x) * ATTNSPAN_SIMDGROUPS + int(simdgroup);
  if (s.seqlen_q < p.least_rows || s.seqlen_q > p.most_rows || packed_row >= rows) return;
  const int tile_row = packed_row / kSplitRows * kSplitRows;
  const int last_row = min(tile_row + kSplitRows, rows) - 1;
  const int splits = split_range(hull_span(t, p, s, query_row(tile_row), query_row(last_row)), 0).count;

  float m = kLowest;
  const long first = partial_index(p, s, kv_head, packed_row, 0);
  const long step = partial_index(p, s, kv_head, packed_row, 1) - first;
  for (int i = 0; i < splits; ++i) {
    if (t.partial_state[2 * (first + i * step) + 1] != 0.0f) m = max(m, t.partial_state[2 * (first + i * step)]);
  }
  float l = 0.0f;
  for (int i = 0; i < splits; ++i) {
    const float part = t.partial_state[2 * (first + i * step) + 1];
    if (part != 0.0f) l += part * precise::exp(t.partial_state[2 * (first + i * step)] - m);
  }
  threadgroup float* row = (threadgroup float*)(shared) + int(simdgroup) * VALUE_WIDTH;
  for (int d = lane; d < VALUE_WIDTH; d += 32) {
    float sum = 0.0f;
    for (int i = 0; i < splits; ++i) {
      if (t.partial_state[2 * (first + i * step) + 1] == 0.0f) continue;
      sum += t.partial_out[(first + i * step) * VALUE_WIDTH + d] *
             precise::exp(t.partial_state[2 * (first + i * step)] - m);
    }
    row[d] = sum;
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
  if (VALUE_FORMAT == kTbq4) unrotate_row(row, VALUE_WIDTH, VALUE_BLOCK, lane);
  const Finished finished = finish(t, query_head(packed_row, kv_head), m, l);
  const long out = query_index(p.out, s, kv_head, packed_row);
  for (int d = lane; d < HEAD_DIM_V; d += 32) store_element(t.out, out + d, row[d] * finished.scale, t.nonfinite);
  if (HAS_LSE && lane == 0) t.lse[query_index(p.lse, s, kv_head, packed_row)] = finished.lse;
}
ATTNSPAN_KERNEL(attention_merge)

// One simdgroup per row of merge_states. A state given by its lse is (m = lse, l = 1), or empty where lse = -inf.
kernel void merge_states(constant MergeTensors& t [[buffer(0)]],
                         constant MergeParams& p [[buffer(1)]],
                         uint3 group [[threadgroup_position_in_grid]],
                         uint lane [[thread_index_in_simdgroup]],
                         uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  const int row = int(group.x) * ATTNSPAN_SIMDGROUPS + int(simdgroup);
  if (row >= p.rows) return;
  const int head = group.y;
  const int batch = group.z;
  const float lse_a = t.lse_a[index_of(p.lse_a, batch, head, row)];
  const float lse_b = t.lse_b[index_of(p.lse_b, batch, head, row)];
  const bool has_a = as_type<uint>(lse_a) != 0xff800000u;
  const bool has_b = as_type<uint>(lse_b) != 0xff800000u;
  const float top = has_a ? (has_b ? max(lse_a, lse_b) : lse_a) : lse_b;
  float weight_a = has_a ? precise::exp(lse_a - top) : 0.0f;
  float weight_b = has_b ? precise::exp(lse_b - top) : 0.0f;
  const float total = weight_a + weight_b;
  const float scale = total > 0.0f ? 1.0f / total : 0.0f;
  weight_a *= scale;
  weight_b *= scale;
  const long a = index_of(p.out_a, batch, head, row);
  const long b = index_of(p.out_b, batch, head, row);
  const long to = index_of(p.out, batch, head, row);
  for (int d = lane; d < p.head_dim_v; d += 32) {
    // A weight of 0 must not meet a stale value that is no number.
    float sum = 0.0f;
    if (weight_a != 0.0f) sum += weight_a * load_element(t.out_a, a + d);
    if (weight_b != 0.0f) sum += weight_b * load_element(t.out_b, b + d);
    if (DTYPE == kF32) ((device float*)(t.merged_out))[to + d] = sum;
    if (DTYPE == kF16) ((device half*)(t.merged_out))[to + d] = half(sum);
    if (DTYPE == kBf16) ((device bfloat*)(t.merged_out))[to + d] = bfloat(sum);
  }
  const bool empty = !has_a && !has_b;
  simdgroup_barrier(mem_flags::mem_device);  // lse may be lse_a or lse_b
  if (lane == 0) t.merged_lse[index_of(p.lse, batch, head, row)] = empty ? negative_infinity() : top + precise::log(total);
}
ATTNSPAN_KERNEL(merge_states)
