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
var<workgroup> weights: array<vec4<f32>, OWN * OTHER / 4u>;
// common: sequence row_tile load dense_rows backward_loads score backward_score store store_quad backward_products
struct Block { s: Sequence, head: u32, row0: i32, kv_head: u32 }
// Rows of query or dout (own) beside keys or values (other): one chunk of the head dim.
fn stage_scores(b: Block, k0: i32, key_end: i32, first_quad: u32, gradients: bool, thread: u32) {
  let dim = select(p.head_dim, p.head_dim_v, gradients);
  for (var e = thread; e < OWN * DIM_QUADS; e += THREADS) {
    let r = e / DIM_QUADS;
    let quad = first_quad + e % DIM_QUADS;
    var v = vec4<f32>();
    if (b.row0 + i32(r) < b.s.seqlen_q && 4u * quad < dim) {
      let row = b.s.q_row0 + u32(b.row0) + r;
      if (gradients) { v = dout_quad(address(p.dout, b.s.batch, b.head, row), quad); }
      else { v = query_quad(address(p.query, b.s.batch, b.head, row), quad); }
    }
    stage[e + (r >> 2u)] = v;
  }
  let base = OWN * DIM_QUADS + OWN / 4u;
  for (var e = thread; e < OTHER * DIM_QUADS; e += THREADS) {
    let r = e / DIM_QUADS;
    let quad = first_quad + e % DIM_QUADS;
    var v = vec4<f32>();
    if (k0 + i32(r) < key_end && 4u * quad < dim) {
      let row = b.s.k_row0 + u32(k0) + r;
      if (gradients) { v = dense_value_quad(address(p.value, b.s.batch, b.kv_head, row), quad); }
      else { v = dense_key_quad(address(p.key, b.s.batch, b.kv_head, row), quad); }
    }
    stage[base + e + (r >> 2u)] = v;
  }
}
fn stage_keys(b: Block, k0: i32, key_end: i32, thread: u32) {
  let columns = OTHER / 4u * COLUMN_VECS;
  for (var e = thread; e < CHUNK * columns; e += THREADS) {
    let quad = e % columns;
    let position = k0 + i32(e / columns);
    var v = vec4<f32>();
    if (position < key_end && 4u * quad < p.head_dim) {
      v = dense_key_quad(address(p.key, b.s.batch, b.kv_head, b.s.k_row0 + u32(position)), quad);
    }
    stage[e] = v;
  }
}

@compute @workgroup_size(THREADS)
fn backward_query(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
  let tile = row_tile_of(group.x, group.z, OWN);
  if (tile.batch == NONE) { return; }
  let b = Block(sequence_of(tile.batch), group.y, tile.row0, group.y / p.group);
  if (b.row0 >= b.s.seqlen_q) { return; }
  let tx = thread % (OTHER / 4u);
  let ty = thread / (OTHER / 4u);
  let last_row = min(b.row0 + i32(OWN), b.s.seqlen_q) - 1;
  let hull = vec2<i32>(span_of(b.s, b.row0).x, span_of(b.s, last_row).y);

  var spans = array<vec2<i32>, 4>();
  var row_stats = array<vec2<f32>, 4>();
  for (var i = 0u; i < 4u; i++) {
    let row = min(b.row0 + i32(4u * ty + i), last_row);
    spans[i] = span_of(b.s, row);
    row_stats[i] = stats_of(b.s, b.head, row);
  }
  var acc = array<array<vec4<f32>, 4>, MAX_COLUMN_VECS>();

  for (var k0 = hull.x; k0 < hull.y; k0 += i32(OTHER)) {
    var scores = array<vec4<f32>, 4>();
    for (var d0 = 0u; 4u * d0 < p.head_dim; d0 += DIM_QUADS) {
      workgroupBarrier();
      stage_scores(b, k0, hull.y, d0, false, thread);
      workgroupBarrier();
      dot_chunk(&scores, tx, ty);
    }
    var d_scores = array<vec4<f32>, 4>();
    for (var d0 = 0u; 4u * d0 < p.head_dim_v; d0 += DIM_QUADS) {
      workgroupBarrier();
      stage_scores(b, k0, hull.y, d0, true, thread);
      workgroupBarrier();
      dot_chunk(&d_scores, tx, ty);
    }

    for (var i = 0u; i < 4u; i++) {
      let row = min(b.row0 + i32(4u * ty + i), last_row);
      var ds = vec4<f32>();
      for (var j = 0u; j < 4u; j++) {
        let position = k0 + i32(4u * tx + j);
        if (position >= spans[i].x && position < min(spans[i].y, hull.y)) {
          let x = logit_and_slope(b.s, b.head, row, position, scores[i][j]);
          if (x.x > NO_SCORE) { ds[j] = exp(x.x - row_stats[i].x) * (d_scores[i][j] - row_stats[i].y) * x.y; }
        }
      }
      weights[(4u * ty + i) * (OTHER / 4u) + tx] = ds;
    }

    for (var first = 0u; first < OTHER; first += CHUNK) {
      workgroupBarrier();
      stage_keys(b, k0 + i32(first), hull.y, thread);
      workgroupBarrier();
      accumulate_chunk(&acc, first, tx, ty);
    }
  }

  for (var i = 0u; i < 4u; i++) {
    let row = b.row0 + i32(4u * ty + i);
    if (row > last_row) { continue; }
    let at = address(p.out, b.s.batch, b.head, b.s.q_row0 + u32(row));
    for (var c = 0u; c < COLUMN_VECS; c++) {
      let d = 4u * (c * (OTHER / 4u) + tx);
      if (d < p.head_dim) { store_quad(at, d, p.head_dim, acc[c][i]); }
    }
  }
}
