// Exact attention, forward, in core WGSL: no extension, no subgroups, f32 arithmetic, any storage format.
//
// One workgroup computes TILE_ROWS query rows of one head. It walks over the keys that its rows see, TILE_KEYS
// at a time: scores = query . key, score transform, mask by two integers, online softmax, out += p . value.
// Thread (ty, tx) owns rows 4 ty .. 4 ty + 3: of the scores keys 4 tx .. 4 tx + 3, of out the vec4 columns
// tx, tx + TX, ...
// ---- tiles (src/webgpu/tiles.hpp has the table; TX = TILE_KEYS / 4 threads share a row)
override THREADS: u32 = 64u;        // TILE_ROWS / 4 * TILE_KEYS / 4
override TILE_ROWS: u32 = 32u;
override TILE_KEYS: u32 = 32u;
override DIM_QUADS: u32 = 8u;       // vec4s of head_dim staged at a time
override VALUE_KEYS: u32 = 8u;      // keys of the value tile staged at a time, a multiple of 4
override COLUMN_VECS: u32 = 2u;     // vec4 columns of out that a thread owns; TX * COLUMN_VECS cover head_dim_v
override STAGE_VECS: u32 = 528u;    // the larger of the query + key chunk and the value chunk
const MAX_COLUMN_VECS = 18u;
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
@group(0) @binding(4) var<storage, read> key_scale: array<u32>;
@group(0) @binding(5) var<storage, read> value_scale: array<u32>;
@group(0) @binding(6) var<storage, read> side: array<u32>;
@group(0) @binding(7) var<storage, read_write> out: array<atomic<u32>>;
@group(0) @binding(8) var<storage, read_write> lse: array<u32>;
var<workgroup> stage: array<vec4<f32>, STAGE_VECS>;
var<workgroup> probabilities: array<vec4<f32>, TILE_ROWS * TILE_KEYS / 4u>;
var<workgroup> row_maxima: array<vec4<f32>, TILE_ROWS * TILE_KEYS / 16u>;
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
// ---- shared: codes
fn q8_quad(word: u32, scale: f32) -> vec4<f32> {
  let codes = vec4<u32>(word << 24u, word << 16u, word << 8u, word);
  return vec4<f32>(bitcast<vec4<i32>>(codes) >> vec4<u32>(24u)) * scale;
}
// Codes ascend with the centroid; 8..15 are the positive half, 7..0 its mirror.
fn centroid(code: u32) -> f32 {
  let i = select(7u - code, code - 8u, code >= 8u);
  let a = select(select(0.12839503, 0.38804830, i == 1u), select(0.65675912, 0.94234046, i == 3u), i >= 2u);
  let b = select(select(1.25623120, 1.61804639, i == 5u), select(2.06901723, 2.73258957, i == 7u), i >= 6u);
  let magnitude = select(a, b, i >= 4u);
  return select(-magnitude, magnitude, code >= 8u);
}
// ---- end shared
// Values 4 quad .. 4 quad + 3 of a coded row, out of the word that holds them.
fn code_quad(word: u32, quad: u32, norm: f32, format: u32) -> vec4<f32> {
  if (format == Q8) { return q8_quad(word, norm); }
  let codes = word >> (16u * (quad & 1u));
  return norm * vec4<f32>(centroid(codes & 15u), centroid((codes >> 4u) & 15u), centroid((codes >> 8u) & 15u),
                          centroid((codes >> 12u) & 15u));
}
// Values 4 quad .. 4 quad + 3 of the row at byte `row`.
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
fn key_quad(row: u32, scale_row: u32, quad: u32) -> vec4<f32> {
  let format = select(KEY_FORMAT, p.key_format, KEY_FORMAT == RUNTIME);
  if (format == F32_VEC) { return bitcast<vec4<f32>>(key[(row >> 4u) + quad]); }
  let word = (row >> 2u) + 2u * quad;
  if (format <= BF16_VEC) { return pair_quad(key[word >> 2u], word, format); }
  if (format <= TBQ4) {
    let scale = (scale_row >> 1u) + 4u * quad / p.key_block;
    let norm = f16_of(half_of(key_scale[scale >> 1u], (scale & 1u) != 0u));
    let at = (row >> 2u) + select(quad, quad >> 1u, format == TBQ4);
    return code_quad(key[at >> 2u][at & 3u], quad, norm, format);
  }
  let d = 4u * quad;
  return vec4<f32>(key_value(row, d, format), key_value(row, d + 1u, format), key_value(row, d + 2u, format),
                   key_value(row, d + 3u, format));
}
fn value_value(row: u32, d: u32, format: u32) -> f32 {
  if (d >= p.head_dim_v) { return 0.0; }
  let at = half_at(row, d, format);
  return any_value(value[at >> 3u][(at >> 1u) & 3u], at, format);
}
fn value_quad(row: u32, scale_row: u32, quad: u32) -> vec4<f32> {
  let format = select(VALUE_FORMAT, p.value_format, VALUE_FORMAT == RUNTIME);
  if (format == F32_VEC) { return bitcast<vec4<f32>>(value[(row >> 4u) + quad]); }
  let word = (row >> 2u) + 2u * quad;
  if (format <= BF16_VEC) { return pair_quad(value[word >> 2u], word, format); }
  if (format <= TBQ4) {
    let scale = (scale_row >> 1u) + 4u * quad / p.value_block;
    let norm = f16_of(half_of(value_scale[scale >> 1u], (scale & 1u) != 0u));
    let at = (row >> 2u) + select(quad, quad >> 1u, format == TBQ4);
    return code_quad(value[at >> 2u][at & 3u], quad, norm, format);
  }
  let d = 4u * quad;
  return vec4<f32>(value_value(row, d, format), value_value(row, d + 1u, format), value_value(row, d + 2u, format),
                   value_value(row, d + 3u, format));
}
// ---- shared: key address
// Where the row of key `position` lies: x = page or batch entry, y = row inside it.
fn key_place(s: Sequence, position: i32) -> vec2<u32> {
  let offset = u32(position - s.key_begin);
  if (p.block_table == NONE) { return vec2<u32>(s.batch, s.k_row0 + offset); }
  var page = offset >> p.page_shift;
  if (p.page_size != (1u << p.page_shift)) { page = offset / p.page_size; }
  let token = offset - page * p.page_size;
  return vec2<u32>(side[p.block_table + s.batch * p.block_table_row + page * p.block_table_column], token);
}
fn address(rows: Rows, place: vec2<u32>, head: u32) -> u32 {
  return rows.base + place.x * rows.batch + head * rows.head + place.y * rows.row;
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
// Values d .. d + 3 (those below head_dim_v) of the row at byte `row`; d is a multiple of 4.
fn store_quad(row: u32, d: u32, v: vec4<f32>) {
  let format = select(OUT_FORMAT, p.out_format, OUT_FORMAT == RUNTIME);
  let count = min(4u, p.head_dim_v - d);
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
// ---- shared: split
// The part of `keys` that split number `split` works on: whole tiles, from the length of the sequence alone.
fn share_of(keys: vec2<i32>, split: u32, tile_keys: i32) -> vec2<i32> {
  if (p.splits == 1u) { return keys; }
  let length = max(keys.y - keys.x, 0);
  let even = (length + i32(p.max_splits) - 1) / i32(p.max_splits);
  let share = (max(even, i32(p.min_split_keys)) + tile_keys - 1) / tile_keys * tile_keys;
  let begin = min(keys.x + i32(split) * share, max(keys.y, keys.x));
  return vec2<i32>(begin, min(begin + share, keys.y));
}
// ---- end shared
// ---- the steps of one tile, in the order of the equations

struct Block { s: Sequence, head: u32, row0: i32, kv_head: u32 }
// Rows of query beside keys: one chunk of the head dim. A vec4 of padding after four rows keeps the banks apart.
fn stage_scores(b: Block, k0: i32, key_end: i32, first_quad: u32, thread: u32) {
  for (var e = thread; e < (TILE_ROWS + TILE_KEYS) * DIM_QUADS; e += THREADS) {
    let r = e / DIM_QUADS;
    let quad = first_quad + e % DIM_QUADS;
    let row = b.row0 + i32(r);
    let position = k0 + i32(r) - i32(TILE_ROWS);
    var v = vec4<f32>();
    if (r < TILE_ROWS && row < b.s.seqlen_q && 4u * quad < p.head_dim) {
      v = query_quad(address(p.query, vec2<u32>(b.s.batch, b.s.q_row0 + u32(row)), b.head), quad);
    }
    if (r >= TILE_ROWS && position < key_end && 4u * quad < p.head_dim) {
      let place = key_place(b.s, position);
      v = key_quad(address(p.key, place, b.kv_head), address(p.key_scale, place, b.kv_head), quad);
    }
    stage[e + (r >> 2u)] = v;
  }
}
fn stage_value(b: Block, k0: i32, key_end: i32, thread: u32) {
  let columns = TILE_KEYS / 4u * COLUMN_VECS;
  for (var e = thread; e < VALUE_KEYS * columns; e += THREADS) {
    let quad = e % columns;
    let position = k0 + i32(e / columns);
    var v = vec4<f32>();
    if (position < key_end && 4u * quad < p.head_dim_v) {
      let place = key_place(b.s, position);
      v = value_quad(address(p.value, place, b.kv_head), address(p.value_scale, place, b.kv_head), quad);
    }
    stage[e] = v;
  }
}
// One logit, or NO_SCORE where the row's span or the bias masks the key.
fn masked_logit(b: Block, row: i32, span: vec2<i32>, key: i32, qk: f32) -> f32 {
  if (key < span.x || key >= span.y) { return NO_SCORE; }
  return logit(b.s, b.head, row, key, qk);
}
fn masked_logits(b: Block, tile_row: u32, last_row: i32, key: i32, key_end: i32, qk: vec4<f32>) -> vec4<f32> {
  let row = min(b.row0 + i32(tile_row), last_row);
  var span = span_of(b.s, row);
  span.y = min(span.y, key_end);
  return vec4<f32>(masked_logit(b, row, span, key, qk.x), masked_logit(b, row, span, key + 1, qk.y),
                   masked_logit(b, row, span, key + 2, qk.z), masked_logit(b, row, span, key + 3, qk.w));
}
fn largest(v: vec4<f32>) -> f32 { return max(max(v.x, v.y), max(v.z, v.w)); }
fn write_lse(b: Block, tile_row: u32, last_row: i32, split: u32, m: f32, l: f32) {
  let row = b.row0 + i32(tile_row);
  if (row > last_row) { return; }
  let at = p.lse.base + split * p.lse_split + b.s.batch * p.lse.batch + b.head * p.lse.head
         + (b.s.q_row0 + u32(row)) * p.lse.row;
  lse[at >> 2u] = select(0xff800000u, bitcast<u32>(m + log(max(l, 1e-37))), l > 0.0);  // -inf: the row sees no key
}

@compute @workgroup_size(THREADS)
fn forward(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
  let split = group.x % p.splits;
  let tile = row_tile_of(group.x / p.splits, group.z, TILE_ROWS);
  if (tile.batch == NONE) { return; }
  let b = Block(sequence_of(tile.batch), group.y, tile.row0, group.y / p.group);
  if (b.row0 >= b.s.seqlen_q) { return; }
  let tx = thread % (TILE_KEYS / 4u);
  let ty = thread / (TILE_KEYS / 4u);
  // Spans never decrease with the row: the tile's keys lie between the first row's begin and the last row's end.
  let last_row = min(b.row0 + i32(TILE_ROWS), b.s.seqlen_q) - 1;
  let first_span = span_of(b.s, b.row0);
  let last_span = span_of(b.s, last_row);
  var hull = vec2<i32>(first_span.x, last_span.y);
  let inside = vec2<i32>(last_span.x, first_span.y);
  hull = share_of(hull, split, i32(TILE_KEYS));
  var m = vec4<f32>(NO_SCORE);
  var l = vec4<f32>();  // of this thread's own keys
  var acc: array<array<vec4<f32>, 4>, MAX_COLUMN_VECS>;

  for (var k0 = hull.x; k0 < hull.y; k0 += i32(TILE_KEYS)) {
    // scores = query . key
    var s = array<vec4<f32>, 4>();  // said aloud: a declaration alone is not renewed by every compiler in a loop
    for (var d0 = 0u; 4u * d0 < p.head_dim; d0 += DIM_QUADS) {
      workgroupBarrier();
      stage_scores(b, k0, hull.y, d0, thread);
      workgroupBarrier();
      let q_at = 4u * ty * DIM_QUADS + ty;
      let k_at = TILE_ROWS * DIM_QUADS + TILE_ROWS / 4u + 4u * tx * DIM_QUADS + tx;
      for (var d = 0u; d < DIM_QUADS; d++) {
        let ka = stage[k_at + d];
        let kb = stage[k_at + DIM_QUADS + d];
        let kc = stage[k_at + 2u * DIM_QUADS + d];
        let kd = stage[k_at + 3u * DIM_QUADS + d];
        for (var i = 0u; i < 4u; i++) {
          let q = stage[q_at + i * DIM_QUADS + d];
          s[i] = fma(vec4<f32>(q.x), vec4<f32>(ka.x, kb.x, kc.x, kd.x), s[i]);
          s[i] = fma(vec4<f32>(q.y), vec4<f32>(ka.y, kb.y, kc.y, kd.y), s[i]);
          s[i] = fma(vec4<f32>(q.z), vec4<f32>(ka.z, kb.z, kc.z, kd.z), s[i]);
          s[i] = fma(vec4<f32>(q.w), vec4<f32>(ka.w, kb.w, kc.w, kd.w), s[i]);
        }
      }
    }
    // score transform and mask
    let edge = k0 < inside.x || k0 + i32(TILE_KEYS) > min(inside.y, hull.y);
    let plain = p.softcap == 0.0 && p.bias == NONE && p.alibi == NONE;
    if (plain && !edge) {
      for (var i = 0u; i < 4u; i++) { s[i] *= p.softmax_scale; }
    } else {
      let key0 = k0 + 4 * i32(tx);
      s[0] = masked_logits(b, 4u * ty, last_row, key0, hull.y, s[0]);
      s[1] = masked_logits(b, 4u * ty + 1u, last_row, key0, hull.y, s[1]);
      s[2] = masked_logits(b, 4u * ty + 2u, last_row, key0, hull.y, s[2]);
      s[3] = masked_logits(b, 4u * ty + 3u, last_row, key0, hull.y, s[3]);
    }
    let tile_max = vec4<f32>(largest(s[0]), largest(s[1]), largest(s[2]), largest(s[3]));
    // online softmax
    row_maxima[tx * (TILE_ROWS / 4u) + ty] = tile_max;
    workgroupBarrier();
    var m_new = m;
    for (var x = 0u; x < TILE_KEYS / 4u; x++) { m_new = max(m_new, row_maxima[x * (TILE_ROWS / 4u) + ty]); }
    let decay = exp(m - m_new);
    m = m_new;
    for (var i = 0u; i < 4u; i++) {
      let e = select(exp(s[i] - m[i]), vec4<f32>(), s[i] <= vec4<f32>(NO_SCORE));
      l[i] = l[i] * decay[i] + (e.x + e.y) + (e.z + e.w);
      probabilities[(4u * ty + i) * (TILE_KEYS / 4u) + tx] = e;
    }
    for (var c = 0u; c < 4u * COLUMN_VECS; c++) { acc[c / 4u][c % 4u] *= decay[c % 4u]; }
    // out += p . value
    for (var v0 = 0u; v0 < TILE_KEYS; v0 += VALUE_KEYS) {
      workgroupBarrier();
      stage_value(b, k0 + i32(v0), hull.y, thread);
      workgroupBarrier();
      for (var j = 0u; j < VALUE_KEYS / 4u; j++) {
        let p_at = 4u * ty * (TILE_KEYS / 4u) + v0 / 4u + j;
        let pa = probabilities[p_at];
        let pb = probabilities[p_at + TILE_KEYS / 4u];
        let pc = probabilities[p_at + TILE_KEYS / 2u];
        let pd = probabilities[p_at + TILE_KEYS / 4u * 3u];
        for (var c = 0u; c < COLUMN_VECS; c++) {
          for (var u = 0u; u < 4u; u++) {
            let v = stage[(4u * j + u) * (TILE_KEYS / 4u * COLUMN_VECS) + c * (TILE_KEYS / 4u) + tx];
            acc[c][0] = fma(vec4<f32>(pa[u]), v, acc[c][0]);
            acc[c][1] = fma(vec4<f32>(pb[u]), v, acc[c][1]);
            acc[c][2] = fma(vec4<f32>(pc[u]), v, acc[c][2]);
            acc[c][3] = fma(vec4<f32>(pd[u]), v, acc[c][3]);
          }
        }
      }
    }
  }
  // the sums of all threads of a row, and the sink as one more state
  workgroupBarrier();
  row_maxima[tx * (TILE_ROWS / 4u) + ty] = l;
  workgroupBarrier();
  l = vec4<f32>();
  for (var x = 0u; x < TILE_KEYS / 4u; x++) { l += row_maxima[x * (TILE_ROWS / 4u) + ty]; }
  var scale = vec4<f32>(1.0);
  if (p.sinks != NONE && side[p.sinks + b.head] != 0xff800000u) {
    let sink = bitcast<f32>(side[p.sinks + b.head]);
    let m_new = max(select(vec4<f32>(NO_SCORE), m, l > vec4<f32>()), vec4<f32>(sink));
    scale = exp(m - m_new);
    l = l * scale + exp(vec4<f32>(sink) - m_new);
    m = m_new;
  }
  scale = select(vec4<f32>(), scale / l, l > vec4<f32>());

  if (tx == 0u && p.lse.base != NONE) {
    write_lse(b, 4u * ty, last_row, split, m.x, l.x);
    write_lse(b, 4u * ty + 1u, last_row, split, m.y, l.y);
    write_lse(b, 4u * ty + 2u, last_row, split, m.z, l.z);
    write_lse(b, 4u * ty + 3u, last_row, split, m.w, l.w);
  }
  // One vec4 column of every thread at a time, through workgroup memory: rows are written side by side, and no
  // index into the accumulators is left to run time, which would move them out of registers.
  let threads_x = TILE_KEYS / 4u;
  for (var column = 0u; column < COLUMN_VECS; column++) {
    var rows = acc[0];
    for (var c = 1u; c < COLUMN_VECS; c++) { if (c == column) { rows = acc[c]; } }
    workgroupBarrier();
    for (var i = 0u; i < 4u; i++) { stage[(4u * ty + i) * threads_x + tx] = rows[i] * scale[i]; }
    workgroupBarrier();
    for (var e = thread; e < TILE_ROWS * threads_x; e += THREADS) {
      let row = b.row0 + i32(e / threads_x);
      let d = 4u * (column * threads_x + e % threads_x);
      if (row <= last_row && d < p.head_dim_v) {
        let at = address(p.out, vec2<u32>(b.s.batch, b.s.q_row0 + u32(row)), b.head) + split * p.out_split;
        store_quad(at, d, stage[e]);
      }
    }
  }
}
