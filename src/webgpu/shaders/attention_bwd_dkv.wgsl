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
var<workgroup> weights: array<vec4<f32>, OWN * OTHER / 4u>;
// common: sequence load dense_rows backward_loads score backward_score store store_quad backward_products
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

struct Block { s: Sequence, kv_head: u32, key0: i32, key1: i32 }
// Keys or values (own) beside rows of query or dout (other): one chunk of the head dim.
fn stage_scores(b: Block, head: u32, r0: i32, row_end: i32, first_quad: u32, gradients: bool, thread: u32) {
  let dim = select(p.head_dim, p.head_dim_v, gradients);
  for (var e = thread; e < OWN * DIM_QUADS; e += THREADS) {
    let r = e / DIM_QUADS;
    let quad = first_quad + e % DIM_QUADS;
    var v = vec4<f32>();
    if (b.key0 + i32(r) < b.key1 && 4u * quad < dim) {
      let row = b.s.k_row0 + u32(b.key0) + r;
      if (gradients) { v = dense_value_quad(address(p.value, b.s.batch, b.kv_head, row), quad); }
      else { v = dense_key_quad(address(p.key, b.s.batch, b.kv_head, row), quad); }
    }
    stage[e + (r >> 2u)] = v;
  }
  let base = OWN * DIM_QUADS + OWN / 4u;
  for (var e = thread; e < OTHER * DIM_QUADS; e += THREADS) {
    let r = e / DIM_QUADS;
    let quad = first_quad + e % DIM_QUADS;
    var v = vec4<f32>();
    if (r0 + i32(r) < row_end && 4u * quad < dim) {
      let row = b.s.q_row0 + u32(r0) + r;
      if (gradients) { v = dout_quad(address(p.dout, b.s.batch, head, row), quad); }
      else { v = query_quad(address(p.query, b.s.batch, head, row), quad); }
    }
    stage[base + e + (r >> 2u)] = v;
  }
}
// Rows of query (for dk) or dout (for dv), all columns.
fn stage_rows(b: Block, head: u32, r0: i32, row_end: i32, thread: u32) {
  let columns = OTHER / 4u * COLUMN_VECS;
  let dim = select(p.head_dim_v, p.head_dim, WANT_KEY);
  for (var e = thread; e < CHUNK * columns; e += THREADS) {
    let quad = e % columns;
    let row = r0 + i32(e / columns);
    var v = vec4<f32>();
    if (row < row_end && 4u * quad < dim) {
      let at = b.s.q_row0 + u32(row);
      if (WANT_KEY) { v = query_quad(address(p.query, b.s.batch, head, at), quad); }
      else { v = dout_quad(address(p.dout, b.s.batch, head, at), quad); }
    }
    stage[e] = v;
  }
}

@compute @workgroup_size(THREADS)
fn backward_key_value(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
  let tile = key_tile_of(group.x, group.z);
  if (tile.batch == NONE) { return; }
  let s = sequence_of(tile.batch);
  // Keys of the tensor that do not exist (seqused_k) get zeros.
  var stored_keys = i32(p.seqlen_k);
  if (p.cu_seqlens_k != NONE) { stored_keys = s.key_limit; }
  let b = Block(s, group.y, tile.key0, min(tile.key0 + i32(OWN), s.key_limit));
  let tx = thread % (OTHER / 4u);
  let ty = thread / (OTHER / 4u);
  let rows = rows_seeing(s, b.key0, b.key1);
  var acc = array<array<vec4<f32>, 4>, MAX_COLUMN_VECS>();

  for (var g = 0u; g < p.group; g++) {
    let head = b.kv_head * p.group + g;
    for (var r0 = rows.x; r0 < rows.y; r0 += i32(OTHER)) {
      var scores = array<vec4<f32>, 4>();
      for (var d0 = 0u; 4u * d0 < p.head_dim; d0 += DIM_QUADS) {
        workgroupBarrier();
        stage_scores(b, head, r0, rows.y, d0, false, thread);
        workgroupBarrier();
        dot_chunk(&scores, tx, ty);
      }
      var d_scores = array<vec4<f32>, 4>();
      if (WANT_KEY) {
        for (var d0 = 0u; 4u * d0 < p.head_dim_v; d0 += DIM_QUADS) {
          workgroupBarrier();
          stage_scores(b, head, r0, rows.y, d0, true, thread);
          workgroupBarrier();
          dot_chunk(&d_scores, tx, ty);
        }
      }

      var tile_weights = array<vec4<f32>, 4>();
      for (var j = 0u; j < 4u; j++) {
        let row = r0 + i32(4u * tx + j);
        if (row < rows.y) {
          let span = span_of(s, row);
          let row_stats = stats_of(s, head, row);
          for (var i = 0u; i < 4u; i++) {
            let position = b.key0 + i32(4u * ty + i);
            if (position >= span.x && position < span.y) {
              let x = logit_and_slope(s, head, row, position, scores[i][j]);
              if (x.x > NO_SCORE) {
                var w = exp(x.x - row_stats.x);
                if (WANT_KEY) { w *= (d_scores[i][j] - row_stats.y) * x.y; }
                tile_weights[i][j] = w;
              }
            }
          }
        }
      }
      for (var i = 0u; i < 4u; i++) { weights[(4u * ty + i) * (OTHER / 4u) + tx] = tile_weights[i]; }

      for (var first = 0u; first < OTHER; first += CHUNK) {
        workgroupBarrier();
        stage_rows(b, head, r0 + i32(first), rows.y, thread);
        workgroupBarrier();
        accumulate_chunk(&acc, first, tx, ty);
      }
    }
  }

  let dim = select(p.head_dim_v, p.head_dim, WANT_KEY);
  for (var i = 0u; i < 4u; i++) {
    let position = b.key0 + i32(4u * ty + i);
    if (position >= stored_keys) { continue; }
    let at = address(p.out, s.batch, b.kv_head, s.k_row0 + u32(position));
    for (var c = 0u; c < COLUMN_VECS; c++) {
      let d = 4u * (c * (OTHER / 4u) + tx);
      if (d < dim) { store_quad(at, d, dim, acc[c][i]); }
    }
  }
}
