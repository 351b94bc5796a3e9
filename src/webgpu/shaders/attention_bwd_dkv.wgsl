// Backward, dv or dk: one workgroup owns OWN keys of one KV head and walks over every row of every query head
// that sees one of them.
//   p = exp(score - lse),  dv += p dout
//   ds = p (dout . value - delta) d score / d (query . key),  dk += ds query
// One gradient a dispatch: both at once would save one product of eight and cost twice the accumulators. Sums run
// over heads and rows in their order, without atomics: bitwise the same from run to run.
// common: backward_tiles formats params

override WANT_KEY: bool = true;  // dk, else dv
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
// common: sequence load dense_rows backward_loads score backward_score store store_quad products backward_products
struct KeyTile { batch: u32, key0: i32 }
// The sequence of key tile `tile`. Packed batches list their tiles one sequence after the other.
fn key_tile_of(tile: u32, batch: u32) -> KeyTile {
  if (p.cu_seqlens_k == NONE) { return KeyTile(batch, i32(tile * OWN)); }
  var left = tile;
  for (var b = 0u; b < p.batch; b++) {
    let keys = side[p.cu_seqlens_k + b + 1u] - side[p.cu_seqlens_k + b];
    let tiles = (keys + OWN - 1u) / OWN;
    if (left < tiles) { return KeyTile(b, i32(left * OWN)); }
    left -= tiles;
  }
  return KeyTile(NONE, 0);
}
// Rows that see one of keys [key0, key1): both ends of a span never decrease, so they lie side by side.
fn rows_seeing(s: Sequence, key0: i32, key1: i32) -> vec2<i32> {
  var low = 0;  // the first row whose span ends after key0
  var high = s.seqlen_q;
  while (low < high) {
    let middle = (low + high) / 2;
    if (span_of(s, middle).y > key0) { high = middle; } else { low = middle + 1; }
  }
  let first = low;
  high = s.seqlen_q;
  while (low < high) {  // the first row whose span begins at key1 or later
    let middle = (low + high) / 2;
    if (span_of(s, middle).x >= key1) { high = middle; } else { low = middle + 1; }
  }
  return vec2<i32>(first, low);
}

// Own: keys, or values. Beyond the head dim 0, so that others may repeat their last vec4 there.
fn fetch_own(b: Block, e: u32, first_quad: u32, gradients: bool) -> vec4<f32> {
  let row = b.s.k_row0 + u32(min(b.own0 + i32(e / DIM_QUADS), b.own_last));
  let quad = first_quad + e % DIM_QUADS;
  let dim = select(p.head_dim, p.head_dim_v, gradients);
  var v: vec4<f32>;
  if (gradients) { v = dense_value_quad(address(p.value, b.s.batch, b.kv_head, row), min(quad, (dim - 1u) / 4u)); }
  else { v = dense_key_quad(address(p.key, b.s.batch, b.kv_head, row), min(quad, (dim - 1u) / 4u)); }
  return select(vec4<f32>(), v, 4u * quad < dim);
}
// Other: rows of query, or of dout. Those past the end repeat the last one: their weights are 0.
fn fetch_other(b: Block, r0: i32, e: u32, first_quad: u32, gradients: bool) -> vec4<f32> {
  let row = b.s.q_row0 + u32(min(r0 + i32(e / DIM_QUADS), b.other_end - 1));
  let quad = first_quad + e % DIM_QUADS;
  if (gradients) { return dout_quad(address(p.dout, b.s.batch, b.head, row), min(quad, (p.head_dim_v - 1u) / 4u)); }
  return query_quad(address(p.query, b.s.batch, b.head, row), min(quad, (p.head_dim - 1u) / 4u));
}
// Rows of query (for dk) or dout (for dv).
fn fetch_column(b: Block, r0: i32, e: u32) -> vec4<f32> {
  let columns = OTHER / 4u * COLUMN_VECS;
  let row = b.s.q_row0 + u32(min(r0 + i32(e / columns), b.other_end - 1));
  let quad = b.first_column + e % columns;
  if (WANT_KEY) { return query_quad(address(p.query, b.s.batch, b.head, row), min(quad, (p.head_dim - 1u) / 4u)); }
  return dout_quad(address(p.dout, b.s.batch, b.head, row), min(quad, (p.head_dim_v - 1u) / 4u));
}
// (lse, delta) of this thread's rows of the tile.
struct Stats { lse: vec4<f32>, delta: vec4<f32> }
fn other_stats(b: Block, r0: i32, tx: u32) -> Stats {
  let first = r0 + i32(4u * tx);
  let x = stats_of(b.s, b.head, min(first, b.other_end - 1));
  let y = stats_of(b.s, b.head, min(first + 1, b.other_end - 1));
  let z = stats_of(b.s, b.head, min(first + 2, b.other_end - 1));
  let w = stats_of(b.s, b.head, min(first + 3, b.other_end - 1));
  return Stats(vec4<f32>(x.x, y.x, z.x, w.x), vec4<f32>(x.y, y.y, z.y, w.y));
}
// p, for dk times d score / d (query . key), where no key and no transform is special ...
fn plain_weights(x: Eight, lse: vec4<f32>) -> Eight {
  let unit = p.softmax_scale;
  let slope = select(1.0, unit, WANT_KEY);
  return Eight(slope * exp(unit * x.a - lse), slope * exp(unit * x.b - lse), slope * exp(unit * x.c - lse),
               slope * exp(unit * x.d - lse), slope * exp(unit * x.e - lse), slope * exp(unit * x.f - lse),
               slope * exp(unit * x.g - lse), slope * exp(unit * x.h - lse));
}
// ... and where one may be, pair by pair.
fn masked_weights(b: Block, r0: i32, x: Eight, lse: vec4<f32>, t: Thread) -> Eight {
  let at = weights_at(t);
  put_weights(at, x);
  for (var c = 0u; c < 4u; c++) {
    let row = r0 + i32(4u * t.tx + c);
    var span = vec2<i32>();  // of rows past the end: empty
    if (row < b.other_end) { span = span_of(b.s, row); }
    span.y = min(span.y, b.own_last + 1);
    for (var i = 0u; i < 8u; i++) {
      let w = weights[at + i * (OTHER / 4u)];
      let y = pair_weight(b, row, b.own0 + i32(8u * t.ty + i), span, lse[c], w[c], WANT_KEY);
      weights[at + i * (OTHER / 4u)] = select(w, vec4<f32>(y), vec4<u32>(0u, 1u, 2u, 3u) == vec4<u32>(c));
    }
  }
  return weight_rows(at);
}
fn score_gradients(w: Eight, y: Eight, delta: vec4<f32>) -> Eight {
  return Eight(w.a * (y.a - delta), w.b * (y.b - delta), w.c * (y.c - delta), w.d * (y.d - delta),
               w.e * (y.e - delta), w.f * (y.f - delta), w.g * (y.g - delta), w.h * (y.h - delta));
}

@compute @workgroup_size(THREADS)
fn backward_key_value(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
  let tile = key_tile_of(group.x / p.column_blocks, group.z);
  if (tile.batch == NONE) { return; }
  let s = sequence_of(tile.batch);
  // Keys of the tensor that do not exist (seqused_k) get zeros.
  var stored_keys = i32(p.seqlen_k);
  if (p.cu_seqlens_k != NONE) { stored_keys = s.key_limit; }
  let key_end = min(tile.key0 + i32(OWN), s.key_limit);
  let t = Thread(thread, thread % (OTHER / 4u), thread / (OTHER / 4u));
  let rows = rows_seeing(s, tile.key0, key_end);
  let first_column = group.x % p.column_blocks * (OTHER / 4u) * COLUMN_VECS;
  let plain = p.softcap == 0.0 && p.bias == NONE && p.alibi == NONE && tile.key0 + i32(OWN) == key_end;
  var sum = Gradient();
  for (var g = 0u; g < p.group; g++) {
    let b = Block(s, group.y * p.group + g, group.y, tile.key0, key_end - 1, rows.y, first_column);
    for (var r0 = rows.x; r0 < rows.y; r0 += i32(OTHER)) {
      var w = dot_products(b, r0, false, t);
      let row_stats = other_stats(b, r0, t.tx);
      let last = r0 + i32(OTHER) - 1;
      if (plain && last < rows.y && span_of(s, last).x <= tile.key0 && span_of(s, r0).y >= key_end) {
        w = plain_weights(w, row_stats.lse);
      } else {
        w = masked_weights(b, r0, w, row_stats.lse, t);
      }
      if (WANT_KEY) { w = score_gradients(w, dot_products(b, r0, true, t), row_stats.delta); }
      put_weights(weights_at(t), w);
      sum = add_rows(sum, b, r0, t);
    }
  }
  let b = Block(s, 0u, group.y, tile.key0, key_end - 1, rows.y, first_column);
  write_gradient(b, s.k_row0 + u32(tile.key0), group.y, stored_keys - 1, select(p.head_dim_v, p.head_dim, WANT_KEY), sum, t);
}
