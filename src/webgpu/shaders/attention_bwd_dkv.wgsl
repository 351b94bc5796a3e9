// Backward, dv or dk: one workgroup owns OWN keys of one KV head and walks over every row of every query head
// that sees one of them.
//   p = exp(score - lse),  dv += p dout
//   ds = p (dout . value - delta) d score / d (query . key),  dk += ds query
// One gradient a dispatch: both at once would save one product of eight and cost twice the accumulators. Sums run
// over heads and rows in their order, without atomics: bitwise the same from run to run.

override WANT_KEY: bool = true;  // dk, else dv
// ---- shared: backward tiles
override THREADS: u32 = 64u;        // OWN / 4 * OTHER / 4
override OWN: u32 = 32u;            // rows (or keys) whose gradient the workgroup owns
override OTHER: u32 = 32u;          // keys (or rows) of a tile that it walks over
override DIM_QUADS: u32 = 8u;       // vec4s of a head dim staged at a time
override CHUNK: u32 = 8u;           // rows of the last product staged at a time, a multiple of 4
override COLUMN_VECS: u32 = 2u;     // vec4 columns of the gradient that a thread owns
override STAGE_VECS: u32 = 528u;
override DOUT_FORMAT: u32 = 15u;
const MAX_COLUMN_VECS = 18u;
// ---- end shared
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
@group(0) @binding(4) var<storage, read> dout: array<vec4<u32>>;
@group(0) @binding(5) var<storage, read> stats: array<vec2<f32>>;
@group(0) @binding(6) var<storage, read> side: array<u32>;
@group(0) @binding(7) var<storage, read_write> out: array<atomic<u32>>;

var<workgroup> stage: array<vec4<f32>, STAGE_VECS>;
var<workgroup> weights: array<vec4<f32>, OWN * OTHER / 4u>;
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
// ---- shared: load
fn half_of(word: u32, upper: bool) -> u32 { return select(word & 0xffffu, word >> 16u, upper); }
fn f16_of(bits: u32) -> f32 { return unpack2x16float(bits).x; }
fn bf16_of(bits: u32) -> f32 { return bitcast<f32>(bits << 16u); }
fn f16_quad(w: vec2<u32>) -> vec4<f32> { return vec4<f32>(unpack2x16float(w.x), unpack2x16float(w.y)); }
fn bf16_quad(w: vec2<u32>) -> vec4<f32> {
  return bitcast<vec4<f32>>(vec4<u32>(w.x << 16u, w.x & 0xffff0000u, w.y << 16u, w.y & 0xffff0000u));
}
fn pair_of(words: vec4<u32>, word: u32) -> vec2<u32> { return select(words.xy, words.zw, (word & 2u) != 0u); }
fn pair_quad(words: vec4<u32>, word: u32, format: u32) -> vec4<f32> {
  if (format == F16_VEC) { return f16_quad(pair_of(words, word)); }
  return bf16_quad(pair_of(words, word));
}
// Unaligned rows, value by value: where value d lies, in halves of words, and what it is.
fn half_at(row: u32, d: u32, format: u32) -> u32 {
  return select((row >> 1u) + d, 2u * ((row >> 2u) + d), format == F32_ANY);
}
fn any_value(word: u32, at: u32, format: u32) -> f32 {
  if (format == F32_ANY) { return bitcast<f32>(word); }
  let bits = half_of(word, (at & 1u) != 0u);
  return select(bf16_of(bits), f16_of(bits), format == F16_ANY);
}
// ---- end shared
// ---- shared: backward loads
fn query_value(row: u32, d: u32, format: u32) -> f32 {
  if (d >= p.head_dim) { return 0.0; }
  let at = half_at(row, d, format);
  return any_value(query[at >> 3u][(at >> 1u) & 3u], at, format);
}
fn query_quad(row: u32, quad: u32) -> vec4<f32> {
  let format = select(QUERY_FORMAT, p.query_format, QUERY_FORMAT == RUNTIME);
  if (format == F32_VEC) { return bitcast<vec4<f32>>(query[(row >> 4u) + quad]); }
  let word = (row >> 2u) + 2u * quad;
  if (format <= BF16_VEC) { return pair_quad(query[word >> 2u], word, format); }
  let d = 4u * quad;
  return vec4<f32>(query_value(row, d, format), query_value(row, d + 1u, format), query_value(row, d + 2u, format),
                   query_value(row, d + 3u, format));
}
fn key_value(row: u32, d: u32, format: u32) -> f32 {
  if (d >= p.head_dim) { return 0.0; }
  let at = half_at(row, d, format);
  return any_value(key[at >> 3u][(at >> 1u) & 3u], at, format);
}
fn key_quad(row: u32, quad: u32) -> vec4<f32> {
  let format = select(KEY_FORMAT, p.key_format, KEY_FORMAT == RUNTIME);
  if (format == F32_VEC) { return bitcast<vec4<f32>>(key[(row >> 4u) + quad]); }
  let word = (row >> 2u) + 2u * quad;
  if (format <= BF16_VEC) { return pair_quad(key[word >> 2u], word, format); }
  let d = 4u * quad;
  return vec4<f32>(key_value(row, d, format), key_value(row, d + 1u, format), key_value(row, d + 2u, format),
                   key_value(row, d + 3u, format));
}
fn value_value(row: u32, d: u32, format: u32) -> f32 {
  if (d >= p.head_dim_v) { return 0.0; }
  let at = half_at(row, d, format);
  return any_value(value[at >> 3u][(at >> 1u) & 3u], at, format);
}
fn value_quad(row: u32, quad: u32) -> vec4<f32> {
  let format = select(VALUE_FORMAT, p.value_format, VALUE_FORMAT == RUNTIME);
  if (format == F32_VEC) { return bitcast<vec4<f32>>(value[(row >> 4u) + quad]); }
  let word = (row >> 2u) + 2u * quad;
  if (format <= BF16_VEC) { return pair_quad(value[word >> 2u], word, format); }
  let d = 4u * quad;
  return vec4<f32>(value_value(row, d, format), value_value(row, d + 1u, format), value_value(row, d + 2u, format),
                   value_value(row, d + 3u, format));
}
fn dout_value(row: u32, d: u32, format: u32) -> f32 {
  if (d >= p.head_dim_v) { return 0.0; }
  let at = half_at(row, d, format);
  return any_value(dout[at >> 3u][(at >> 1u) & 3u], at, format);
}
fn dout_quad(row: u32, quad: u32) -> vec4<f32> {
  let format = select(DOUT_FORMAT, p.dout_format, DOUT_FORMAT == RUNTIME);
  if (format == F32_VEC) { return bitcast<vec4<f32>>(dout[(row >> 4u) + quad]); }
  let word = (row >> 2u) + 2u * quad;
  if (format <= BF16_VEC) { return pair_quad(dout[word >> 2u], word, format); }
  let d = 4u * quad;
  return vec4<f32>(dout_value(row, d, format), dout_value(row, d + 1u, format), dout_value(row, d + 2u, format),
                   dout_value(row, d + 3u, format));
}
fn address(rows: Rows, batch: u32, head: u32, row: u32) -> u32 {
  return rows.base + batch * rows.batch + head * rows.head + row * rows.row;
}
// (lse, delta) of a row, made by attention_bwd_delta.wgsl; lse is 0 where the row is empty.
fn stats_of(s: Sequence, head: u32, row: i32) -> vec2<f32> {
  return stats[address(p.stats, s.batch, head, s.q_row0 + u32(row)) >> 3u];
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
// ---- shared: backward score
// x = the logit, or NO_SCORE where the bias masks it; y = d logit / d (query . key)
fn logit_and_slope(s: Sequence, head: u32, row: i32, key: i32, qk: f32) -> vec2<f32> {
  let x = logit(s, head, row, key, qk);
  var slope = p.softmax_scale;
  if (p.softcap != 0.0) {
    let t = tanh_exact(p.softmax_scale * qk / p.softcap);
    slope *= 1.0 - t * t;
  }
  return vec2<f32>(x, slope);
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
// ---- shared: backward products
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
// Values d .. d + 3 (those below `dim`) of the gradient's row at byte `row`; d is a multiple of 4.
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
// ---- end shared
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
      if (gradients) { v = value_quad(address(p.value, b.s.batch, b.kv_head, row), quad); }
      else { v = key_quad(address(p.key, b.s.batch, b.kv_head, row), quad); }
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
