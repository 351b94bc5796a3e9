// One sequence of the batch and its mask: row i sees keys [begin, end) of span(i), nothing else.
struct Sequence {
  batch: u32, q_row0: u32, k_row0: u32, seqlen_q: i32, key_begin: i32, key_limit: i32, diagonal: i32
}
fn sequence_of(batch: u32) -> Sequence {
  var s = Sequence(batch, 0u, 0u, i32(p.seqlen_q), 0, i32(p.seqlen_k), p.diagonal);
  if (p.cu_seqlens_q != NONE) {
    s.q_row0 = side[p.cu_seqlens_q + batch];
    s.k_row0 = side[p.cu_seqlens_k + batch];
    s.seqlen_q = i32(side[p.cu_seqlens_q + batch + 1u] - s.q_row0);
    s.key_limit = i32(side[p.cu_seqlens_k + batch + 1u] - s.k_row0);
  }
  if (p.seqlens != NONE) { s.key_limit = i32(side[p.seqlens + batch * p.seqlens_stride]); }
  if (p.first_position != NONE) { s.key_begin = i32(side[p.first_position + batch * p.first_stride]); }
  if (p.diagonal_kind == 0u) { s.diagonal = s.key_limit - s.seqlen_q; }
  return s;
}
fn span_of(s: Sequence, row: i32) -> vec2<i32> {
  let position = row + s.diagonal;
  var begin = max(position - p.window_left, s.key_begin);
  var end = min(position + p.window_right + 1, s.key_limit);
  if (p.key_start != NONE) {
    begin = max(begin, bitcast<i32>(side[p.key_start + s.batch * p.key_start_batch + u32(row)]));
  }
  if (p.key_end != NONE) {
    end = min(end, bitcast<i32>(side[p.key_end + s.batch * p.key_end_batch + u32(row)]));
  }
  return vec2<i32>(begin, end);
}
