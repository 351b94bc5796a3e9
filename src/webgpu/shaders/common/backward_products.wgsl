// What dq, dk and dv share. Thread (ty, tx) has own rows 8 ty .. 8 ty + 7; of the scores others 4 tx .. 4 tx + 3, of the
// gradient vec4 columns tx, tx + TX, ... The shader says what the rows are: fetch_own, fetch_other, fetch_column.
struct Block {
  s: Sequence, head: u32, kv_head: u32, own0: i32, own_last: i32, other_end: i32, first_column: u32
}
struct Thread { index: u32, tx: u32, ty: u32 }
fn padded(e: u32) -> u32 { return e + e / (4u * DIM_QUADS); }
// DIM_QUADS of every own and every other row: query and key, or (gradients) dout and value.
fn stage_chunk(b: Block, other0: i32, first_quad: u32, gradients: bool, thread: u32) {
  let first_other = OWN * DIM_QUADS + OWN / 4u;
  workgroupBarrier();
  let own = Four(fetch_own(b, thread, first_quad, gradients), fetch_own(b, thread + THREADS, first_quad, gradients),
                 fetch_own(b, thread + 2u * THREADS, first_quad, gradients),
                 fetch_own(b, thread + 3u * THREADS, first_quad, gradients));
  let other = Four(fetch_other(b, other0, thread, first_quad, gradients),
                   fetch_other(b, other0, thread + THREADS, first_quad, gradients),
                   fetch_other(b, other0, thread + 2u * THREADS, first_quad, gradients),
                   fetch_other(b, other0, thread + 3u * THREADS, first_quad, gradients));
  stage[padded(thread)] = own.a;
  stage[padded(thread + THREADS)] = own.b;
  stage[padded(thread + 2u * THREADS)] = own.c;
  stage[padded(thread + 3u * THREADS)] = own.d;
  stage[first_other + padded(thread)] = other.a;
  stage[first_other + padded(thread + THREADS)] = other.b;
  stage[first_other + padded(thread + 2u * THREADS)] = other.c;
  stage[first_other + padded(thread + 3u * THREADS)] = other.d;
  workgroupBarrier();
}
// own . other: 8 x 4 a thread
fn dot_products(b: Block, other0: i32, gradients: bool, t: Thread) -> Eight {
  let own_at = 8u * t.ty * DIM_QUADS + 2u * t.ty;
  let other_at = OWN * DIM_QUADS + OWN / 4u + 4u * t.tx * DIM_QUADS + t.tx;
  let dim = select(p.head_dim, p.head_dim_v, gradients);
  var s = Eight();
  for (var d0 = 0u; 4u * d0 < dim; d0 += DIM_QUADS) {
    stage_chunk(b, other0, d0, gradients, t.index);
    for (var d = 0u; d < DIM_QUADS; d++) {
      let k = Four(stage[other_at + d], stage[other_at + DIM_QUADS + d], stage[other_at + 2u * DIM_QUADS + d],
                   stage[other_at + 3u * DIM_QUADS + d]);
      let by_dim = Four(vec4<f32>(k.a.x, k.b.x, k.c.x, k.d.x), vec4<f32>(k.a.y, k.b.y, k.c.y, k.d.y),
                        vec4<f32>(k.a.z, k.b.z, k.c.z, k.d.z), vec4<f32>(k.a.w, k.b.w, k.c.w, k.d.w));
      let q = own_at + d;
      s = add_weighed(s, Eight(stage[q], stage[q + DIM_QUADS], stage[q + 2u * DIM_QUADS], stage[q + 3u * DIM_QUADS],
                               stage[q + 4u * DIM_QUADS + 1u], stage[q + 5u * DIM_QUADS + 1u],
                               stage[q + 6u * DIM_QUADS + 1u], stage[q + 7u * DIM_QUADS + 1u]), by_dim);
    }
  }
  return s;
}
// exp(x - lse) d x / d (query . key), or without the last factor, of one pair.
fn pair_weight(b: Block, row: i32, key: i32, span: vec2<i32>, row_lse: f32, qk: f32, slope: bool) -> f32 {
  if (key < span.x || key >= span.y) { return 0.0; }
  let x = logit_and_slope(b.s, b.head, row, key, qk);
  if (x.x <= NO_SCORE) { return 0.0; }
  return exp(x.x - row_lse) * select(1.0, x.y, slope);
}
// ---- eight vec4 of this thread in `weights`
fn weights_at(t: Thread) -> u32 { return 8u * t.ty * (OTHER / 4u) + t.ty + t.tx; }
fn put_weights(at: u32, v: Eight) {
  weights[at] = v.a;
  weights[at + OTHER / 4u] = v.b;
  weights[at + 2u * (OTHER / 4u)] = v.c;
  weights[at + 3u * (OTHER / 4u)] = v.d;
  weights[at + 4u * (OTHER / 4u)] = v.e;
  weights[at + 5u * (OTHER / 4u)] = v.f;
  weights[at + 6u * (OTHER / 4u)] = v.g;
  weights[at + 7u * (OTHER / 4u)] = v.h;
}
fn weight_rows(at: u32) -> Eight {
  return Eight(weights[at], weights[at + OTHER / 4u], weights[at + 2u * (OTHER / 4u)], weights[at + 3u * (OTHER / 4u)],
               weights[at + 4u * (OTHER / 4u)], weights[at + 5u * (OTHER / 4u)], weights[at + 6u * (OTHER / 4u)],
               weights[at + 7u * (OTHER / 4u)]);
}
// ---- gradient += weights . other rows
struct Gradient { a: Eight, b: Eight, c: Eight, d: Eight }  // by column of the thread
fn stage_columns(b: Block, other0: i32, thread: u32) {
  workgroupBarrier();
  let v = Four(fetch_column(b, other0, thread), fetch_column(b, other0, thread + THREADS),
               fetch_column(b, other0, thread + 2u * THREADS), fetch_column(b, other0, thread + 3u * THREADS));
  stage[thread] = v.a;
  stage[thread + THREADS] = v.b;
  stage[thread + 2u * THREADS] = v.c;
  stage[thread + 3u * THREADS] = v.d;
  workgroupBarrier();
}
// Four staged rows of column `c` of this thread.
fn staged_rows(j: u32, c: u32, tx: u32) -> Four {
  let columns = OTHER / 4u * COLUMN_VECS;
  let at = 4u * j * columns + c * (OTHER / 4u) + tx;
  return Four(stage[at], stage[at + columns], stage[at + 2u * columns], stage[at + 3u * columns]);
}
fn add_rows(gradient: Gradient, b: Block, other0: i32, t: Thread) -> Gradient {
  var sum = gradient;
  for (var first = 0u; first < OTHER; first += CHUNK) {
    stage_columns(b, other0 + i32(first), t.index);
    for (var j = 0u; j < CHUNK / 4u; j++) {
      let w = weight_rows(8u * t.ty * (OTHER / 4u) + t.ty + first / 4u + j);
      sum.a = add_weighed(sum.a, w, staged_rows(j, 0u, t.tx));
      if (COLUMN_VECS > 1u) { sum.b = add_weighed(sum.b, w, staged_rows(j, 1u, t.tx)); }
      if (COLUMN_VECS > 2u) { sum.c = add_weighed(sum.c, w, staged_rows(j, 2u, t.tx)); }
      if (COLUMN_VECS > 2u) { sum.d = add_weighed(sum.d, w, staged_rows(j, 3u, t.tx)); }
    }
  }
  return sum;
}
// Column `column` of this thread for own rows up to `last`; first_row: of the tensor, that of own0.
fn write_rows(b: Block, column: u32, first_row: u32, head: u32, last: i32, dim: u32, rows: Eight, t: Thread) {
  let at = weights_at(t);
  workgroupBarrier();
  put_weights(at, rows);
  let d = 4u * (b.first_column + column * (OTHER / 4u) + t.tx);
  for (var i = 0u; i < 8u; i++) {
    if (b.own0 + i32(8u * t.ty + i) <= last && d < dim) {
      store_quad(address(p.out, b.s.batch, head, first_row + 8u * t.ty + i), d, dim, weights[at + i * (OTHER / 4u)]);
    }
  }
}
fn write_gradient(b: Block, first_row: u32, head: u32, last: i32, dim: u32, sum: Gradient, t: Thread) {
  write_rows(b, 0u, first_row, head, last, dim, sum.a, t);
  if (COLUMN_VECS > 1u) { write_rows(b, 1u, first_row, head, last, dim, sum.b, t); }
  if (COLUMN_VECS > 2u) { write_rows(b, 2u, first_row, head, last, dim, sum.c, t); }
  if (COLUMN_VECS > 2u) { write_rows(b, 3u, first_row, head, last, dim, sum.d, t); }
}
