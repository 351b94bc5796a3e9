// scores += own . other over the staged chunk: 4 x 4 a thread
fn dot_chunk(scores: ptr<function, array<vec4<f32>, 4>>, tx: u32, ty: u32) {
  let own_at = 4u * ty * DIM_QUADS + ty;
  let other_at = OWN * DIM_QUADS + OWN / 4u + 4u * tx * DIM_QUADS + tx;
  for (var d = 0u; d < DIM_QUADS; d++) {
    let a = stage[other_at + d];
    let b = stage[other_at + DIM_QUADS + d];
    let c = stage[other_at + 2u * DIM_QUADS + d];
    let e = stage[other_at + 3u * DIM_QUADS + d];
    for (var i = 0u; i < 4u; i++) {
      let own = stage[own_at + i * DIM_QUADS + d];
      var sum = (*scores)[i];
      sum = fma(vec4<f32>(own.x), vec4<f32>(a.x, b.x, c.x, e.x), sum);
      sum = fma(vec4<f32>(own.y), vec4<f32>(a.y, b.y, c.y, e.y), sum);
      sum = fma(vec4<f32>(own.z), vec4<f32>(a.z, b.z, c.z, e.z), sum);
      sum = fma(vec4<f32>(own.w), vec4<f32>(a.w, b.w, c.w, e.w), sum);
      (*scores)[i] = sum;
    }
  }
}
// acc += weights[.., first .. first + CHUNK) . staged rows
fn accumulate_chunk(acc: ptr<function, array<array<vec4<f32>, 4>, MAX_COLUMN_VECS>>, first: u32, tx: u32, ty: u32) {
  for (var j = 0u; j < CHUNK / 4u; j++) {
    let at = 4u * ty * (OTHER / 4u) + first / 4u + j;
    let wa = weights[at];
    let wb = weights[at + OTHER / 4u];
    let wc = weights[at + OTHER / 2u];
    let wd = weights[at + OTHER / 4u * 3u];
    for (var c = 0u; c < COLUMN_VECS; c++) {
      for (var u = 0u; u < 4u; u++) {
        let v = stage[(4u * j + u) * (OTHER / 4u * COLUMN_VECS) + c * (OTHER / 4u) + tx];
        (*acc)[c][0] = fma(vec4<f32>(wa[u]), v, (*acc)[c][0]);
        (*acc)[c][1] = fma(vec4<f32>(wb[u]), v, (*acc)[c][1]);
        (*acc)[c][2] = fma(vec4<f32>(wc[u]), v, (*acc)[c][2]);
        (*acc)[c][3] = fma(vec4<f32>(wd[u]), v, (*acc)[c][3]);
      }
    }
  }
}
