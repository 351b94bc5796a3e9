// Four values of a row of query, key or value in a tensor's own dtype; row: its byte, quad: which four. Values beyond
// the head dim are 0 where rows are read value by value, and are not read otherwise.
fn query_value(row: u32, d: u32, format: u32) -> f32 {
  if (d >= p.head_dim) { return 0.0; }
  let at = half_at(row, d, format);
  return any_value(query[at >> 3u][(at >> 1u) & 3u], at, format);
}
fn query_quad(row: u32, quad: u32) -> vec4<f32> {
  let format = select(QUERY_FORMAT, p.query_format, QUERY_FORMAT == RUNTIME);
  if (format == F32_VEC) { return bitcast<vec4<f32>>(query[(row >> 4u) + quad]); }
  let word = (row >> 2u) + 2u * quad;
  if (format <= BF16_VEC) { return pair_quad(query[word >> 2u], word, format); }
  let d = 4u * quad;
  return vec4<f32>(query_value(row, d, format), query_value(row, d + 1u, format), query_value(row, d + 2u, format),
                   query_value(row, d + 3u, format));
}
fn key_value(row: u32, d: u32, format: u32) -> f32 {
  if (d >= p.head_dim) { return 0.0; }
  let at = half_at(row, d, format);
  return any_value(key[at >> 3u][(at >> 1u) & 3u], at, format);
}
fn dense_key_quad(row: u32, quad: u32) -> vec4<f32> {
  let format = select(KEY_FORMAT, p.key_format, KEY_FORMAT == RUNTIME);
  if (format == F32_VEC) { return bitcast<vec4<f32>>(key[(row >> 4u) + quad]); }
  let word = (row >> 2u) + 2u * quad;
  if (format <= BF16_VEC) { return pair_quad(key[word >> 2u], word, format); }
  let d = 4u * quad;
  return vec4<f32>(key_value(row, d, format), key_value(row, d + 1u, format), key_value(row, d + 2u, format),
                   key_value(row, d + 3u, format));
}
fn value_value(row: u32, d: u32, format: u32) -> f32 {
  if (d >= p.head_dim_v) { return 0.0; }
  let at = half_at(row, d, format);
  return any_value(value[at >> 3u][(at >> 1u) & 3u], at, format);
}
fn dense_value_quad(row: u32, quad: u32) -> vec4<f32> {
  let format = select(VALUE_FORMAT, p.value_format, VALUE_FORMAT == RUNTIME);
  if (format == F32_VEC) { return bitcast<vec4<f32>>(value[(row >> 4u) + quad]); }
  let word = (row >> 2u) + 2u * quad;
  if (format <= BF16_VEC) { return pair_quad(value[word >> 2u], word, format); }
  let d = 4u * quad;
  return vec4<f32>(value_value(row, d, format), value_value(row, d + 1u, format), value_value(row, d + 2u, format),
                   value_value(row, d + 3u, format));
}
