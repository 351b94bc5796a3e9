#pragma once
// What host and shaders agree on: parameters, the tensors of an argument buffer, function constants. Compiles
// as Metal's language and as C++.

#ifdef __METAL_VERSION__
#include <metal_stdlib>
#else
#include <cstdint>
#endif

namespace attnspan_metal {

// Strides in elements over (batch, head, row); the last dimension is contiguous.
struct RowStrides {
  int64_t batch, head, row;
};

// Row `token` of head `head` in page `page`: codes in bytes, scales in f16 elements. A dense tensor is one page
// per sequence, a packed one a single page.
struct KvStrides {
  int64_t page, head, token;
  int64_t scale_page, scale_head, scale_token;
};

struct AttentionParams {
  RowStrides query, out, lse, dlse, delta, dout, dq, dk, dv;
  KvStrides key, value;
  int64_t bias_batch, bias_head, bias_row, bias_key;
  int64_t probs_batch, probs_head, probs_row, probs_key;
  int64_t block_table_batch, block_table_page;
  int64_t lengths_batch, first_position_batch;
  int64_t key_start_batch, key_end_batch;
  int64_t alibi_batch;
  int64_t diagonal, window_left, window_right;
  int32_t diagonal_kind;  // attnspan::Diagonal::Kind
  int32_t batch, heads, kv_heads;
  int32_t seqlen_q, seqlen_k;  // packed: totals; cache: the longest
  int32_t page_size;
  // attention_forward: only sequences of least_rows to most_rows query rows are this launch's.
  int32_t least_rows, most_rows;
  int32_t splits;         // the most key splits that any sequence of this launch gets
  int32_t partial_pitch;  // query rows between the partial states of two sequences; 0: as in the packed batch
  float softmax_scale, softcap;
};

// merge_states: two results over disjoint keys, joined row by row.
struct MergeParams {
  RowStrides out_a, lse_a, out_b, lse_b, out, lse;
  int32_t batch, heads, rows, head_dim_v;
};

// Rows of new keys or values, encoded into a cache: row i of sequence b goes to position positions[b] + i.
struct AppendParams {
  RowStrides rows;  // of the tensor that is appended: (batch, KV head, row)
  KvStrides plane;
  int64_t block_table_batch, block_table_page, positions_stride, first_stride;
  int32_t batch, kv_heads, seqlen_new, page_size;
};

// The tensors of attention, in the order of the argument buffer: X(type, name).
#define ATTNSPAN_ATTENTION_TENSORS(X) \
  X(const uchar, query)               \
  X(const uchar, key_codes)           \
  X(const half, key_scales)           \
  X(const uchar, value_codes)         \
  X(const half, value_scales)         \
  X(uchar, out)                       \
  X(float, lse)                       \
  X(float, probs)                     \
  X(const int, cu_seqlens_q)          \
  X(const int, cu_seqlens_k)          \
  X(const int, lengths)               \
  X(const int, first_position)        \
  X(const int, block_table)           \
  X(const int, key_start)             \
  X(const int, key_end)               \
  X(const float, bias)                \
  X(const float, alibi_slopes)        \
  X(const float, sinks)               \
  X(float, partial_out)               \
  X(float, partial_state)             \
  X(atomic_uint, nonfinite)           \
  X(const uchar, dout)                \
  X(const float, dlse)                \
  X(float, delta)                     \
  X(float, dscores)                   \
  X(uchar, dq)                        \
  X(uchar, dk)                        \
  X(uchar, dv)                        \
  X(float, d_sinks)

#define ATTNSPAN_MERGE_TENSORS(X) \
  X(const uchar, out_a)           \
  X(const float, lse_a)           \
  X(const uchar, out_b)           \
  X(const float, lse_b)           \
  X(uchar, merged_out)            \
  X(float, merged_lse)

#define ATTNSPAN_APPEND_TENSORS(X) \
  X(const uchar, rows)             \
  X(const int, positions)          \
  X(const int, append_block_table) \
  X(const int, append_first)       \
  X(uchar, codes)                  \
  X(half, scales)                  \
  X(atomic_uint, saturated)

#define ATTNSPAN_PROBE_TENSORS(X) X(float, elements)

// Function constants in the order of their indices: X(type, name). They specialise a pipeline; none copies a kernel.
#define ATTNSPAN_FUNCTION_CONSTANTS(X)                                              \
  X(int, HEAD_DIM)    /* of query and key */                                        \
  X(int, HEAD_DIM_V)  /* of value and out */                                        \
  X(int, KEY_WIDTH)   /* of a stored key row: HEAD_DIM, or whole blocks in tbq4 */  \
  X(int, VALUE_WIDTH) /* of a stored value row */                                   \
  X(int, GROUP)       /* query heads that read one KV head */                       \
  X(int, DTYPE)       /* of query, out and gradients: a Format below */             \
  X(int, KEY_FORMAT)                                                                \
  X(int, VALUE_FORMAT)                                                              \
  X(int, KEY_BLOCK) /* tbq4: values per block, 64 or 128 */                         \
  X(int, VALUE_BLOCK)                                                               \
  X(bool, PACKED)                                                                   \
  X(bool, HAS_LENGTHS)                                                              \
  X(bool, HAS_FIRST_POSITION)                                                       \
  X(bool, HAS_BLOCK_TABLE)                                                          \
  X(bool, HAS_KEY_START)                                                            \
  X(bool, HAS_KEY_END)                                                              \
  X(bool, HAS_SOFTCAP)                                                              \
  X(bool, HAS_BIAS)                                                                 \
  X(bool, HAS_ALIBI)                                                                \
  X(bool, HAS_SINKS)                                                                \
  X(bool, HAS_LSE)                                                                  \
  X(bool, HAS_DLSE)                                                                 \
  X(bool, NAN_GUARD)                                                                \
  X(bool, SPLIT) /* write partial states for attention_merge */                                               \
  X(bool, WRITE_OUT)   /* unfused_probs: finish the forward; else only p = exp(s - lse) for backward */        \
  X(bool, ENCODE_FAST) /* cache_append: attnspan::EncodeMode::fast */

// attnspan::KvFormat; the first three are attnspan::DType too.
enum Format : int32_t { kF32 = 0, kF16 = 1, kBf16 = 2, kQ8 = 3, kTbq4 = 4 };

}  // namespace attnspan_metal
