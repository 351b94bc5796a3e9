// Rows of a tensor, in bytes from the start of the binding. For a cache, `batch` is the stride of a page.
struct Rows { base: u32, batch: u32, head: u32, row: u32 }
struct Params {
  query: Rows, key: Rows, value: Rows, key_scale: Rows, value_scale: Rows, out: Rows, lse: Rows,
  dout: Rows, stats: Rows,  // backward only
  batch: u32, heads: u32, kv_heads: u32, group: u32,
  seqlen_q: u32, seqlen_k: u32, head_dim: u32, head_dim_v: u32,
  query_format: u32, key_format: u32, value_format: u32, out_format: u32,
  diagonal_kind: u32, diagonal: i32, window_left: i32, window_right: i32,
  softmax_scale: f32, softcap: f32, key_block: u32, value_block: u32,
  // word offsets into `side`, NONE = not given, and strides in words
  cu_seqlens_q: u32, cu_seqlens_k: u32, seqlens: u32, seqlens_stride: u32,
  first_position: u32, first_stride: u32, block_table: u32, block_table_row: u32,
  block_table_column: u32, page_shift: u32, key_start: u32, key_start_batch: u32,
  key_end: u32, key_end_batch: u32, alibi: u32, alibi_batch: u32,
  sinks: u32, bias: u32, bias_batch: u32, bias_head: u32,
  bias_row: u32, bias_key: u32, splits: u32, min_split_keys: u32,
  out_split: u32, lse_split: u32, max_splits: u32, page_size: u32,
  dout_format: u32, query_quads: u32, column_blocks: u32, spare1: u32,
}
const NONE = 0xffffffffu;
