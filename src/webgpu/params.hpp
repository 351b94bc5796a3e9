#pragma once
// The uniform parameters of every attention shader: `struct Params` of src/webgpu/shaders, field for field.

#include <cstdint>

namespace attnspan::webgpu {

// Offsets and strides in bytes from the start of the binding.
struct RowsParams {
  uint32_t base = 0, batch = 0, head = 0, row = 0;
};

inline constexpr uint32_t kNone = 0xffffffffU;

// How rows lie in memory: the constants of the shared block "formats".
enum class Loader : uint32_t {
  f32_vec,
  f16_vec,
  bf16_vec,
  q8,
  tbq4,
  f32_any,
  f16_any,
  bf16_any,
  runtime = 15
};

struct Params {
  RowsParams query, key, value, key_scale, value_scale, out, lse;
  RowsParams dout, stats;  // backward only
  uint32_t batch = 0, heads = 0, kv_heads = 0, group = 0;
  uint32_t seqlen_q = 0, seqlen_k = 0, head_dim = 0, head_dim_v = 0;
  Loader query_format{}, key_format{}, value_format{}, out_format{};
  uint32_t diagonal_kind = 0;
  int32_t diagonal = 0, window_left = 0, window_right = 0;
  float softmax_scale = 1, softcap = 0;
  uint32_t key_block = 32, value_block = 32;
  uint32_t cu_seqlens_q = kNone, cu_seqlens_k = kNone, seqlens = kNone, seqlens_stride = 0;
  uint32_t first_position = kNone, first_stride = 0, block_table = kNone, block_table_row = 0;
  uint32_t block_table_column = 0, page_shift = 0, key_start = kNone, key_start_batch = 0;
  uint32_t key_end = kNone, key_end_batch = 0, alibi = kNone, alibi_batch = 0;
  uint32_t sinks = kNone, bias = kNone, bias_batch = 0, bias_head = 0;
  uint32_t bias_row = 0, bias_key = 0, splits = 1, min_split_keys = 0;
  uint32_t out_split = 0, lse_split = 0, max_splits = 1, page_size = 1;
  Loader dout_format{};
  uint32_t query_quads = 0, column_blocks = 1, spare1 = 0;
};
// attention_merge.wgsl: states of `a` lie a_split and lse_split bytes apart; `b` is one more, or none.
struct MergeParams {
  RowsParams a, lse_a, b, lse_b, out, lse;
  uint32_t batch = 0, heads = 0, rows = 0, states_a = 1;
  uint32_t states_b = 0, a_split = 0, lse_split = 0, width = 0;
  uint32_t head_dim_v = 0;
  Loader in_format{}, out_format{};
  uint32_t block = 0;  // of the rotation of out, 0 = none
  uint32_t sinks = kNone, grid_x = 0, spare0 = 0, spare1 = 0;
};

// attention_bwd_delta.wgsl
struct DeltaParams {
  RowsParams out, dout, lse, dlse, stats;
  uint32_t batch = 0, heads = 0, rows = 0, head_dim_v = 0;
  Loader in_format{};
  uint32_t grid_x = 0, spare0 = 0, spare1 = 0;
};
static_assert(sizeof(DeltaParams) == (5 + 2) * 16);

// nan_guard.wgsl
struct GuardParams {
  RowsParams out;
  uint32_t batch = 0, heads = 0, rows = 0, dim = 0;
  Loader format{};
  uint32_t grid_x = 0, spare0 = 0, spare1 = 0;
};

// kv_append.wgsl
struct AppendParams {
  RowsParams rows, codes, scales;
  uint32_t batch = 0, heads = 0, tokens = 0, dim = 0;
  uint32_t width = 0, block = 32;
  Loader in_format{}, out_format{};
  uint32_t positions = 0, first_position = kNone, block_table = kNone, block_table_row = 0;
  uint32_t block_table_column = 0, page_size = 1, quality = 1, grid_x = 0;
};
static_assert(sizeof(GuardParams) == 3 * 16 && sizeof(AppendParams) == (3 + 4) * 16);

// rotate_query.wgsl
struct RotateParams {
  RowsParams query, rotated;
  uint32_t batch = 0, heads = 0, rows = 0, head_dim = 0;
  uint32_t width = 0, block = 0;
  Loader in_format{};
  uint32_t grid_x = 0;
};
static_assert(sizeof(MergeParams) == (6 + 4) * 16 && sizeof(RotateParams) == (2 + 2) * 16);
static_assert(sizeof(RowsParams) == 16 && sizeof(Params) == (9 + 13) * 16);

}  // namespace attnspan::webgpu
