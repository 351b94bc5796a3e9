// Values d .. d + 3 (those below `dim`) of the row of out at byte `row`; d is a multiple of 4.
fn store_quad(row: u32, d: u32, dim: u32, v: vec4<f32>) {
  let format = select(OUT_FORMAT, p.out_format, OUT_FORMAT == RUNTIME);
  let count = min(4u, dim - d);
  if (format == F32_VEC) {
    for (var c = 0u; c < count; c++) { atomicStore(&out[(row >> 2u) + d + c], bitcast<u32>(v[c])); }
    return;
  }
  let at = (row >> 1u) + d;
  let bits = vec4<u32>(narrow_bits(v.x, format), narrow_bits(v.y, format), narrow_bits(v.z, format),
                       narrow_bits(v.w, format));
  if ((at & 1u) == 0u && count == 4u) {
    atomicStore(&out[at >> 1u], bits.x | (bits.y << 16u));
    atomicStore(&out[(at >> 1u) + 1u], bits.z | (bits.w << 16u));
    return;
  }
  for (var c = 0u; c < count; c++) { store_half(at + c, bits[c]); }
}
