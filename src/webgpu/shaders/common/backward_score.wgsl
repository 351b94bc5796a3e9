// x = the logit, or NO_SCORE where the bias masks it; y = d logit / d (query . key)
fn logit_and_slope(s: Sequence, head: u32, row: i32, key: i32, qk: f32) -> vec2<f32> {
  let x = logit(s, head, row, key, qk);
  var slope = p.softmax_scale;
  if (p.softcap != 0.0) {
    let t = tanh_exact(p.softmax_scale * qk / p.softcap);
    slope *= 1.0 - t * t;
  }
  return vec2<f32>(x, slope);
}
