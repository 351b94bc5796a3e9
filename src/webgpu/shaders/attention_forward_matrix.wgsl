// Exact attention, forward, f16 tensors on subgroup matrices with f32 sums (chromium_experimental_subgroup_matrix).
//
// A subgroup owns MATRIX query rows: its query stays in DIM_TILES left matrices, its out in VALUE_TILES result
// matrices, at most 8 each. Scores pass through workgroup memory, because a matrix shows no single element. Rescaling out by rows
// does too, so it is put off: the reference of a row moves only when a maximum beats it by SLACK, and until then
// probabilities may reach exp(SLACK) = 148, far inside f16.
//
// The host prepends what `override` can't say: the extensions and the sizes of arrays of matrices,
//   enable f16; enable subgroups; enable chromium_experimental_subgroup_matrix;
//   const MATRIX = 16u; const SUBGROUP = 32u; const SUBGROUPS = 4u;
//   const DIM_TILES = 8u; const VALUE_TILES = 8u;
// common: formats params sequence row_tile score store

const THREADS = SUBGROUP * SUBGROUPS;
const TILE_ROWS = MATRIX * SUBGROUPS;
const ROW_LANES = SUBGROUP / MATRIX;       // lanes that share a row
const TILE_KEYS = 16u * ROW_LANES;         // 16 scores a lane
const KEY_TILES = TILE_KEYS / MATRIX;
const DIM = MATRIX * DIM_TILES;            // head_dim, zero-padded to whole matrices
const DIM_V = MATRIX * VALUE_TILES;
const WIDE = max(DIM, DIM_V) + 8u;         // strides of staged rows: 16 bytes of padding keep the banks apart
const SCORE_STRIDE = TILE_KEYS + 4u;
const P_STRIDE = TILE_KEYS + 8u;
const SLACK = 5.0;

alias Left = subgroup_matrix_left<f16, MATRIX, MATRIX>;
alias Right = subgroup_matrix_right<f16, MATRIX, MATRIX>;
alias Sums = subgroup_matrix_result<f32, MATRIX, MATRIX>;
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> query: array<vec4<u32>>;
@group(0) @binding(2) var<storage, read> key: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read> value: array<vec4<u32>>;
@group(0) @binding(4) var<storage, read> side: array<u32>;
@group(0) @binding(5) var<storage, read_write> out: array<atomic<u32>>;
@group(0) @binding(6) var<storage, read_write> lse: array<u32>;

// Matrices are loaded and stored 16 bytes at a time, but an array of f16 only asks for an alignment of 2: everything
// here is a multiple of 16 bytes, so that no small variable can push an array off its alignment.
var<workgroup> staged_key: array<f16, TILE_KEYS * WIDE>;
var<workgroup> staged_value: array<f16, TILE_KEYS * WIDE>;
var<workgroup> scores: array<f32, TILE_ROWS * SCORE_STRIDE>;
var<workgroup> probabilities: array<f16, TILE_ROWS * P_STRIDE>;
var<workgroup> decays: array<f32, TILE_ROWS>;
var<workgroup> rescale: array<atomic<u32>, 4>;   // two are used
fn address(rows: Rows, batch: u32, head: u32, row: u32) -> u32 {
  return rows.base + batch * rows.batch + head * rows.head + row * rows.row;
}
// The halves of one 16-byte vector, those beyond `count` as 0, so that padding never meets memory of others.
struct Oct { a: vec4<f16>, b: vec4<f16> }
fn oct_of(words: vec4<u32>, count: u32) -> Oct {
  let a = vec4<f16>(bitcast<vec2<f16>>(words.x), bitcast<vec2<f16>>(words.y));
  let b = vec4<f16>(bitcast<vec2<f16>>(words.z), bitcast<vec2<f16>>(words.w));
  if (count >= 8u) { return Oct(a, b); }
  return Oct(select(vec4<f16>(), a, vec4<u32>(0u, 1u, 2u, 3u) < vec4<u32>(count)),
             select(vec4<f16>(), b, vec4<u32>(4u, 5u, 6u, 7u) < vec4<u32>(count)));
}
fn remaining(dim: u32, d: u32) -> u32 { return select(0u, dim - d, d < dim); }

struct Block { s: Sequence, head: u32, row0: i32, kv_head: u32 }
// TILE_KEYS columns of the query at a time, where the probabilities will be.
fn stage_query(b: Block, first_column: u32, thread: u32) {
  for (var e = thread; e < TILE_ROWS * (TILE_KEYS / 8u); e += THREADS) {
    let r = e / (TILE_KEYS / 8u);
    let d = 8u * (e % (TILE_KEYS / 8u));
    var words = vec4<u32>();
    if (b.row0 + i32(r) < b.s.seqlen_q && first_column + d < p.head_dim) {
      words = query[(address(p.query, b.s.batch, b.head, b.s.q_row0 + u32(b.row0) + r) + 2u * (first_column + d)) >> 4u];
    }
    let o = oct_of(words, remaining(p.head_dim, first_column + d));
    for (var i = 0u; i < 4u; i++) {
      probabilities[r * P_STRIDE + d + i] = o.a[i];
      probabilities[r * P_STRIDE + d + 4u + i] = o.b[i];
    }
  }
}
fn query_matrix(b: Block, own0: u32, tile: u32, thread: u32) -> Left {
  if (tile % KEY_TILES == 0u) {
    workgroupBarrier();
    stage_query(b, tile * MATRIX, thread);
    workgroupBarrier();
  }
  return subgroupMatrixLoad<Left>(&probabilities, own0 * P_STRIDE + tile % KEY_TILES * MATRIX, false, P_STRIDE);
}
// One 16-byte vector of a row: number e of the tile. Rows past the end repeat the last one, whose keys are masked.
fn fetch_key(b: Block, k0: i32, key_end: i32, e: u32) -> vec4<u32> {
  let row = u32(min(k0 + i32(e / (DIM / 8u)), key_end - 1));
  let d = min(8u * (e % (DIM / 8u)), (p.head_dim - 1u) / 8u * 8u);
  return key[(address(p.key, b.s.batch, b.kv_head, b.s.k_row0 + row) + 2u * d) >> 4u];
}
fn fetch_value(b: Block, k0: i32, key_end: i32, e: u32) -> vec4<u32> {
  let row = u32(min(k0 + i32(e / (DIM_V / 8u)), key_end - 1));
  let d = min(8u * (e % (DIM_V / 8u)), (p.head_dim_v - 1u) / 8u * 8u);
  return value[(address(p.value, b.s.batch, b.kv_head, b.s.k_row0 + row) + 2u * d) >> 4u];
}
// The first two vectors of a thread: under way while the step before is computed. The rest is read when it is staged.
struct Ahead { a: vec4<u32>, b: vec4<u32> }
fn fetch_keys(b: Block, k0: i32, key_end: i32, thread: u32) -> Ahead {
  return Ahead(fetch_key(b, k0, key_end, thread), fetch_key(b, k0, key_end, thread + THREADS));
}
fn fetch_values(b: Block, k0: i32, key_end: i32, thread: u32) -> Ahead {
  return Ahead(fetch_value(b, k0, key_end, thread), fetch_value(b, k0, key_end, thread + THREADS));
}
fn put_key(e: u32, words: vec4<u32>) {
  if (e >= TILE_KEYS * (DIM / 8u)) { return; }
  let o = oct_of(words, remaining(p.head_dim, 8u * (e % (DIM / 8u))));
  let at = e / (DIM / 8u) * WIDE + 8u * (e % (DIM / 8u));
  staged_key[at] = o.a.x;
  staged_key[at + 1u] = o.a.y;
  staged_key[at + 2u] = o.a.z;
  staged_key[at + 3u] = o.a.w;
  staged_key[at + 4u] = o.b.x;
  staged_key[at + 5u] = o.b.y;
  staged_key[at + 6u] = o.b.z;
  staged_key[at + 7u] = o.b.w;
}
fn put_value(e: u32, words: vec4<u32>) {
  if (e >= TILE_KEYS * (DIM_V / 8u)) { return; }
  let o = oct_of(words, remaining(p.head_dim_v, 8u * (e % (DIM_V / 8u))));
  let at = e / (DIM_V / 8u) * WIDE + 8u * (e % (DIM_V / 8u));
  staged_value[at] = o.a.x;
  staged_value[at + 1u] = o.a.y;
  staged_value[at + 2u] = o.a.z;
  staged_value[at + 3u] = o.a.w;
  staged_value[at + 4u] = o.b.x;
  staged_value[at + 5u] = o.b.y;
  staged_value[at + 6u] = o.b.z;
  staged_value[at + 7u] = o.b.w;
}
fn stage_key(b: Block, k0: i32, key_end: i32, thread: u32, ahead: Ahead) {
  put_key(thread, ahead.a);
  put_key(thread + THREADS, ahead.b);
  for (var e = thread + 2u * THREADS; e < TILE_KEYS * (DIM / 8u); e += THREADS) { put_key(e, fetch_key(b, k0, key_end, e)); }
}
fn stage_value(b: Block, k0: i32, key_end: i32, thread: u32, ahead: Ahead) {
  put_value(thread, ahead.a);
  put_value(thread + THREADS, ahead.b);
  for (var e = thread + 2u * THREADS; e < TILE_KEYS * (DIM_V / 8u); e += THREADS) { put_value(e, fetch_value(b, k0, key_end, e)); }
}
// One matrix of out, `tile` columns to the right, from `scores` to memory: this lane's share of its row.
fn write_columns(tile: u32, own: u32, part: u32, scale: f32, out_at: u32) {
  for (var i = 2u * part; i < MATRIX; i += 2u * ROW_LANES) {
    let d = tile * MATRIX + i;
    let pair = vec2<u32>(f16_bits(scale * scores[own * SCORE_STRIDE + i]),
                         f16_bits(scale * scores[own * SCORE_STRIDE + i + 1u]));
    if (d + 1u < p.head_dim_v && (out_at & 1u) == 0u) {
      atomicStore(&out[(out_at + d) >> 1u], pair.x | (pair.y << 16u));
    } else {
      if (d < p.head_dim_v) { store_half(out_at + d, pair.x); }
      if (d + 1u < p.head_dim_v) { store_half(out_at + d + 1u, pair.y); }
    }
  }
}
// The score transform and mask of this lane's keys of its row, in place.
fn mask_scores(b: Block, row: i32, k0: i32, key_end: i32, own: u32, part: u32) {
  let span = span_of(b.s, row);
  for (var at = 2u * part; at < TILE_KEYS; at += 2u * ROW_LANES) {
    for (var i = 0u; i < 2u; i++) {
      let position = k0 + i32(at + i);
      var score = NO_SCORE;
      if (position >= span.x && position < min(span.y, key_end)) {
        score = logit(b.s, b.head, row, position, scores[own * SCORE_STRIDE + at + i]);
      }
      scores[own * SCORE_STRIDE + at + i] = score;
    }
  }
}
// The part of `out` in `scores` times the decay of its rows.
fn rescale_scores(own: u32, part: u32) {
  workgroupBarrier();
  for (var i = part; i < MATRIX; i += ROW_LANES) { scores[own * SCORE_STRIDE + i] *= decays[own]; }
  workgroupBarrier();
}
fn load_key(j: u32, tile: u32) -> Right {
  return subgroupMatrixLoad<Right>(&staged_key, j * MATRIX * WIDE + tile * MATRIX, true, WIDE);
}
fn load_value(j: u32, tile: u32) -> Right {
  return subgroupMatrixLoad<Right>(&staged_value, j * MATRIX * WIDE + tile * MATRIX, false, WIDE);
}
// Four pairs of this lane's scores, 2 ROW_LANES apart, `unit` times. (All 16 scores kept in registers between the maximum
// and the exponentials: 8% slower at 128 columns on an H200.)
struct Pairs { a: vec2<f32>, b: vec2<f32>, c: vec2<f32>, d: vec2<f32> }
fn pair_at(at: u32) -> vec2<f32> { return vec2<f32>(scores[at], scores[at + 1u]); }
fn pairs_at(at: u32, unit: f32) -> Pairs {
  let q = Pairs(pair_at(at), pair_at(at + 2u * ROW_LANES), pair_at(at + 4u * ROW_LANES), pair_at(at + 6u * ROW_LANES));
  return Pairs(unit * q.a, unit * q.b, unit * q.c, unit * q.d);
}
fn largest(x: Pairs) -> f32 {
  let most = max(max(x.a, x.b), max(x.c, x.d));
  return max(most.x, most.y);
}
fn exponentials(x: vec2<f32>, m: f32) -> vec2<f32> { return select(exp(x - m), vec2<f32>(), x <= vec2<f32>(NO_SCORE)); }
fn put_pair(at: u32, e: vec2<f32>) {
  probabilities[at] = f16(e.x);
  probabilities[at + 1u] = f16(e.y);
}
// exp(x - m) into `probabilities`; returns the sum.
fn put_probabilities(at: u32, x: Pairs, m: f32) -> f32 {
  let e = Pairs(exponentials(x.a, m), exponentials(x.b, m), exponentials(x.c, m), exponentials(x.d, m));
  put_pair(at, e.a);
  put_pair(at + 2u * ROW_LANES, e.b);
  put_pair(at + 4u * ROW_LANES, e.c);
  put_pair(at + 6u * ROW_LANES, e.d);
  let sum = (e.a + e.b) + (e.c + e.d);
  return sum.x + sum.y;
}

@compute @workgroup_size(THREADS)
fn forward(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32,
           @builtin(subgroup_invocation_id) lane: u32) {
  let tile = row_tile_of(group.x, group.z, TILE_ROWS);
  if (tile.batch == NONE) { return; }
  let b = Block(sequence_of(tile.batch), group.y, tile.row0, group.y / p.group);
  if (b.row0 >= b.s.seqlen_q) { return; }
  let own0 = thread / SUBGROUP * MATRIX;      // the subgroup's first row in the tile
  let own = own0 + lane / ROW_LANES;          // this lane's row, of which it holds every ROW_LANES-th pair of keys
  let part = lane % ROW_LANES;

  let last_row = min(b.row0 + i32(TILE_ROWS), b.s.seqlen_q) - 1;
  let row = min(b.row0 + i32(own), last_row);
  let first_span = span_of(b.s, b.row0);
  let last_span = span_of(b.s, last_row);
  let hull = vec2<i32>(first_span.x, last_span.y);
  let inside = vec2<i32>(last_span.x, first_span.y);
  let plain = p.softcap == 0.0 && p.bias == NONE && p.alibi == NONE;
  // Matrices have names, not indices: an index left to run time would move them out of registers.
  var q0 = query_matrix(b, own0, 0u, thread);
  var q1 = Left();
  if (DIM_TILES > 1u) { q1 = query_matrix(b, own0, 1u, thread); }
  var q2 = Left();
  if (DIM_TILES > 2u) { q2 = query_matrix(b, own0, 2u, thread); }
  var q3 = Left();
  if (DIM_TILES > 3u) { q3 = query_matrix(b, own0, 3u, thread); }
  var q4 = Left();
  if (DIM_TILES > 4u) { q4 = query_matrix(b, own0, 4u, thread); }
  var q5 = Left();
  if (DIM_TILES > 5u) { q5 = query_matrix(b, own0, 5u, thread); }
  var q6 = Left();
  if (DIM_TILES > 6u) { q6 = query_matrix(b, own0, 6u, thread); }
  var q7 = Left();
  if (DIM_TILES > 7u) { q7 = query_matrix(b, own0, 7u, thread); }
  var acc0 = Sums();
  var acc1 = Sums();
  var acc2 = Sums();
  var acc3 = Sums();
  var acc4 = Sums();
  var acc5 = Sums();
  var acc6 = Sums();
  var acc7 = Sums();
  var m = NO_SCORE;  // the reference of the row: its maximum, or up to SLACK below
  var l = 0.0;       // of this lane's own keys
  var parity = 0u;

  // Four barriers a tile: keys are staged again when all scores of the tile before are made, values when all its
  // weighted sums are.
  var next_key = Ahead();
  if (hull.x < hull.y) { next_key = fetch_keys(b, hull.x, hull.y, thread); }
  for (var k0 = hull.x; k0 < hull.y; k0 += i32(TILE_KEYS)) {
    // scores = query . key
    stage_key(b, k0, hull.y, thread, next_key);
    let next_value = fetch_values(b, k0, hull.y, thread);
    if (thread == 0u) { atomicStore(&rescale[parity], 0u); }
    workgroupBarrier();
    for (var j = 0u; j < KEY_TILES; j++) {
      var sums = Sums();
      sums = subgroupMatrixMultiplyAccumulate(q0, load_key(j, 0u), sums);
      if (DIM_TILES > 1u) { sums = subgroupMatrixMultiplyAccumulate(q1, load_key(j, 1u), sums); }
      if (DIM_TILES > 2u) { sums = subgroupMatrixMultiplyAccumulate(q2, load_key(j, 2u), sums); }
      if (DIM_TILES > 3u) { sums = subgroupMatrixMultiplyAccumulate(q3, load_key(j, 3u), sums); }
      if (DIM_TILES > 4u) { sums = subgroupMatrixMultiplyAccumulate(q4, load_key(j, 4u), sums); }
      if (DIM_TILES > 5u) { sums = subgroupMatrixMultiplyAccumulate(q5, load_key(j, 5u), sums); }
      if (DIM_TILES > 6u) { sums = subgroupMatrixMultiplyAccumulate(q6, load_key(j, 6u), sums); }
      if (DIM_TILES > 7u) { sums = subgroupMatrixMultiplyAccumulate(q7, load_key(j, 7u), sums); }
      subgroupMatrixStore(&scores, own0 * SCORE_STRIDE + j * MATRIX, sums, false, SCORE_STRIDE);
    }
    workgroupBarrier();
    // score transform, mask and online softmax: this lane's keys of its row
    let edge = !plain || k0 < inside.x || k0 + i32(TILE_KEYS) > min(inside.y, hull.y);
    if (edge) { mask_scores(b, row, k0, hull.y, own, part); }
    let unit = select(p.softmax_scale, 1.0, edge);
    var row_max = NO_SCORE;
    for (var at = 2u * part; at < TILE_KEYS; at += 8u * ROW_LANES) {
      row_max = max(row_max, largest(pairs_at(own * SCORE_STRIDE + at, unit)));
    }
    for (var step = 1u; step < ROW_LANES; step *= 2u) { row_max = max(row_max, subgroupShuffleXor(row_max, step)); }
    let moves = row_max > m + SLACK;
    let m_new = select(m, row_max, moves);
    let decay = select(1.0, exp(m - m_new), moves && m > NO_SCORE);
    if (moves && m > NO_SCORE) { atomicStore(&rescale[parity], 1u); }
    decays[own] = decay;
    l *= decay;
    m = m_new;
    for (var at = 2u * part; at < TILE_KEYS; at += 8u * ROW_LANES) {
      l += put_probabilities(own * P_STRIDE + at, pairs_at(own * SCORE_STRIDE + at, unit), m);
    }
    // out += p . value
    stage_value(b, k0, hull.y, thread, next_value);
    let moved = workgroupUniformLoad(&rescale[parity]) != 0u;  // barriers inside
    parity = 1u - parity;
    next_key = fetch_keys(b, k0 + i32(TILE_KEYS), hull.y, thread);
    if (moved) {
      subgroupMatrixStore(&scores, own0 * SCORE_STRIDE, acc0, false, SCORE_STRIDE);
      rescale_scores(own, part);
      acc0 = subgroupMatrixLoad<Sums>(&scores, own0 * SCORE_STRIDE, false, SCORE_STRIDE);
      workgroupBarrier();
      if (VALUE_TILES > 1u) {
        subgroupMatrixStore(&scores, own0 * SCORE_STRIDE, acc1, false, SCORE_STRIDE);
        rescale_scores(own, part);
        acc1 = subgroupMatrixLoad<Sums>(&scores, own0 * SCORE_STRIDE, false, SCORE_STRIDE);
        workgroupBarrier();
      }
      if (VALUE_TILES > 2u) {
        subgroupMatrixStore(&scores, own0 * SCORE_STRIDE, acc2, false, SCORE_STRIDE);
        rescale_scores(own, part);
        acc2 = subgroupMatrixLoad<Sums>(&scores, own0 * SCORE_STRIDE, false, SCORE_STRIDE);
        workgroupBarrier();
      }
      if (VALUE_TILES > 3u) {
        subgroupMatrixStore(&scores, own0 * SCORE_STRIDE, acc3, false, SCORE_STRIDE);
        rescale_scores(own, part);
        acc3 = subgroupMatrixLoad<Sums>(&scores, own0 * SCORE_STRIDE, false, SCORE_STRIDE);
        workgroupBarrier();
      }
      if (VALUE_TILES > 4u) {
        subgroupMatrixStore(&scores, own0 * SCORE_STRIDE, acc4, false, SCORE_STRIDE);
        rescale_scores(own, part);
        acc4 = subgroupMatrixLoad<Sums>(&scores, own0 * SCORE_STRIDE, false, SCORE_STRIDE);
        workgroupBarrier();
      }
      if (VALUE_TILES > 5u) {
        subgroupMatrixStore(&scores, own0 * SCORE_STRIDE, acc5, false, SCORE_STRIDE);
        rescale_scores(own, part);
        acc5 = subgroupMatrixLoad<Sums>(&scores, own0 * SCORE_STRIDE, false, SCORE_STRIDE);
        workgroupBarrier();
      }
      if (VALUE_TILES > 6u) {
        subgroupMatrixStore(&scores, own0 * SCORE_STRIDE, acc6, false, SCORE_STRIDE);
        rescale_scores(own, part);
        acc6 = subgroupMatrixLoad<Sums>(&scores, own0 * SCORE_STRIDE, false, SCORE_STRIDE);
        workgroupBarrier();
      }
      if (VALUE_TILES > 7u) {
        subgroupMatrixStore(&scores, own0 * SCORE_STRIDE, acc7, false, SCORE_STRIDE);
        rescale_scores(own, part);
        acc7 = subgroupMatrixLoad<Sums>(&scores, own0 * SCORE_STRIDE, false, SCORE_STRIDE);
        workgroupBarrier();
      }
    }
    for (var j = 0u; j < KEY_TILES; j++) {
      let w = subgroupMatrixLoad<Left>(&probabilities, own0 * P_STRIDE + j * MATRIX, false, P_STRIDE);
      acc0 = subgroupMatrixMultiplyAccumulate(w, load_value(j, 0u), acc0);
      if (VALUE_TILES > 1u) { acc1 = subgroupMatrixMultiplyAccumulate(w, load_value(j, 1u), acc1); }
      if (VALUE_TILES > 2u) { acc2 = subgroupMatrixMultiplyAccumulate(w, load_value(j, 2u), acc2); }
      if (VALUE_TILES > 3u) { acc3 = subgroupMatrixMultiplyAccumulate(w, load_value(j, 3u), acc3); }
      if (VALUE_TILES > 4u) { acc4 = subgroupMatrixMultiplyAccumulate(w, load_value(j, 4u), acc4); }
      if (VALUE_TILES > 5u) { acc5 = subgroupMatrixMultiplyAccumulate(w, load_value(j, 5u), acc5); }
      if (VALUE_TILES > 6u) { acc6 = subgroupMatrixMultiplyAccumulate(w, load_value(j, 6u), acc6); }
      if (VALUE_TILES > 7u) { acc7 = subgroupMatrixMultiplyAccumulate(w, load_value(j, 7u), acc7); }
    }
  }
  // the sums of all lanes of the row, and the sink as one more state
  for (var step = 1u; step < ROW_LANES; step *= 2u) { l += subgroupShuffleXor(l, step); }
  var scale = 1.0;
  if (p.sinks != NONE && side[p.sinks + b.head] != 0xff800000u) {
    let sink = bitcast<f32>(side[p.sinks + b.head]);
    let m_new = max(select(NO_SCORE, m, l > 0.0), sink);
    scale = exp(m - m_new);
    l = l * scale + exp(sink - m_new);
    m = m_new;
  }
  scale = select(0.0, scale / l, l > 0.0);
  let seen = b.row0 + i32(own) <= last_row;
  if (seen && part == 0u && p.lse.base != NONE) {
    var bits = 0xff800000u;
    if (l > 0.0) { bits = bitcast<u32>(m + log(l)); }
    lse[address(p.lse, b.s.batch, b.head, b.s.q_row0 + u32(row)) >> 2u] = bits;
  }
  let out_at = address(p.out, b.s.batch, b.head, b.s.q_row0 + u32(row)) >> 1u;
  workgroupBarrier();
  subgroupMatrixStore(&scores, own0 * SCORE_STRIDE, acc0, false, SCORE_STRIDE);
  workgroupBarrier();
  if (seen) { write_columns(0u, own, part, scale, out_at); }
  if (VALUE_TILES > 1u) {
    workgroupBarrier();
    subgroupMatrixStore(&scores, own0 * SCORE_STRIDE, acc1, false, SCORE_STRIDE);
    workgroupBarrier();
    if (seen) { write_columns(1u, own, part, scale, out_at); }
  }
  if (VALUE_TILES > 2u) {
    workgroupBarrier();
    subgroupMatrixStore(&scores, own0 * SCORE_STRIDE, acc2, false, SCORE_STRIDE);
    workgroupBarrier();
    if (seen) { write_columns(2u, own, part, scale, out_at); }
  }
  if (VALUE_TILES > 3u) {
    workgroupBarrier();
    subgroupMatrixStore(&scores, own0 * SCORE_STRIDE, acc3, false, SCORE_STRIDE);
    workgroupBarrier();
    if (seen) { write_columns(3u, own, part, scale, out_at); }
  }
  if (VALUE_TILES > 4u) {
    workgroupBarrier();
    subgroupMatrixStore(&scores, own0 * SCORE_STRIDE, acc4, false, SCORE_STRIDE);
    workgroupBarrier();
    if (seen) { write_columns(4u, own, part, scale, out_at); }
  }
  if (VALUE_TILES > 5u) {
    workgroupBarrier();
    subgroupMatrixStore(&scores, own0 * SCORE_STRIDE, acc5, false, SCORE_STRIDE);
    workgroupBarrier();
    if (seen) { write_columns(5u, own, part, scale, out_at); }
  }
  if (VALUE_TILES > 6u) {
    workgroupBarrier();
    subgroupMatrixStore(&scores, own0 * SCORE_STRIDE, acc6, false, SCORE_STRIDE);
    workgroupBarrier();
    if (seen) { write_columns(6u, own, part, scale, out_at); }
  }
  if (VALUE_TILES > 7u) {
    workgroupBarrier();
    subgroupMatrixStore(&scores, own0 * SCORE_STRIDE, acc7, false, SCORE_STRIDE);
    workgroupBarrier();
    if (seen) { write_columns(7u, own, part, scale, out_at); }
  }
}
