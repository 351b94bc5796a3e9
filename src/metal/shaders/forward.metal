// Tiled forward (prefill and decode) over dense tensors and KV caches, in the order of the equations:
// query tile; then per 32 keys: scores = query key^T, online softmax, o = factor o + probs value; out = o / l.
// Stationary rows are those of all query heads of one KV head, so that a key is read and decoded once for all.

#include "softmax.h"

// The query tile, in the stored domain of the keys: rotated in f32 where they are.
template <typename Tile, int ROWS>
inline void stage_query(constant AttentionTensors& t, constant AttentionParams& p, Sequence s, int kv_head,
                        int first_row, threadgroup Tile* query, int stride, Place at) {
  const int columns = whole_blocks(KEY_WIDTH);
  stage_rows(t.query, p.query, HEAD_DIM, s, kv_head, first_row, ROWS, 0, columns, query, stride, at);
  if (KEY_FORMAT != kTbq4) return;
  // Each lane signs what it has staged itself, so no barrier comes before; Tile is float here.
  for (int r = at.simdgroup; r < ROWS; r += ATTNSPAN_SIMDGROUPS) {
    rotate_row((threadgroup float*)(query) + r * stride, KEY_WIDTH, KEY_BLOCK, at.lane);
  }
}

// scores = query key^T of 32 keys, chunk by chunk of the head dim, into threadgroup memory.
template <typename Tile, int CHUNK, int COLUMN_GROUPS>
inline void score_tile(constant AttentionTensors& t, threadgroup const long* addresses,
                       threadgroup const Tile* query_rows, int query_stride, threadgroup Tile* streamed,
                       threadgroup float* score_rows, int score_stride, Place at) {
  constexpr int kStride = padded_row(CHUNK, sizeof(Tile));
  const int column_group = at.simdgroup % COLUMN_GROUPS;
  simdgroup_float8x8 scores[4 / COLUMN_GROUPS];
  ATTNSPAN_UNROLL
  for (int n = 0; n < 4 / COLUMN_GROUPS; ++n) scores[n] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  for (int first = 0; first < KEY_WIDTH; first += CHUNK) {
    const int columns = min(CHUNK, whole_blocks(KEY_WIDTH - first));
    threadgroup_barrier(mem_flags::mem_threadgroup);  // addresses are there, the last chunk is read
    stage_keys(t, addresses, first, columns, streamed, kStride, at);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    multiply_transposed<Tile, COLUMN_GROUPS>(scores, query_rows + first, query_stride,
                                             (threadgroup const Tile*)(streamed), kStride, columns, column_group);
  }
  store_scores<COLUMN_GROUPS>(scores, score_rows, score_stride, column_group);
}

// o = factor o + probs value. Result blocks of a row group lie interleaved over its column groups, so that every
// chunk of value columns has work for all of them.
template <typename Tile, int CHUNK, int COLUMN_GROUPS, int BLOCKS>
inline void value_tile(constant AttentionTensors& t, threadgroup const long* addresses,
                       threadgroup const float* prob_rows, int prob_stride, threadgroup const float* factors,
                       threadgroup Tile* streamed, thread simdgroup_float8x8* result, Place at) {
  constexpr int kStride = padded_row(CHUNK, sizeof(Tile));
  constexpr int kBlocksPerChunk = CHUNK / 8 / COLUMN_GROUPS;
  const float factor = factors[matrix_row(at.lane)];
  simdgroup_float8x8 probs[4];
  ATTNSPAN_UNROLL
  for (int k = 0; k < 4; ++k) simdgroup_load(probs[k], prob_rows + k * 8, prob_stride);
  ATTNSPAN_UNROLL
  for (int i = 0; i < BLOCKS; ++i) {
    const int first = i / kBlocksPerChunk * CHUNK;
    if (i % kBlocksPerChunk == 0 && first < VALUE_WIDTH) {
      threadgroup_barrier(mem_flags::mem_threadgroup);  // the last chunk is read
      stage_values(t, addresses, first, min(CHUNK, whole_blocks(VALUE_WIDTH - first)), streamed, kStride, at);
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    const int column = (i * COLUMN_GROUPS + at.simdgroup % COLUMN_GROUPS) * 8;
    if (column >= VALUE_WIDTH) continue;
    result[i].thread_elements()[0] *= factor;
    result[i].thread_elements()[1] *= factor;
    ATTNSPAN_UNROLL
    for (int k = 0; k < 4; ++k) {
      simdgroup_matrix<Tile, 8, 8> value;
      simdgroup_load(value, streamed + (k * 8 * kStride + column - first), kStride);
      simdgroup_multiply_accumulate(result[i], probs[k], value, result[i]);
    }
  }
}

// Rows of results to memory: finished ones as out, those of a split as partial states for attention_merge.
inline void store_rows(constant AttentionTensors& t, constant AttentionParams& p, Sequence s, int kv_head, int split,
                       int first_row, int row_count, threadgroup float* staged, int stride,
                       threadgroup const float* scales, Place at) {
  const int rows = s.seqlen_q * GROUP;
  for (int r = at.simdgroup; r < row_count; r += ATTNSPAN_SIMDGROUPS) {
    if (first_row + r >= rows) continue;
    threadgroup float* row = staged + r * stride;
    if (SPLIT) {
      const long partial = partial_index(p, s, kv_head, first_row + r, split);
      for (int d = at.lane; d < VALUE_WIDTH; d += 32) t.partial_out[partial * VALUE_WIDTH + d] = row[d];
      continue;
    }
    if (VALUE_FORMAT == kTbq4) unrotate_row(row, VALUE_WIDTH, VALUE_BLOCK, at.lane);
    const float scale = scales[r];
    const long out = query_index(p.out, s, kv_head, first_row + r);
    for (int d = at.lane; d < HEAD_DIM_V; d += 32) store_element(t.out, out + d, row[d] * scale, t.nonfinite);
  }
}

// What a row's state says besides o: lse and the scale of out, or (m, l) of a split.
inline void store_state(constant AttentionTensors& t, constant AttentionParams& p, Sequence s, int kv_head, int split,
                        int packed_row, SoftmaxRow row, threadgroup float* scale) {
  scale[0] = 0.0f;
  if (!row.exists) return;
  if (SPLIT) {
    const long partial = partial_index(p, s, kv_head, packed_row, split);
    t.partial_state[2 * partial] = row.m;
    t.partial_state[2 * partial + 1] = row.l;
    return;
  }
  const Finished finished = finish(t, query_head(packed_row, kv_head), row.m, row.l);
  scale[0] = finished.scale;
  if (HAS_LSE) t.lse[query_index(p.lse, s, kv_head, packed_row)] = finished.lse;
}

template <typename Tile, int MAX_DIM, int ROW_GROUPS, int COLUMN_GROUPS, int BLOCKS>
kernel void attention_forward(constant AttentionTensors& t [[buffer(0)]],
                              constant AttentionParams& p [[buffer(1)]],
                              threadgroup uchar* shared [[threadgroup(0)]],
                              uint3 group [[threadgroup_position_in_grid]],
                              uint thread_index [[thread_index_in_threadgroup]],
                              uint lane [[thread_index_in_simdgroup]],
                              uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  constexpr int kRows = 8 * ROW_GROUPS;
  constexpr int kChunk = chunk_columns(MAX_DIM, sizeof(Tile));
  constexpr int kQueryStride = padded_row(MAX_DIM, sizeof(Tile));
  constexpr int kScoreStride = padded_row(ATTNSPAN_STREAMED_ROWS, 4);
  constexpr int kResultStride = padded_row(MAX_DIM, 4);
  constexpr ForwardLayout layout = forward_layout(MAX_DIM, kRows, sizeof(Tile));
  const Place at = {int(thread_index), int(lane), int(simdgroup)};
  const int kv_head = group.y;
  const int split = int(group.z) % p.splits;
  const Sequence s = make_sequence(t, p, int(group.z) / p.splits);
  const int first_row = int(group.x) * kRows;
  if (s.seqlen_q < p.least_rows || s.seqlen_q > p.most_rows || first_row >= s.seqlen_q * GROUP) return;
  const int last_row = min(first_row + kRows, s.seqlen_q * GROUP) - 1;
  const SplitRange range = split_range(hull_span(t, p, s, query_row(first_row), query_row(last_row)), split);
  if (split >= range.count) return;
  const KeySpan core = core_span(t, p, s, query_row(first_row), query_row(last_row));

  threadgroup Tile* query = (threadgroup Tile*)(shared);
  threadgroup Tile* streamed = (threadgroup Tile*)(shared + layout.streamed);
  threadgroup float* scores = (threadgroup float*)(shared + layout.scores);
  threadgroup float* factors = (threadgroup float*)(shared + layout.factors);
  threadgroup long* addresses = (threadgroup long*)(shared + layout.addresses);
  const int group_row = at.simdgroup / COLUMN_GROUPS * 8;
  const int my_row = kept_row<COLUMN_GROUPS>(at);
  SoftmaxRow row = make_softmax_row(t, p, s, kv_head, first_row + my_row);
  simdgroup_float8x8 result[BLOCKS];
  ATTNSPAN_UNROLL
  for (int i = 0; i < BLOCKS; ++i) result[i] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);

  stage_query<Tile, kRows>(t, p, s, kv_head, first_row, query, kQueryStride, at);
  for (int key = range.begin; key < range.end; key += ATTNSPAN_STREAMED_ROWS) {
    const bool edge = key < core.begin || key + ATTNSPAN_STREAMED_ROWS > core.end;
    // The last barrier of value_tile came after the last reading of addresses, scores and factors.
    locate_keys(t, p, s, kv_head, key, range.end, addresses, at);
    score_tile<Tile, kChunk, COLUMN_GROUPS>(t, addresses, query + group_row * kQueryStride, kQueryStride, streamed,
                                            scores + group_row * kScoreStride, kScoreStride, at);
    row_group_barrier<COLUMN_GROUPS>();
    softmax_row<COLUMN_GROUPS>(t, p, row, scores + my_row * kScoreStride, factors + my_row, key, edge, at);
    row_group_barrier<COLUMN_GROUPS>();
    value_tile<Tile, kChunk, COLUMN_GROUPS, BLOCKS>(t, addresses, scores + group_row * kScoreStride, kScoreStride,
                                                    factors + group_row, streamed, result, at);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);  // everything is read: its memory now takes the finished rows
  stage_result<COLUMN_GROUPS, BLOCKS>(result, VALUE_WIDTH, (threadgroup float*)(shared), kResultStride, at);
  if (kept_column<COLUMN_GROUPS>(at) == 0) {
    store_state(t, p, s, kv_head, split, first_row + my_row, row, factors + my_row);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  store_rows(t, p, s, kv_head, split, first_row, kRows, (threadgroup float*)(shared), kResultStride, factors, at);
}

#define ATTNSPAN_FORWARD(NAME, MAX_DIM, ROW_GROUPS, COLUMN_GROUPS, BLOCKS)                                  \
  ATTNSPAN_INSTANTIATE("attention_forward_" #NAME "_f32",                                                   \
                       attention_forward<float, MAX_DIM, ROW_GROUPS, COLUMN_GROUPS, BLOCKS>)                \
  ATTNSPAN_INSTANTIATE("attention_forward_" #NAME "_f16",                                                   \
                       attention_forward<half, MAX_DIM, ROW_GROUPS, COLUMN_GROUPS, BLOCKS>)                 \
  ATTNSPAN_INSTANTIATE("attention_forward_" #NAME "_bf16",                                                  \
                       attention_forward<bfloat, MAX_DIM, ROW_GROUPS, COLUMN_GROUPS, BLOCKS>)
ATTNSPAN_TILES(ATTNSPAN_FORWARD)
