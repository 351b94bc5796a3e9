fn q8_quad(word: u32, scale: f32) -> vec4<f32> {
  let codes = vec4<u32>(word << 24u, word << 16u, word << 8u, word);
  return vec4<f32>(bitcast<vec4<i32>>(codes) >> vec4<u32>(24u)) * scale;
}
// Codes ascend with the centroid; 8..15 are the positive half, 7..0 its mirror.
fn centroid(code: u32) -> f32 {
  let i = select(7u - code, code - 8u, code >= 8u);
  let a = select(select(0.12839503, 0.38804830, i == 1u), select(0.65675912, 0.94234046, i == 3u), i >= 2u);
  let b = select(select(1.25623120, 1.61804639, i == 5u), select(2.06901723, 2.73258957, i == 7u), i >= 6u);
  let magnitude = select(a, b, i >= 4u);
  return select(-magnitude, magnitude, code >= 8u);
}
