// Four values of a row of a cache in any format, or of a tensor.
fn code_quad(word: u32, quad: u32, norm: f32, format: u32) -> vec4<f32> {
  if (format == Q8) { return q8_quad(word, norm); }
  let codes = word >> (16u * (quad & 1u));
  return norm * vec4<f32>(centroid(codes & 15u), centroid((codes >> 4u) & 15u), centroid((codes >> 8u) & 15u),
                          centroid((codes >> 12u) & 15u));
}
// Where the scale of a quad lies, in halves of words, and the quad's word of codes.
fn scale_index(scale_row: u32, quad: u32, block: u32) -> u32 { return (scale_row >> 1u) + 4u * quad / block; }
fn code_word(row: u32, quad: u32, format: u32) -> u32 { return (row >> 2u) + select(quad, quad >> 1u, format == TBQ4); }
fn key_quad(row: u32, scale_row: u32, quad: u32) -> vec4<f32> {
  let format = select(KEY_FORMAT, p.key_format, KEY_FORMAT == RUNTIME);
  if (format != Q8 && format != TBQ4) { return dense_key_quad(row, quad); }
  let scale = scale_index(scale_row, quad, p.key_block);
  let at = code_word(row, quad, format);
  return code_quad(key[at >> 2u][at & 3u], quad, f16_of(half_of(key_scale[scale >> 1u], (scale & 1u) != 0u)), format);
}
fn value_quad(row: u32, scale_row: u32, quad: u32) -> vec4<f32> {
  let format = select(VALUE_FORMAT, p.value_format, VALUE_FORMAT == RUNTIME);
  if (format != Q8 && format != TBQ4) { return dense_value_quad(row, quad); }
  let scale = scale_index(scale_row, quad, p.value_block);
  let at = code_word(row, quad, format);
  return code_quad(value[at >> 2u][at & 3u], quad, f16_of(half_of(value_scale[scale >> 1u], (scale & 1u) != 0u)), format);
}
