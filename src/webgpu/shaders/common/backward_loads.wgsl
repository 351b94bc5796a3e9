fn dout_value(row: u32, d: u32, format: u32) -> f32 {
  if (d >= p.head_dim_v) { return 0.0; }
  let at = half_at(row, d, format);
  return any_value(dout[at >> 3u][(at >> 1u) & 3u], at, format);
}
fn dout_quad(row: u32, quad: u32) -> vec4<f32> {
  let format = select(DOUT_FORMAT, p.dout_format, DOUT_FORMAT == RUNTIME);
  if (format == F32_VEC) { return bitcast<vec4<f32>>(dout[(row >> 4u) + quad]); }
  let word = (row >> 2u) + 2u * quad;
  if (format <= BF16_VEC) { return pair_quad(dout[word >> 2u], word, format); }
  let d = 4u * quad;
  return vec4<f32>(dout_value(row, d, format), dout_value(row, d + 1u, format), dout_value(row, d + 2u, format),
                   dout_value(row, d + 3u, format));
}
fn address(rows: Rows, batch: u32, head: u32, row: u32) -> u32 {
  return rows.base + batch * rows.batch + head * rows.head + row * rows.row;
}
// (lse, delta) of a row, made by attention_bwd_delta.wgsl; lse is 0 where the row is empty.
fn stats_of(s: Sequence, head: u32, row: i32) -> vec2<f32> {
  return stats[address(p.stats, s.batch, head, s.q_row0 + u32(row)) >> 3u];
}
