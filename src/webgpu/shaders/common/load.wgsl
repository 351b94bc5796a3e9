fn half_of(word: u32, upper: bool) -> u32 { return select(word & 0xffffu, word >> 16u, upper); }
fn f16_of(bits: u32) -> f32 { return unpack2x16float(bits).x; }
fn bf16_of(bits: u32) -> f32 { return bitcast<f32>(bits << 16u); }
fn f16_quad(w: vec2<u32>) -> vec4<f32> { return vec4<f32>(unpack2x16float(w.x), unpack2x16float(w.y)); }
fn bf16_quad(w: vec2<u32>) -> vec4<f32> {
  return bitcast<vec4<f32>>(vec4<u32>(w.x << 16u, w.x & 0xffff0000u, w.y << 16u, w.y & 0xffff0000u));
}
fn pair_of(words: vec4<u32>, word: u32) -> vec2<u32> { return select(words.xy, words.zw, (word & 2u) != 0u); }
fn pair_quad(words: vec4<u32>, word: u32, format: u32) -> vec4<f32> {
  if (format == F16_VEC) { return f16_quad(pair_of(words, word)); }
  return bf16_quad(pair_of(words, word));
}
// Unaligned rows, value by value: where value d lies, in halves of words, and what it is.
fn half_at(row: u32, d: u32, format: u32) -> u32 {
  return select((row >> 1u) + d, 2u * ((row >> 2u) + d), format == F32_ANY);
}
fn any_value(word: u32, at: u32, format: u32) -> f32 {
  if (format == F32_ANY) { return bitcast<f32>(word); }
  let bits = half_of(word, (at & 1u) != 0u);
  return select(bf16_of(bits), f16_of(bits), format == F16_ANY);
}
