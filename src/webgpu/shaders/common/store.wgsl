// f32 -> f16 and bf16 bits, to nearest even, the same on every device.
fn f16_bits(x: f32) -> u32 {
  let bits = bitcast<u32>(x);
  let sign = (bits >> 16u) & 0x8000u;
  let magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) { return sign | 0x7e00u; }
  if (magnitude >= 0x477ff000u) { return sign | 0x7c00u; }  // 65520 and more
  if (magnitude < 0x38800000u) {                             // subnormal: multiples of 2^-24
    let scaled = bitcast<f32>(magnitude) * 16777216.0;
    return sign | u32(round(scaled));
  }
  return sign | ((magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13u) & 1u)) >> 13u);
}
fn bf16_bits(x: f32) -> u32 {
  let bits = bitcast<u32>(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) { return (bits >> 16u) | 0x40u; }
  return (bits + 0x7fffu + ((bits >> 16u) & 1u)) >> 16u;
}
fn narrow_bits(x: f32, format: u32) -> u32 {
  if (format == F16_VEC) { return f16_bits(x); }
  return bf16_bits(x);
}
// One 16-bit value; its neighbour in the word may be another thread's.
fn store_half(at: u32, bits: u32) {
  let shift = 16u * (at & 1u);
  atomicAnd(&out[at >> 1u], ~(0xffffu << shift));
  atomicOr(&out[at >> 1u], bits << shift);
}
