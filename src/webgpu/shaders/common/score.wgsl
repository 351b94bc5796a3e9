// tanh with a small relative error everywhere: WGSL's own may be off by 1e-5, which softcap multiplies.
fn tanh_exact(x: f32) -> f32 {
  let z = x * x;
  let small = x + x * z * ((((-5.70498872745e-3 * z + 2.06390887954e-2) * z - 5.37397155531e-2) * z
              + 1.33314422036e-1) * z - 3.33332819422e-1);
  let large = 1.0 - 2.0 / (exp(2.0 * min(abs(x), 20.0)) + 1.0);
  return select(sign(x) * large, small, abs(x) < 0.625);
}
const MASKING_BIAS = -1e30;
const NO_SCORE = -3.0e38;  // below every logit; never enters an exponent that counts

// The logit of one pair, or NO_SCORE where the bias masks it.
fn logit(s: Sequence, head: u32, row: i32, key: i32, qk: f32) -> f32 {
  var x = p.softmax_scale * qk;
  if (p.softcap != 0.0) { x = p.softcap * tanh_exact(x / p.softcap); }
  if (p.bias != NONE) {
    let bits = side[p.bias + s.batch * p.bias_batch + head * p.bias_head + u32(row) * p.bias_row + u32(key) * p.bias_key];
    let bias = bitcast<f32>(select(bits, 0xfe967699u, bits >= 0xff800000u));  // -inf as -1e38
    if (bias <= MASKING_BIAS) { return NO_SCORE; }
    x += bias;
  }
  if (p.alibi != NONE) {
    x -= bitcast<f32>(side[p.alibi + s.batch * p.alibi_batch + head]) * f32(abs(row + s.diagonal - key));
  }
  return x;
}
