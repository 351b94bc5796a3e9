// Exact attention, forward, f16 tensors on subgroup matrices with f32 sums (chromium_experimental_subgroup_matrix).
//
// A subgroup owns MATRIX query rows: its query stays in DIM_TILES left matrices, its out in VALUE_TILES result
// matrices, at most 8 each. Scores pass through workgroup memory, because a matrix shows no single element; each
// lane then holds 16 scores of one row, and puts its probabilities, as halves, where its scores were. The traffic
// of workgroup memory is what this kernel waits for, so all of it moves 16 bytes at a time, and strides keep the
// banks apart.
// Rescaling out by rows takes a way through memory too, so it is put off: the reference of a row moves only when a
// maximum beats it by SLACK, and until then probabilities may reach 2^SLACK = 147, far inside f16.
//
// The host prepends what `override` can't say: the extensions and the sizes of arrays of matrices,
//   enable f16; enable subgroups; enable chromium_experimental_subgroup_matrix;
//   const MATRIX = 16u; const SUBGROUP = 32u; const SUBGROUPS = 4u;
//   const DIM_TILES = 8u; const VALUE_TILES = 8u;
// common: formats params sequence row_tile score store

const THREADS = SUBGROUP * SUBGROUPS;
const TILE_ROWS = MATRIX * SUBGROUPS;
const ROW_LANES = SUBGROUP / MATRIX;       // lanes that share a row
const SHARE = 16u;                         // keys of a lane
const TILE_KEYS = SHARE * ROW_LANES;
const KEY_TILES = TILE_KEYS / MATRIX;
// Vectors of 16 bytes in a row, zero-padded to whole matrices, and strides: odd, so that eight rows lie in all banks.
const HALF_TILE = MATRIX / 8u;             // of a matrix of halves
const SUM_TILE = MATRIX / 4u;              // of a matrix of sums
const KEY_VECS = HALF_TILE * DIM_TILES;
const VALUE_VECS = HALF_TILE * VALUE_TILES;
const KEY_STRIDE = KEY_VECS + 1u - KEY_VECS % 2u;
const VALUE_STRIDE = VALUE_VECS + 1u - VALUE_VECS % 2u;
const SCORE_VECS = TILE_KEYS / 4u;
const SCORE_STRIDE = SCORE_VECS + 1u;
const QUERY_TILES = SCORE_VECS / HALF_TILE; // of the query, staged at a time
const SLACK = 7.2;
const LOG2_E = 1.4426950408889634;
const MASKED = -1e38;  // in bits, as all scores here: a logit times LOG2_E
const SEEN = -1e37;    // the reference of a row that has seen a key lies above

alias Left = subgroup_matrix_left<f16, MATRIX, MATRIX>;
alias Right = subgroup_matrix_right<f16, MATRIX, MATRIX>;
alias Sums = subgroup_matrix_result<f32, MATRIX, MATRIX>;
// Names, not indices: an index left to run time would move matrices out of the registers.
struct Query { a: Left, b: Left, c: Left, d: Left, e: Left, f: Left, g: Left, h: Left }
struct Out { a: Sums, b: Sums, c: Sums, d: Sums, e: Sums, f: Sums, g: Sums, h: Sums }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> query: array<vec4<u32>>;
@group(0) @binding(2) var<storage, read> key: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read> value: array<vec4<u32>>;
@group(0) @binding(4) var<storage, read> side: array<u32>;
@group(0) @binding(5) var<storage, read_write> out: array<atomic<u32>>;
@group(0) @binding(6) var<storage, read_write> lse: array<u32>;

// Between the scores of a tile and the next keys, staged_key is where out is rescaled.
var<workgroup> staged_key: array<vec4<u32>, max(TILE_KEYS * KEY_STRIDE, SUBGROUPS * MATRIX * SUM_TILE)>;
var<workgroup> staged_value: array<vec4<u32>, TILE_KEYS * VALUE_STRIDE>;
var<workgroup> scores: array<vec4<u32>, TILE_ROWS * SCORE_STRIDE>;  // f32 scores, then f16 probabilities
var<workgroup> decays: array<f32, TILE_ROWS>;
var<workgroup> rescale: array<atomic<u32>, 4>;   // two are used
fn address(rows: Rows, batch: u32, head: u32, row: u32) -> u32 {
  return rows.base + batch * rows.batch + head * rows.head + row * rows.row;
}
// The first `count` halves of one vector, the others as 0, so that padding never meets memory of others.
fn first_halves(words: vec4<u32>, count: u32) -> vec4<u32> {
  if (count >= 8u) { return words; }
  let low = select(vec4<u32>(), vec4<u32>(0xffffu), vec4<u32>(0u, 2u, 4u, 6u) < vec4<u32>(count));
  let high = select(vec4<u32>(), vec4<u32>(0xffff0000u), vec4<u32>(1u, 3u, 5u, 7u) < vec4<u32>(count));
  return words & (low | high);
}
fn remaining(dim: u32, vector: u32) -> u32 { return select(0u, dim - 8u * vector, 8u * vector < dim); }

// One workgroup: TILE_ROWS rows of one head. It must not hold what differs between lanes: barriers depend on it.
struct Block { s: Sequence, head: u32, kv_head: u32, row0: i32, last_row: i32, key_end: i32 }
// One lane: its subgroup's first row in the tile, its own row, which share of the keys.
struct Lane { thread: u32, first: u32, own: u32, part: u32 }

// ---- query
// Columns of the query, as many as fit where the scores will be, and this subgroup's matrices of them.
fn stage_query(b: Block, me: Lane, first_vec: u32) {
  for (var e = me.thread; e < TILE_ROWS * SCORE_VECS; e += THREADS) {
    let row = b.row0 + i32(e / SCORE_VECS);
    let vector = first_vec + e % SCORE_VECS;
    var words = vec4<u32>();
    if (row <= b.last_row && 8u * vector < p.head_dim) {
      words = query[(address(p.query, b.s.batch, b.head, b.s.q_row0 + u32(row)) >> 4u) + vector];
    }
    scores[e / SCORE_VECS * SCORE_STRIDE + e % SCORE_VECS] = first_halves(words, remaining(p.head_dim, vector));
  }
}
fn query_matrix(b: Block, me: Lane, tile: u32) -> Left {
  if (tile % QUERY_TILES == 0u) {
    workgroupBarrier();
    stage_query(b, me, tile * HALF_TILE);
    workgroupBarrier();
  }
  let at = me.first * SCORE_STRIDE + tile % QUERY_TILES * HALF_TILE;
  return subgroupMatrixLoad<Left, row_major>(&scores, at, SCORE_STRIDE);
}
fn load_query(b: Block, me: Lane) -> Query {
  var q = Query();
  q.a = query_matrix(b, me, 0u);
  if (DIM_TILES > 1u) { q.b = query_matrix(b, me, 1u); }
  if (DIM_TILES > 2u) { q.c = query_matrix(b, me, 2u); }
  if (DIM_TILES > 3u) { q.d = query_matrix(b, me, 3u); }
  if (DIM_TILES > 4u) { q.e = query_matrix(b, me, 4u); }
  if (DIM_TILES > 5u) { q.f = query_matrix(b, me, 5u); }
  if (DIM_TILES > 6u) { q.g = query_matrix(b, me, 6u); }
  if (DIM_TILES > 7u) { q.h = query_matrix(b, me, 7u); }
  return q;
}

// ---- keys and values. The first two vectors of a thread are under way while the step before is computed
struct Ahead { a: vec4<u32>, b: vec4<u32> }
// Vector e of the tile. Rows past the end repeat the last one, whose keys are masked.
fn fetch_key(b: Block, k0: i32, e: u32) -> vec4<u32> {
  let row = u32(min(k0 + i32(e / KEY_VECS), b.key_end - 1));
  let first = address(p.key, b.s.batch, b.kv_head, b.s.k_row0 + row) >> 4u;
  return key[first + min(e % KEY_VECS, (p.head_dim - 1u) / 8u)];
}
fn fetch_value(b: Block, k0: i32, e: u32) -> vec4<u32> {
  let row = u32(min(k0 + i32(e / VALUE_VECS), b.key_end - 1));
  let first = address(p.value, b.s.batch, b.kv_head, b.s.k_row0 + row) >> 4u;
  return value[first + min(e % VALUE_VECS, (p.head_dim_v - 1u) / 8u)];
}
fn fetch_keys(b: Block, me: Lane, k0: i32) -> Ahead {
  return Ahead(fetch_key(b, k0, me.thread), fetch_key(b, k0, me.thread + THREADS));
}
fn fetch_values(b: Block, me: Lane, k0: i32) -> Ahead {
  return Ahead(fetch_value(b, k0, me.thread), fetch_value(b, k0, me.thread + THREADS));
}
fn put_key(e: u32, words: vec4<u32>) {
  if (e >= TILE_KEYS * KEY_VECS) { return; }
  let column = e % KEY_VECS;
  staged_key[e / KEY_VECS * KEY_STRIDE + column] = first_halves(words, remaining(p.head_dim, column));
}
fn put_value(e: u32, words: vec4<u32>) {
  if (e >= TILE_KEYS * VALUE_VECS) { return; }
  let column = e % VALUE_VECS;
  staged_value[e / VALUE_VECS * VALUE_STRIDE + column] = first_halves(words, remaining(p.head_dim_v, column));
}
fn stage_keys(b: Block, me: Lane, k0: i32, ahead: Ahead) {
  put_key(me.thread, ahead.a);
  put_key(me.thread + THREADS, ahead.b);
  for (var e = me.thread + 2u * THREADS; e < TILE_KEYS * KEY_VECS; e += THREADS) { put_key(e, fetch_key(b, k0, e)); }
}
fn stage_values(b: Block, me: Lane, k0: i32, ahead: Ahead) {
  put_value(me.thread, ahead.a);
  put_value(me.thread + THREADS, ahead.b);
  for (var e = me.thread + 2u * THREADS; e < TILE_KEYS * VALUE_VECS; e += THREADS) { put_value(e, fetch_value(b, k0, e)); }
}

// ---- scores = query . key
fn load_key(j: u32, tile: u32) -> Right {
  return subgroupMatrixLoad<Right, col_major>(&staged_key, j * MATRIX * KEY_STRIDE + tile * HALF_TILE, KEY_STRIDE);
}
fn make_scores(me: Lane, q: Query) {
  for (var j = 0u; j < KEY_TILES; j++) {
    var sums = Sums();
    sums = subgroupMatrixMultiplyAccumulate(q.a, load_key(j, 0u), sums);
    if (DIM_TILES > 1u) { sums = subgroupMatrixMultiplyAccumulate(q.b, load_key(j, 1u), sums); }
    if (DIM_TILES > 2u) { sums = subgroupMatrixMultiplyAccumulate(q.c, load_key(j, 2u), sums); }
    if (DIM_TILES > 3u) { sums = subgroupMatrixMultiplyAccumulate(q.d, load_key(j, 3u), sums); }
    if (DIM_TILES > 4u) { sums = subgroupMatrixMultiplyAccumulate(q.e, load_key(j, 4u), sums); }
    if (DIM_TILES > 5u) { sums = subgroupMatrixMultiplyAccumulate(q.f, load_key(j, 5u), sums); }
    if (DIM_TILES > 6u) { sums = subgroupMatrixMultiplyAccumulate(q.g, load_key(j, 6u), sums); }
    if (DIM_TILES > 7u) { sums = subgroupMatrixMultiplyAccumulate(q.h, load_key(j, 7u), sums); }
    subgroupMatrixStore<row_major>(&scores, me.first * SCORE_STRIDE + j * SUM_TILE, sums, SCORE_STRIDE);
  }
}

// ---- score transform, mask and online softmax: this lane's scores of one row
struct Share { a: vec4<f32>, b: vec4<f32>, c: vec4<f32>, d: vec4<f32> }
fn share_at(at: u32) -> Share {
  return Share(bitcast<vec4<f32>>(scores[at]), bitcast<vec4<f32>>(scores[at + 1u]), bitcast<vec4<f32>>(scores[at + 2u]),
               bitcast<vec4<f32>>(scores[at + 3u]));
}
// softcap, bias or ALiBi, in place; in bits
fn transform_scores(b: Block, row: i32, at: u32, key0: i32) {
  for (var i = 0u; i < SHARE / 4u; i++) {
    var x = bitcast<vec4<f32>>(scores[at + i]);
    for (var c = 0u; c < 4u; c++) {
      let position = min(key0 + i32(4u * i + c), b.key_end - 1);
      x[c] = max(LOG2_E * logit(b.s, b.head, row, position, x[c]), MASKED);
    }
    scores[at + i] = bitcast<vec4<u32>>(x);
  }
}
// Those outside of the span count as MASKED.
fn masked(x: vec4<f32>, first: i32, span: vec2<i32>) -> vec4<f32> {
  let position = vec4<i32>(first) + vec4<i32>(0, 1, 2, 3);
  return select(vec4<f32>(MASKED), x, (position >= vec4<i32>(span.x)) & (position < vec4<i32>(span.y)));
}
fn masked_share(x: Share, unit: f32, first: i32, span: vec2<i32>) -> Share {
  return Share(masked(unit * x.a, first, span), masked(unit * x.b, first + 4, span), masked(unit * x.c, first + 8, span),
               masked(unit * x.d, first + 12, span));
}
fn maximum(x: Share) -> f32 {
  let most = max(max(x.a, x.b), max(x.c, x.d));
  return max(max(most.x, most.y), max(most.z, most.w));
}
fn powers(x: vec4<f32>, unit: f32, reference: f32) -> vec4<f32> {
  return exp2(fma(x, vec4<f32>(unit), vec4<f32>(-reference)));
}
fn halves(x: vec4<f32>, y: vec4<f32>) -> vec4<u32> {
  return vec4<u32>(bitcast<vec2<u32>>(vec4<f16>(x)), bitcast<vec2<u32>>(vec4<f16>(y)));
}
struct Softmax { m: f32, l: f32, decay: f32 }  // m: the reference; l: of this lane's own keys
// x times unit: bits. Probabilities take the place of the scores.
fn update_softmax(old: Softmax, x: Share, unit: f32, at: u32) -> Softmax {
  var row_max = unit * maximum(x);
  for (var step = MATRIX; step < SUBGROUP; step *= 2u) { row_max = max(row_max, subgroupShuffleXor(row_max, step)); }
  let m = select(old.m, row_max, row_max > old.m + SLACK);
  let decay = exp2(old.m - m);
  let reference = max(m, SEEN);  // exp2(MASKED - reference) = 0
  let e = Share(powers(x.a, unit, reference), powers(x.b, unit, reference), powers(x.c, unit, reference),
                powers(x.d, unit, reference));
  scores[at] = halves(e.a, e.b);
  scores[at + 1u] = halves(e.c, e.d);
  let sum = (e.a + e.b) + (e.c + e.d);
  return Softmax(m, old.l * decay + (sum.x + sum.y) + (sum.z + sum.w), decay);
}

// ---- out += p . value
// One matrix of out times the decays of its rows. Barriers inside.
fn rescaled(me: Lane, sums: Sums) -> Sums {
  let place = me.first * SUM_TILE;
  subgroupMatrixStore<row_major>(&staged_key, place, sums, SUM_TILE);
  workgroupBarrier();
  for (var i = me.part; i < SUM_TILE; i += ROW_LANES) {
    let at = me.own * SUM_TILE + i;
    staged_key[at] = bitcast<vec4<u32>>(decays[me.own] * bitcast<vec4<f32>>(staged_key[at]));
  }
  workgroupBarrier();
  let by_rows = subgroupMatrixLoad<Sums, row_major>(&staged_key, place, SUM_TILE);
  workgroupBarrier();
  return by_rows;
}
fn rescale_out(me: Lane, acc: Out) -> Out {
  var o = acc;
  o.a = rescaled(me, o.a);
  if (VALUE_TILES > 1u) { o.b = rescaled(me, o.b); }
  if (VALUE_TILES > 2u) { o.c = rescaled(me, o.c); }
  if (VALUE_TILES > 3u) { o.d = rescaled(me, o.d); }
  if (VALUE_TILES > 4u) { o.e = rescaled(me, o.e); }
  if (VALUE_TILES > 5u) { o.f = rescaled(me, o.f); }
  if (VALUE_TILES > 6u) { o.g = rescaled(me, o.g); }
  if (VALUE_TILES > 7u) { o.h = rescaled(me, o.h); }
  return o;
}
fn load_value(j: u32, tile: u32) -> Right {
  return subgroupMatrixLoad<Right, row_major>(&staged_value, j * MATRIX * VALUE_STRIDE + tile * HALF_TILE, VALUE_STRIDE);
}
fn add_values(me: Lane, acc: Out) -> Out {
  var o = acc;
  for (var j = 0u; j < KEY_TILES; j++) {
    // a lane's probabilities lie at the start of its share
    let column = j * MATRIX / SHARE * (SHARE / 4u) + j * MATRIX % SHARE / 8u;
    let w = subgroupMatrixLoad<Left, row_major>(&scores, me.first * SCORE_STRIDE + column, SCORE_STRIDE);
    o.a = subgroupMatrixMultiplyAccumulate(w, load_value(j, 0u), o.a);
    if (VALUE_TILES > 1u) { o.b = subgroupMatrixMultiplyAccumulate(w, load_value(j, 1u), o.b); }
    if (VALUE_TILES > 2u) { o.c = subgroupMatrixMultiplyAccumulate(w, load_value(j, 2u), o.c); }
    if (VALUE_TILES > 3u) { o.d = subgroupMatrixMultiplyAccumulate(w, load_value(j, 3u), o.d); }
    if (VALUE_TILES > 4u) { o.e = subgroupMatrixMultiplyAccumulate(w, load_value(j, 4u), o.e); }
    if (VALUE_TILES > 5u) { o.f = subgroupMatrixMultiplyAccumulate(w, load_value(j, 5u), o.f); }
    if (VALUE_TILES > 6u) { o.g = subgroupMatrixMultiplyAccumulate(w, load_value(j, 6u), o.g); }
    if (VALUE_TILES > 7u) { o.h = subgroupMatrixMultiplyAccumulate(w, load_value(j, 7u), o.h); }
  }
  return o;
}

// ---- the end
// The sums of all lanes of the row and the sink as one more state: 2^m l, l of the whole row.
fn finished(b: Block, state: Softmax) -> Softmax {
  var l = state.l;
  for (var step = MATRIX; step < SUBGROUP; step *= 2u) { l += subgroupShuffleXor(l, step); }
  var m = select(MASKED, state.m, state.m > SEEN);
  l = select(0.0, l, state.m > SEEN);
  var scale = 1.0;
  if (p.sinks != NONE && side[p.sinks + b.head] != 0xff800000u) {
    let sink = LOG2_E * bitcast<f32>(side[p.sinks + b.head]);
    let m_new = max(m, sink);
    scale = exp2(m - m_new);
    l = l * scale + exp2(sink - m_new);
    m = m_new;
  }
  return Softmax(m, l, select(0.0, scale / l, l > 0.0));
}
// Matrix `tile` of out to memory: this lane's share of its row.
fn write_tile(b: Block, me: Lane, tile: u32, sums: Sums, scale: f32, out_at: u32) {
  workgroupBarrier();
  subgroupMatrixStore<row_major>(&scores, me.first * SCORE_STRIDE, sums, SCORE_STRIDE);
  workgroupBarrier();
  if (b.row0 + i32(me.own) > b.last_row) { return; }
  for (var i = 2u * me.part; i < MATRIX; i += 2u * ROW_LANES) {
    let d = tile * MATRIX + i;
    let x = bitcast<vec4<f32>>(scores[me.own * SCORE_STRIDE + i / 4u]);
    let pair = scale * select(x.xy, x.zw, i % 4u == 2u);
    let bits = vec2<u32>(f16_bits(pair.x), f16_bits(pair.y));
    if (d + 1u < p.head_dim_v && (out_at & 1u) == 0u) {
      atomicStore(&out[(out_at + d) >> 1u], bits.x | (bits.y << 16u));
    } else {
      if (d < p.head_dim_v) { store_half(out_at + d, bits.x); }
      if (d + 1u < p.head_dim_v) { store_half(out_at + d + 1u, bits.y); }
    }
  }
}
fn write_results(b: Block, me: Lane, state: Softmax, o: Out) {
  let s = finished(b, state);
  let row = b.row0 + i32(me.own);
  let q_row = b.s.q_row0 + u32(min(row, b.last_row));
  if (row <= b.last_row && me.part == 0u && p.lse.base != NONE) {
    var bits = 0xff800000u;
    if (s.l > 0.0) { bits = bitcast<u32>(s.m / LOG2_E + log(s.l)); }
    lse[address(p.lse, b.s.batch, b.head, q_row) >> 2u] = bits;
  }
  let out_at = address(p.out, b.s.batch, b.head, q_row) >> 1u;
  write_tile(b, me, 0u, o.a, s.decay, out_at);
  if (VALUE_TILES > 1u) { write_tile(b, me, 1u, o.b, s.decay, out_at); }
  if (VALUE_TILES > 2u) { write_tile(b, me, 2u, o.c, s.decay, out_at); }
  if (VALUE_TILES > 3u) { write_tile(b, me, 3u, o.d, s.decay, out_at); }
  if (VALUE_TILES > 4u) { write_tile(b, me, 4u, o.e, s.decay, out_at); }
  if (VALUE_TILES > 5u) { write_tile(b, me, 5u, o.f, s.decay, out_at); }
  if (VALUE_TILES > 6u) { write_tile(b, me, 6u, o.g, s.decay, out_at); }
  if (VALUE_TILES > 7u) { write_tile(b, me, 7u, o.h, s.decay, out_at); }
}

@compute @workgroup_size(THREADS)
fn forward(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32,
           @builtin(subgroup_invocation_id) lane: u32) {
  let tile = row_tile_of(group.y, group.z, TILE_ROWS);
  if (tile.batch == NONE) { return; }
  let s = sequence_of(tile.batch);
  if (tile.row0 >= s.seqlen_q) { return; }
  let last_row = min(tile.row0 + i32(TILE_ROWS), s.seqlen_q) - 1;
  let first_span = span_of(s, tile.row0);
  let last_span = span_of(s, last_row);
  let inside = vec2<i32>(last_span.x, first_span.y);  // keys that every row sees
  let first = thread / SUBGROUP * MATRIX;             // the subgroup's first row in the tile
  let b = Block(s, group.x, group.x / p.group, tile.row0, last_row, last_span.y);
  let me = Lane(thread, first, first + lane % MATRIX, lane / MATRIX);
  let plain = p.softcap == 0.0 && p.bias == NONE && p.alibi == NONE && p.softmax_scale > 0.0;
  let q = load_query(b, me);
  var acc = Out();
  var state = Softmax(MASKED, 0.0, 1.0);
  var parity = 0u;
  var keys = Ahead();
  if (first_span.x < b.key_end) {
    keys = fetch_keys(b, me, first_span.x);
    stage_keys(b, me, first_span.x, keys);
  }
  let row = min(b.row0 + i32(me.own), last_row);
  let at = me.own * SCORE_STRIDE + me.part * (SHARE / 4u);
  for (var k0 = first_span.x; k0 < b.key_end; k0 += i32(TILE_KEYS)) {
    let values = fetch_values(b, me, k0);
    if (thread == 0u) { atomicStore(&rescale[parity], 0u); }
    workgroupBarrier();  // keys are staged, scores and values free
    make_scores(me, q);
    workgroupBarrier();  // scores are made, keys free
    let key0 = k0 + i32(me.part * SHARE);
    if (!plain) { transform_scores(b, row, at, key0); }
    var x = share_at(at);
    var unit = select(1.0, LOG2_E * p.softmax_scale, plain);
    if (k0 < inside.x || k0 + i32(TILE_KEYS) > min(inside.y, b.key_end)) {
      x = masked_share(x, unit, key0, span_of(s, row));
      unit = 1.0;
    }
    let old = state;
    state = update_softmax(old, x, unit, at);
    decays[me.own] = state.decay;
    if (state.m > old.m && old.m > SEEN) { atomicStore(&rescale[parity], 1u); }
    stage_values(b, me, k0, values);
    let moved = workgroupUniformLoad(&rescale[parity]) != 0u;  // barriers inside: probabilities and values are there
    parity = 1u - parity;
    keys = fetch_keys(b, me, k0 + i32(TILE_KEYS));
    if (moved) { acc = rescale_out(me, acc); }
    acc = add_values(me, acc);
    stage_keys(b, me, k0 + i32(TILE_KEYS), keys);
  }
  write_results(b, me, state, acc);
}
