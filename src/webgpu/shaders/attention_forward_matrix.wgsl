// Exact attention, forward, f16 tensors on subgroup matrices with f32 sums (chromium_experimental_subgroup_matrix).
//
// A subgroup owns MATRIX query rows: its query stays in DIM_TILES left matrices, its out in VALUE_TILES result
// matrices, at most 8 each. Scores pass through workgroup memory, because a matrix shows no single element. Rescaling out by rows
// does too, so it is put off: the reference of a row moves only when a maximum beats it by SLACK, and until then
// probabilities may reach exp(SLACK) = 148, far inside f16.
//
// The host prepends what `override` can't say: the extensions and the sizes of arrays of matrices,
//   enable f16; enable subgroups; enable chromium_experimental_subgroup_matrix;
//   const MATRIX = 16u; const SUBGROUP = 32u; const SUBGROUPS = 4u; const KEY_TILES = 4u;
//   const DIM_TILES = 8u; const VALUE_TILES = 8u;

const THREADS = SUBGROUP * SUBGROUPS;
const TILE_ROWS = MATRIX * SUBGROUPS;
const TILE_KEYS = MATRIX * KEY_TILES;
const DIM = MATRIX * DIM_TILES;            // head_dim, zero-padded to whole matrices
const DIM_V = MATRIX * VALUE_TILES;
const WIDE = max(DIM, DIM_V) + 8u;         // strides of staged rows: 16 bytes of padding keep the banks apart
const SCORE_STRIDE = TILE_KEYS + 4u;
const P_STRIDE = TILE_KEYS + 8u;
const ROW_LANES = SUBGROUP / MATRIX;       // lanes that share a row
const SLACK = 5.0;

alias Left = subgroup_matrix_left<f16, MATRIX, MATRIX>;
alias Right = subgroup_matrix_right<f16, MATRIX, MATRIX>;
alias Sums = subgroup_matrix_result<f32, MATRIX, MATRIX>;
// ---- shared: formats
// How rows lie in memory. RUNTIME: the parameters say it (fewer pipelines, slower loads).
const F32_VEC = 0u;
const F16_VEC = 1u;
const BF16_VEC = 2u;
const Q8 = 3u;
const TBQ4 = 4u;
const F32_ANY = 5u;   // any alignment, any head_dim
const F16_ANY = 6u;
const BF16_ANY = 7u;
const RUNTIME = 15u;
override QUERY_FORMAT: u32 = 15u;
override KEY_FORMAT: u32 = 15u;
override VALUE_FORMAT: u32 = 15u;
override OUT_FORMAT: u32 = 15u;
// ---- end shared
// ---- shared: params
// Rows of a tensor, in bytes from the start of the binding. For a cache, `batch` is the stride of a page.
struct Rows { base: u32, batch: u32, head: u32, row: u32 }
struct Params {
  query: Rows, key: Rows, value: Rows, key_scale: Rows, value_scale: Rows, out: Rows, lse: Rows,
  dout: Rows, stats: Rows,  // backward only
  batch: u32, heads: u32, kv_heads: u32, group: u32,
  seqlen_q: u32, seqlen_k: u32, head_dim: u32, head_dim_v: u32,
  query_format: u32, key_format: u32, value_format: u32, out_format: u32,
  diagonal_kind: u32, diagonal: i32, window_left: i32, window_right: i32,
  softmax_scale: f32, softcap: f32, key_block: u32, value_block: u32,
  // word offsets into `side`, NONE = not given, and strides in words
  cu_seqlens_q: u32, cu_seqlens_k: u32, seqlens: u32, seqlens_stride: u32,
  first_position: u32, first_stride: u32, block_table: u32, block_table_row: u32,
  block_table_column: u32, page_shift: u32, key_start: u32, key_start_batch: u32,
  key_end: u32, key_end_batch: u32, alibi: u32, alibi_batch: u32,
  sinks: u32, bias: u32, bias_batch: u32, bias_head: u32,
  bias_row: u32, bias_key: u32, splits: u32, min_split_keys: u32,
  out_split: u32, lse_split: u32, max_splits: u32, page_size: u32,
  dout_format: u32, query_quads: u32, spare0: u32, spare1: u32,
}
const NONE = 0xffffffffu;
// ---- end shared
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> query: array<vec4<u32>>;
@group(0) @binding(2) var<storage, read> key: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read> value: array<vec4<u32>>;
@group(0) @binding(4) var<storage, read> side: array<u32>;
@group(0) @binding(5) var<storage, read_write> out: array<atomic<u32>>;
@group(0) @binding(6) var<storage, read_write> lse: array<u32>;

var<workgroup> staged: array<f16, max(TILE_KEYS, TILE_ROWS) * WIDE>;  // query, then keys and values in turn
var<workgroup> scores: array<f32, TILE_ROWS * SCORE_STRIDE>;
var<workgroup> probabilities: array<f16, TILE_ROWS * P_STRIDE>;
var<workgroup> decays: array<f32, TILE_ROWS>;
var<workgroup> rescale: array<atomic<u32>, 2>;
var<workgroup> rescale_now: u32;
// ---- shared: sequence
// One sequence of the batch and its mask: row i sees keys [begin, end) of span(i), nothing else.
struct Sequence {
  batch: u32, q_row0: u32, k_row0: u32, seqlen_q: i32, key_begin: i32, key_limit: i32, diagonal: i32
}
fn sequence_of(batch: u32) -> Sequence {
  var s = Sequence(batch, 0u, 0u, i32(p.seqlen_q), 0, i32(p.seqlen_k), p.diagonal);
  if (p.cu_seqlens_q != NONE) {
    s.q_row0 = side[p.cu_seqlens_q + batch];
    s.k_row0 = side[p.cu_seqlens_k + batch];
    s.seqlen_q = i32(side[p.cu_seqlens_q + batch + 1u] - s.q_row0);
    s.key_limit = i32(side[p.cu_seqlens_k + batch + 1u] - s.k_row0);
  }
  if (p.seqlens != NONE) { s.key_limit = i32(side[p.seqlens + batch * p.seqlens_stride]); }
  if (p.first_position != NONE) { s.key_begin = i32(side[p.first_position + batch * p.first_stride]); }
  if (p.diagonal_kind == 0u) { s.diagonal = s.key_limit - s.seqlen_q; }
  return s;
}
fn span_of(s: Sequence, row: i32) -> vec2<i32> {
  let position = row + s.diagonal;
  var begin = max(position - p.window_left, s.key_begin);
  var end = min(position + p.window_right + 1, s.key_limit);
  if (p.key_start != NONE) {
    begin = max(begin, bitcast<i32>(side[p.key_start + s.batch * p.key_start_batch + u32(row)]));
  }
  if (p.key_end != NONE) {
    end = min(end, bitcast<i32>(side[p.key_end + s.batch * p.key_end_batch + u32(row)]));
  }
  return vec2<i32>(begin, end);
}
// ---- end shared
// ---- shared: tile of rows
// The sequence of row tile `tile`. Packed batches list their tiles one sequence after the other.
struct RowTile { batch: u32, row0: i32 }
fn row_tile_of(tile: u32, batch: u32, tile_rows: u32) -> RowTile {
  if (p.cu_seqlens_q == NONE) { return RowTile(batch, i32(tile * tile_rows)); }
  var left = tile;
  for (var b = 0u; b < p.batch; b++) {
    let rows = side[p.cu_seqlens_q + b + 1u] - side[p.cu_seqlens_q + b];
    let tiles = (rows + tile_rows - 1u) / tile_rows;
    if (left < tiles) { return RowTile(b, i32(left * tile_rows)); }
    left -= tiles;
  }
  return RowTile(NONE, 0);
}
// ---- end shared
// ---- shared: score
// tanh with a small relative error everywhere: WGSL's own may be off by 1e-5, which softcap multiplies.
fn tanh_exact(x: f32) -> f32 {
  let z = x * x;
  let small = x + x * z * ((((-5.70498872745e-3 * z + 2.06390887954e-2) * z - 5.37397155531e-2) * z
              + 1.33314422036e-1) * z - 3.33332819422e-1);
  let large = 1.0 - 2.0 / (exp(2.0 * min(abs(x), 20.0)) + 1.0);
  return select(sign(x) * large, small, abs(x) < 0.625);
}
const MASKING_BIAS = -1e30;
const NO_SCORE = -3.0e38;  // below every logit; never enters an exponent that counts

// The logit of one pair, or NO_SCORE where the bias masks it.
fn logit(s: Sequence, head: u32, row: i32, key: i32, qk: f32) -> f32 {
  var x = p.softmax_scale * qk;
  if (p.softcap != 0.0) { x = p.softcap * tanh_exact(x / p.softcap); }
  if (p.bias != NONE) {
    let bits = side[p.bias + s.batch * p.bias_batch + head * p.bias_head + u32(row) * p.bias_row + u32(key) * p.bias_key];
    let bias = bitcast<f32>(select(bits, 0xfe967699u, bits >= 0xff800000u));  // -inf as -1e38
    if (bias <= MASKING_BIAS) { return NO_SCORE; }
    x += bias;
  }
  if (p.alibi != NONE) {
    x -= bitcast<f32>(side[p.alibi + s.batch * p.alibi_batch + head]) * f32(abs(row + s.diagonal - key));
  }
  return x;
}
// ---- end shared
// ---- shared: store
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
// ---- end shared
fn address(rows: Rows, batch: u32, head: u32, row: u32) -> u32 {
  return rows.base + batch * rows.batch + head * rows.head + row * rows.row;
}
// 8 values into `staged`; those beyond `count` become 0, so that padding never meets memory of others.
fn put_oct(at: u32, words: vec4<u32>, count: u32) {
  let lanes = array<vec2<f16>, 4>(bitcast<vec2<f16>>(words.x), bitcast<vec2<f16>>(words.y), bitcast<vec2<f16>>(words.z),
                                  bitcast<vec2<f16>>(words.w));
  for (var i = 0u; i < 4u; i++) {
    staged[at + 2u * i] = select(0.0h, lanes[i].x, 2u * i < count);
    staged[at + 2u * i + 1u] = select(0.0h, lanes[i].y, 2u * i + 1u < count);
  }
}
fn remaining(dim: u32, d: u32) -> u32 { return select(0u, dim - d, d < dim); }

struct Block { s: Sequence, head: u32, row0: i32, kv_head: u32 }
fn stage_query(b: Block, thread: u32) {
  for (var e = thread; e < TILE_ROWS * (DIM / 8u); e += THREADS) {
    let r = e / (DIM / 8u);
    let d = 8u * (e % (DIM / 8u));
    var words = vec4<u32>();
    if (b.row0 + i32(r) < b.s.seqlen_q && d < p.head_dim) {
      words = query[(address(p.query, b.s.batch, b.head, b.s.q_row0 + u32(b.row0) + r) + 2u * d) >> 4u];
    }
    put_oct(r * WIDE + d, words, remaining(p.head_dim, d));
  }
}
fn stage_key(b: Block, k0: i32, key_end: i32, thread: u32) {
  for (var e = thread; e < TILE_KEYS * (DIM / 8u); e += THREADS) {
    let r = e / (DIM / 8u);
    let d = 8u * (e % (DIM / 8u));
    var words = vec4<u32>();
    if (k0 + i32(r) < key_end && d < p.head_dim) {
      words = key[(address(p.key, b.s.batch, b.kv_head, b.s.k_row0 + u32(k0) + r) + 2u * d) >> 4u];
    }
    put_oct(r * WIDE + d, words, remaining(p.head_dim, d));
  }
}
fn stage_value(b: Block, k0: i32, key_end: i32, thread: u32) {
  for (var e = thread; e < TILE_KEYS * (DIM_V / 8u); e += THREADS) {
    let r = e / (DIM_V / 8u);
    let d = 8u * (e % (DIM_V / 8u));
    var words = vec4<u32>();
    if (k0 + i32(r) < key_end && d < p.head_dim_v) {
      words = value[(address(p.value, b.s.batch, b.kv_head, b.s.k_row0 + u32(k0) + r) + 2u * d) >> 4u];
    }
    put_oct(r * WIDE + d, words, remaining(p.head_dim_v, d));
  }
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
fn load_query(own0: u32, tile: u32) -> Left {
  return subgroupMatrixLoad<Left>(&staged, own0 * WIDE + tile * MATRIX, false, WIDE);
}
fn load_key(j: u32, tile: u32) -> Right {
  return subgroupMatrixLoad<Right>(&staged, j * MATRIX * WIDE + tile * MATRIX, true, WIDE);
}
fn load_value(j: u32, tile: u32) -> Right {
  return subgroupMatrixLoad<Right>(&staged, j * MATRIX * WIDE + tile * MATRIX, false, WIDE);
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
  stage_query(b, thread);
  workgroupBarrier();
  var q0 = load_query(own0, 0u);
  var q1 = Left();
  if (DIM_TILES > 1u) { q1 = load_query(own0, 1u); }
  var q2 = Left();
  if (DIM_TILES > 2u) { q2 = load_query(own0, 2u); }
  var q3 = Left();
  if (DIM_TILES > 3u) { q3 = load_query(own0, 3u); }
  var q4 = Left();
  if (DIM_TILES > 4u) { q4 = load_query(own0, 4u); }
  var q5 = Left();
  if (DIM_TILES > 5u) { q5 = load_query(own0, 5u); }
  var q6 = Left();
  if (DIM_TILES > 6u) { q6 = load_query(own0, 6u); }
  var q7 = Left();
  if (DIM_TILES > 7u) { q7 = load_query(own0, 7u); }
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

  for (var k0 = hull.x; k0 < hull.y; k0 += i32(TILE_KEYS)) {
    // scores = query . key
    workgroupBarrier();
    stage_key(b, k0, hull.y, thread);
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
    for (var at = 2u * part; at < TILE_KEYS; at += 2u * ROW_LANES) {
      row_max = max(row_max, unit * scores[own * SCORE_STRIDE + at]);
      row_max = max(row_max, unit * scores[own * SCORE_STRIDE + at + 1u]);
    }
    for (var step = 1u; step < ROW_LANES; step *= 2u) { row_max = max(row_max, subgroupShuffleXor(row_max, step)); }
    let moves = row_max > m + SLACK;
    let m_new = select(m, row_max, moves);
    let decay = select(1.0, exp(m - m_new), moves && m > NO_SCORE);
    if (moves && m > NO_SCORE) { atomicStore(&rescale[parity], 1u); }
    decays[own] = decay;
    l *= decay;
    m = m_new;
    for (var at = 2u * part; at < TILE_KEYS; at += 2u * ROW_LANES) {
      let x = vec2<f32>(unit * scores[own * SCORE_STRIDE + at], unit * scores[own * SCORE_STRIDE + at + 1u]);
      let e = select(exp(x - m), vec2<f32>(), x <= vec2<f32>(NO_SCORE));
      l += e.x + e.y;
      probabilities[own * P_STRIDE + at] = f16(e.x);
      probabilities[own * P_STRIDE + at + 1u] = f16(e.y);
    }
    // out += p . value
    stage_value(b, k0, hull.y, thread);
    workgroupBarrier();
    if (thread == 0u) { rescale_now = atomicLoad(&rescale[parity]); }
    parity = 1u - parity;
    if (workgroupUniformLoad(&rescale_now) != 0u) {
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
