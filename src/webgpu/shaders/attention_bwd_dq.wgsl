// Backward, dq: one workgroup owns OWN query rows of one head and walks over the keys that they see.
//   p = exp(score - lse),  ds = p (dout . value - delta) d score / d (query . key),  dq += ds key
// Sums run over the keys in their order, without atomics: bitwise the same from run to run.
// common: backward_tiles formats params
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> query: array<vec4<u32>>;
@group(0) @binding(2) var<storage, read> key: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read> value: array<vec4<u32>>;
@group(0) @binding(4) var<storage, read> dout: array<vec4<u32>>;
@group(0) @binding(5) var<storage, read> stats: array<vec2<f32>>;
@group(0) @binding(6) var<storage, read> side: array<u32>;
@group(0) @binding(7) var<storage, read_write> out: array<atomic<u32>>;

var<workgroup> stage: array<vec4<f32>, STAGE_VECS>;
var<workgroup> weights: array<vec4<f32>, OWN * OTHER / 4u + OWN / 8u>;
// common: sequence row_tile load dense_rows backward_loads score backward_score store store_quad products backward_products
// Own: rows of query, or of dout. Beyond the head dim 0, so that others may repeat their last vec4 there.
fn fetch_own(b: Block, e: u32, first_quad: u32, gradients: bool) -> vec4<f32> {
  let row = b.s.q_row0 + u32(min(b.own0 + i32(e / DIM_QUADS), b.own_last));
  let quad = first_quad + e % DIM_QUADS;
  let dim = select(p.head_dim, p.head_dim_v, gradients);
  var v: vec4<f32>;
  if (gradients) { v = dout_quad(address(p.dout, b.s.batch, b.head, row), min(quad, (dim - 1u) / 4u)); }
  else { v = query_quad(address(p.query, b.s.batch, b.head, row), min(quad, (dim - 1u) / 4u)); }
  return select(vec4<f32>(), v, 4u * quad < dim);
}
// Other: keys, or values. Those past the end repeat the last one: their weights are 0.
fn fetch_other(b: Block, k0: i32, e: u32, first_quad: u32, gradients: bool) -> vec4<f32> {
  let row = b.s.k_row0 + u32(min(k0 + i32(e / DIM_QUADS), b.other_end - 1));
  let quad = first_quad + e % DIM_QUADS;
  if (gradients) {
    return dense_value_quad(address(p.value, b.s.batch, b.kv_head, row), min(quad, (p.head_dim_v - 1u) / 4u));
  }
  return dense_key_quad(address(p.key, b.s.batch, b.kv_head, row), min(quad, (p.head_dim - 1u) / 4u));
}
fn fetch_column(b: Block, k0: i32, e: u32) -> vec4<f32> {
  let columns = OTHER / 4u * COLUMN_VECS;
  let row = b.s.k_row0 + u32(min(k0 + i32(e / columns), b.other_end - 1));
  return dense_key_quad(address(p.key, b.s.batch, b.kv_head, row),
                        min(b.first_column + e % columns, (p.head_dim - 1u) / 4u));
}
// (lse, delta) of this thread's rows.
struct Stats { lse: PerRow, delta: PerRow }
fn own_stats(b: Block, t: Thread) -> Stats {
  var s = Stats();
  for (var i = 0u; i < 4u; i++) {
    let lo = stats_of(b.s, b.head, min(b.own0 + i32(8u * t.ty + i), b.own_last));
    let hi = stats_of(b.s, b.head, min(b.own0 + i32(8u * t.ty + 4u + i), b.own_last));
    s.lse.lo[i] = lo.x;
    s.lse.hi[i] = hi.x;
    s.delta.lo[i] = lo.y;
    s.delta.hi[i] = hi.y;
  }
  return s;
}
// p d score / d (query . key) where no row and no transform is special ...
fn plain_weights(x: Eight, lse: PerRow) -> Eight {
  let unit = p.softmax_scale;
  return Eight(unit * exp(unit * x.a - lse.lo.x), unit * exp(unit * x.b - lse.lo.y), unit * exp(unit * x.c - lse.lo.z),
               unit * exp(unit * x.d - lse.lo.w), unit * exp(unit * x.e - lse.hi.x), unit * exp(unit * x.f - lse.hi.y),
               unit * exp(unit * x.g - lse.hi.z), unit * exp(unit * x.h - lse.hi.w));
}
// ... and where one may be, pair by pair.
fn masked_weights(b: Block, k0: i32, x: Eight, t: Thread) -> Eight {
  let at = weights_at(t);
  put_weights(at, x);
  for (var i = 0u; i < 8u; i++) {
    let row = min(b.own0 + i32(8u * t.ty + i), b.own_last);
    var span = span_of(b.s, row);
    span.y = min(span.y, b.other_end);
    let row_lse = stats_of(b.s, b.head, row).x;
    for (var c = 0u; c < 4u; c++) {
      let w = weights[at + i * (OTHER / 4u)];
      let y = pair_weight(b, row, k0 + i32(4u * t.tx + c), span, row_lse, w[c], true);
      weights[at + i * (OTHER / 4u)] = select(w, vec4<f32>(y), vec4<u32>(0u, 1u, 2u, 3u) == vec4<u32>(c));
    }
  }
  return weight_rows(at);
}
fn score_gradients(w: Eight, y: Eight, delta: PerRow) -> Eight {
  return Eight(w.a * (y.a - delta.lo.x), w.b * (y.b - delta.lo.y), w.c * (y.c - delta.lo.z), w.d * (y.d - delta.lo.w),
               w.e * (y.e - delta.hi.x), w.f * (y.f - delta.hi.y), w.g * (y.g - delta.hi.z), w.h * (y.h - delta.hi.w));
}

@compute @workgroup_size(THREADS)
fn backward_query(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
  let tile = row_tile_of(group.x / p.column_blocks, group.z, OWN);
  if (tile.batch == NONE) { return; }
  let s = sequence_of(tile.batch);
  if (tile.row0 >= s.seqlen_q) { return; }
  let t = Thread(thread, thread % (OTHER / 4u), thread / (OTHER / 4u));
  let last_row = min(tile.row0 + i32(OWN), s.seqlen_q) - 1;
  let first_span = span_of(s, tile.row0);
  let last_span = span_of(s, last_row);
  let inside = vec2<i32>(last_span.x, min(first_span.y, last_span.y));  // keys that every row sees
  let first_column = group.x % p.column_blocks * (OTHER / 4u) * COLUMN_VECS;
  let b = Block(s, group.y, group.y / p.group, tile.row0, last_row, last_span.y, first_column);
  let plain = p.softcap == 0.0 && p.bias == NONE && p.alibi == NONE;
  let row_stats = own_stats(b, t);
  var sum = Gradient();
  for (var k0 = first_span.x; k0 < b.other_end; k0 += i32(OTHER)) {
    var w = dot_products(b, k0, false, t);
    if (plain && k0 >= inside.x && k0 + i32(OTHER) <= inside.y) {
      w = plain_weights(w, row_stats.lse);
    } else {
      w = masked_weights(b, k0, w, t);
    }
    let d_scores = dot_products(b, k0, true, t);
    put_weights(weights_at(t), score_gradients(w, d_scores, row_stats.delta));
    sum = add_rows(sum, b, k0, t);
  }
  write_gradient(b, b.s.q_row0 + u32(b.own0), b.head, last_row, p.head_dim, sum, t);
}
