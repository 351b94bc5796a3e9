// Attention of few query rows over many keys: decode. Bound by memory, so every byte of the keys and values of a KV
// head is read once for all rows of its query heads, many loads at a time, and nothing waits for a neighbour but the
// softmax of a step.
// common: formats params sequence load codes code_vectors key_address score split
//
// One workgroup takes up to ROWS (query row, head of the group) pairs and one split of the keys; its state
// (out, lse) goes to attention_merge.wgsl. A step covers THREADS * STEP_TILES keys:
//   scores: thread t reads key t of each tile, four 16-byte vectors at a time, and decodes it once for all ROWS
//     products (codes stay codes until then), so no sum crosses threads;
//   online softmax: one maximum a step and row;
//   out += p . value: thread (g, o) owns columns 8 o .. 8 o + 7 of every G-th key, four or eight keys at a time;
//     the G partial sums meet once, at the end.
// What a thread keeps has names, not indices: an index left to run time would move it out of the registers.

override THREADS: u32 = 128u;
override ROWS: u32 = 4u;           // 1, 2, 4 or 8
override STEP_TILES: u32 = 1u;     // tiles of THREADS keys between two maxima
override TWO_KEYS: bool = false;    // a thread takes two keys at a time; STEP_TILES is even
override QUERY_VECS: u32 = 128u;   // ROWS * p.query_quads, or more

@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> query: array<u32>;
@group(0) @binding(2) var<storage, read> key: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read> value: array<vec4<u32>>;
@group(0) @binding(4) var<storage, read> key_scale: array<u32>;
@group(0) @binding(5) var<storage, read> value_scale: array<u32>;
@group(0) @binding(6) var<storage, read> side: array<u32>;
@group(0) @binding(7) var<storage, read_write> out: array<vec4<f32>>;
@group(0) @binding(8) var<storage, read_write> lse: array<u32>;

var<workgroup> queries: array<vec4<f32>, QUERY_VECS>;
var<workgroup> probabilities: array<f32, ROWS * THREADS * STEP_TILES>;
var<workgroup> partial: array<f32, ROWS * THREADS>;
var<workgroup> reduced: array<f32, ROWS * 8u>;
var<workgroup> sums_of_threads: array<f32, ROWS * THREADS>;  // of probabilities, each thread's own keys
var<workgroup> row_max: array<f32, ROWS>;
var<workgroup> row_decay: array<f32, ROWS>;
var<workgroup> partial_out: array<vec4<f32>, 2u * THREADS>;

struct Block { s: Sequence, kv_head: u32, row0: u32, row_end: u32, split: u32, keys: vec2<i32> }
struct PerRow { lo: vec4<f32>, hi: vec4<f32> }  // one number for each row
struct Eight {                                   // one vec4 for each row
  a: vec4<f32>, b: vec4<f32>, c: vec4<f32>, d: vec4<f32>, e: vec4<f32>, f: vec4<f32>, g: vec4<f32>, h: vec4<f32>
}
struct Output { a: Eight, b: Eight }             // columns 8 o .. 8 o + 3, 8 o + 4 .. 8 o + 7
struct Four { a: vec4<u32>, b: vec4<u32>, c: vec4<u32>, d: vec4<u32> }

// ---- query
fn query_element(row: u32, d: u32) -> f32 {
  if (d >= p.head_dim) { return 0.0; }
  if (p.query_format == F32_VEC) { return bitcast<f32>(query[(row >> 2u) + d]); }
  let at = (row >> 1u) + d;
  let bits = half_of(query[at >> 1u], (at & 1u) != 0u);
  return select(bf16_of(bits), f16_of(bits), p.query_format == F16_VEC);
}
// All rows as f32, zero beyond head_dim and beyond the last row.
fn stage_queries(b: Block, thread: u32) {
  for (var e = thread; e < ROWS * p.query_quads; e += THREADS) {
    let r = b.row0 + e / p.query_quads;
    let d = 4u * (e % p.query_quads);
    var q = vec4<f32>();
    if (r < b.row_end) {
      let row = address(p.query, vec2<u32>(b.s.batch, r / p.group), b.kv_head * p.group + r % p.group);
      q = vec4<f32>(query_element(row, d), query_element(row, d + 1u), query_element(row, d + 2u), query_element(row, d + 3u));
    }
    queries[e] = q;
  }
}

// ---- scores
fn dot_more(at: u32, k: vec4<f32>, sum: f32) -> f32 {
  let q = queries[at];
  return fma(q.w, k.w, fma(q.z, k.z, fma(q.y, k.y, fma(q.x, k.x, sum))));
}
// sum += quad `at` of every query row . k
fn dots(at: u32, k: vec4<f32>, sum: PerRow) -> PerRow {
  var s = sum;
  let n = p.query_quads;
  s.lo.x = dot_more(at, k, s.lo.x);
  if (ROWS > 1u) { s.lo.y = dot_more(at + n, k, s.lo.y); }
  if (ROWS > 2u) {
    s.lo.z = dot_more(at + 2u * n, k, s.lo.z);
    s.lo.w = dot_more(at + 3u * n, k, s.lo.w);
  }
  if (ROWS > 4u) {
    s.hi = vec4<f32>(dot_more(at + 4u * n, k, s.hi.x), dot_more(at + 5u * n, k, s.hi.y),
                     dot_more(at + 6u * n, k, s.hi.z), dot_more(at + 7u * n, k, s.hi.w));
  }
  return s;
}
// One 16-byte vector of a key against the queries from quad `at` on.
fn vector_dots(raw: vec4<u32>, format: u32, at: u32, scale: f32, lane: u32, sum: PerRow) -> PerRow {
  if (format == F32_VEC) { return dots(at, bitcast<vec4<f32>>(raw), sum); }
  if (format == F16_VEC) { return dots(at + 1u, f16_quad(raw.zw), dots(at, f16_quad(raw.xy), sum)); }
  if (format == BF16_VEC) { return dots(at + 1u, bf16_quad(raw.zw), dots(at, bf16_quad(raw.xy), sum)); }
  var part = PerRow();
  if (format == Q8) {
    part = dots(at, q8_quad(raw.x, 1.0), part);
    part = dots(at + 1u, q8_quad(raw.y, 1.0), part);
    part = dots(at + 2u, q8_quad(raw.z, 1.0), part);
    part = dots(at + 3u, q8_quad(raw.w, 1.0), part);
  } else {
    part = dots(at + 1u, tbq4_quad(raw.x >> 16u, lane), dots(at, tbq4_quad(raw.x, lane), part));
    part = dots(at + 3u, tbq4_quad(raw.y >> 16u, lane), dots(at + 2u, tbq4_quad(raw.y, lane), part));
    part = dots(at + 5u, tbq4_quad(raw.z >> 16u, lane), dots(at + 4u, tbq4_quad(raw.z, lane), part));
    part = dots(at + 7u, tbq4_quad(raw.w >> 16u, lane), dots(at + 6u, tbq4_quad(raw.w, lane), part));
  }
  return PerRow(fma(vec4<f32>(scale), part.lo, sum.lo), fma(vec4<f32>(scale), part.hi, sum.hi));
}
fn key_scale_of(scale_row: u32, vector: u32, format: u32) -> f32 {
  if (format != Q8 && format != TBQ4) { return 1.0; }
  let first = min(vector * 4u * quads_in_vector(format), p.head_dim - 1u);  // blocks are powers of two
  let at = (scale_row >> 1u) + (first >> firstTrailingBit(p.key_block));
  return f16_of(half_of(key_scale[at >> 1u], (at & 1u) != 0u));
}
struct KeyRow { row: u32, scale_row: u32 }  // in vectors; in bytes
fn key_row(place: vec2<u32>, kv_head: u32) -> KeyRow {
  return KeyRow(address(p.key, place, kv_head) >> 4u, address(p.key_scale, place, kv_head));
}
fn fetch_vectors(k: KeyRow, at: vec4<u32>) -> Four {
  return Four(key[k.row + at.x], key[k.row + at.y], key[k.row + at.z], key[k.row + at.w]);
}
fn fetch_key_scales(k: KeyRow, at: vec4<u32>, format: u32) -> vec4<f32> {
  return vec4<f32>(key_scale_of(k.scale_row, at.x, format), key_scale_of(k.scale_row, at.y, format),
                   key_scale_of(k.scale_row, at.z, format), key_scale_of(k.scale_row, at.w, format));
}
struct TwoKeys { a: PerRow, b: PerRow }
// query . key for every row and two keys: they share what is read of the queries, and twice as much is under way.
// Vectors past the end repeat the last one, against zeros.
fn key_dots(k: KeyRow, k2: KeyRow, lane: u32) -> TwoKeys {
  let format = select(KEY_FORMAT, p.key_format, KEY_FORMAT == RUNTIME);
  let quads = quads_in_vector(format);
  let last = (p.head_dim + 4u * quads - 1u) / (4u * quads) - 1u;
  var s = TwoKeys();
  for (var v = 0u; v <= last; v += 4u) {
    let at = min(vec4<u32>(v, v + 1u, v + 2u, v + 3u), vec4<u32>(last));
    let raw = fetch_vectors(k, at);
    var raw2 = Four();
    if (TWO_KEYS) { raw2 = fetch_vectors(k2, at); }
    let scale = fetch_key_scales(k, at, format);
    var scale2 = vec4<f32>();
    if (TWO_KEYS) { scale2 = fetch_key_scales(k2, at, format); }
    s.a = vector_dots(raw.a, format, v * quads, scale.x, lane, s.a);
    if (TWO_KEYS) { s.b = vector_dots(raw2.a, format, v * quads, scale2.x, lane, s.b); }
    s.a = vector_dots(raw.b, format, (v + 1u) * quads, scale.y, lane, s.a);
    if (TWO_KEYS) { s.b = vector_dots(raw2.b, format, (v + 1u) * quads, scale2.y, lane, s.b); }
    s.a = vector_dots(raw.c, format, (v + 2u) * quads, scale.z, lane, s.a);
    if (TWO_KEYS) { s.b = vector_dots(raw2.c, format, (v + 2u) * quads, scale2.z, lane, s.b); }
    s.a = vector_dots(raw.d, format, (v + 3u) * quads, scale.w, lane, s.a);
    if (TWO_KEYS) { s.b = vector_dots(raw2.d, format, (v + 3u) * quads, scale2.w, lane, s.b); }
  }
  return s;
}
// Score transform and mask of one row and key.
fn masked_logit(b: Block, r: u32, position: i32, qk: f32) -> f32 {
  let pair = b.row0 + r;
  if (pair >= b.row_end || position >= b.keys.y) { return NO_SCORE; }
  let row = i32(pair / p.group);
  let span = span_of(b.s, row);
  if (position < span.x || position >= span.y) { return NO_SCORE; }
  return logit(b.s, b.kv_head * p.group + pair % p.group, row, position, qk);
}
// The scores of this thread's key of tile `tile` into `probabilities`, their maximum into `partial`.
fn write_scores(b: Block, tile: u32, position: i32, thread: u32, s: PerRow) {
  let at = tile * THREADS + thread;
  let step = THREADS * STEP_TILES;
  probabilities[at] = s.lo.x;
  if (ROWS > 1u) { probabilities[at + step] = s.lo.y; }
  if (ROWS > 2u) {
    probabilities[at + 2u * step] = s.lo.z;
    probabilities[at + 3u * step] = s.lo.w;
  }
  if (ROWS > 4u) {
    probabilities[at + 4u * step] = s.hi.x;
    probabilities[at + 5u * step] = s.hi.y;
    probabilities[at + 6u * step] = s.hi.z;
    probabilities[at + 7u * step] = s.hi.w;
  }
  for (var r = 0u; r < ROWS; r++) {
    let x = masked_logit(b, r, position, probabilities[r * step + at]);
    probabilities[r * step + at] = x;
    partial[r * THREADS + thread] = max(partial[r * THREADS + thread], x);
  }
}

// ---- online softmax
// The maximum of each row over the step, in two strides, and the decay of what was summed before.
fn update_maxima(thread: u32) {
  workgroupBarrier();
  for (var e = thread; e < ROWS * 8u; e += THREADS) {
    var x = NO_SCORE;
    for (var i = 0u; i < THREADS / 8u; i++) { x = max(x, partial[(e >> 3u) * THREADS + (e & 7u) + 8u * i]); }
    reduced[e] = x;
  }
  workgroupBarrier();
  if (thread < ROWS) {
    var m = row_max[thread];
    for (var i = 0u; i < 8u; i++) { m = max(m, reduced[8u * thread + i]); }
    row_decay[thread] = exp(row_max[thread] - m);
    row_max[thread] = m;
  }
  workgroupBarrier();
}
fn exponentiate(tiles: u32, thread: u32) {
  for (var r = 0u; r < ROWS; r++) {
    var sum = sums_of_threads[r * THREADS + thread] * row_decay[r];
    for (var tile = 0u; tile < tiles; tile++) {
      let at = (r * STEP_TILES + tile) * THREADS + thread;
      let x = probabilities[at];
      let e = select(exp(x - row_max[r]), 0.0, x <= NO_SCORE);
      probabilities[at] = e;
      sum += e;
    }
    sums_of_threads[r * THREADS + thread] = sum;
  }
  workgroupBarrier();
}
fn decayed(v: Eight) -> Eight {
  var e = v;
  e.a *= row_decay[0];
  if (ROWS > 1u) { e.b *= row_decay[1u % ROWS]; }
  if (ROWS > 2u) {
    e.c *= row_decay[2u % ROWS];
    e.d *= row_decay[3u % ROWS];
  }
  if (ROWS > 4u) {
    e.e *= row_decay[4u % ROWS];
    e.f *= row_decay[5u % ROWS];
    e.g *= row_decay[6u % ROWS];
    e.h *= row_decay[7u % ROWS];
  }
  return e;
}

// ---- out += p . value
struct RawValue { a: vec4<u32>, b: vec4<u32>, scale: f32 }  // the values of a thread as they lie
struct Values { a: vec4<f32>, b: vec4<f32> }
fn fetch_value(b: Block, position: i32, o: u32, format: u32) -> RawValue {
  let place = key_place(b.s, position);
  let row = address(p.value, place, b.kv_head);
  if (format == F32_VEC) {
    let last = p.head_dim_v / 4u - 1u;
    return RawValue(value[(row >> 4u) + 2u * o], value[(row >> 4u) + min(2u * o + 1u, last)], 1.0);
  }
  if (format == F16_VEC || format == BF16_VEC) { return RawValue(value[(row >> 4u) + o], vec4<u32>(), 1.0); }
  let at = (address(p.value_scale, place, b.kv_head) >> 1u) + ((8u * o) >> firstTrailingBit(p.value_block));
  let scale = f16_of(half_of(value_scale[at >> 1u], (at & 1u) != 0u));
  let word = (row >> 2u) + select(o, 2u * o, format == Q8);
  let words = value[word >> 2u];
  let pair = pair_of(words, word);
  return RawValue(vec4<u32>(select(pair.x, pair.y, format == TBQ4 && (word & 1u) != 0u), pair.y, 0u, 0u), vec4<u32>(), scale);
}
// Without their scale.
fn values_of(raw: RawValue, format: u32, lane: u32) -> Values {
  if (format == F32_VEC) { return Values(bitcast<vec4<f32>>(raw.a), bitcast<vec4<f32>>(raw.b)); }
  if (format == F16_VEC) { return Values(f16_quad(raw.a.xy), f16_quad(raw.a.zw)); }
  if (format == BF16_VEC) { return Values(bf16_quad(raw.a.xy), bf16_quad(raw.a.zw)); }
  if (format == Q8) { return Values(q8_quad(raw.a.x, 1.0), q8_quad(raw.a.y, 1.0)); }
  return Values(tbq4_quad(raw.a.x, lane), tbq4_quad(raw.a.x >> 16u, lane));
}
// The probabilities of key `at` of the step, times `scale`.
fn weights_at(at: u32, scale: f32) -> PerRow {
  let step = THREADS * STEP_TILES;
  var w = PerRow();
  w.lo.x = probabilities[at];
  if (ROWS > 1u) { w.lo.y = probabilities[at + step]; }
  if (ROWS > 2u) {
    w.lo.z = probabilities[at + 2u * step];
    w.lo.w = probabilities[at + 3u * step];
  }
  if (ROWS > 4u) {
    w.hi = vec4<f32>(probabilities[at + 4u * step], probabilities[at + 5u * step], probabilities[at + 6u * step],
                     probabilities[at + 7u * step]);
  }
  return PerRow(w.lo * scale, w.hi * scale);
}
fn weighed(sum: Eight, w: PerRow, v: vec4<f32>) -> Eight {
  var e = sum;
  e.a = fma(vec4<f32>(w.lo.x), v, e.a);
  if (ROWS > 1u) { e.b = fma(vec4<f32>(w.lo.y), v, e.b); }
  if (ROWS > 2u) {
    e.c = fma(vec4<f32>(w.lo.z), v, e.c);
    e.d = fma(vec4<f32>(w.lo.w), v, e.d);
  }
  if (ROWS > 4u) {
    e.e = fma(vec4<f32>(w.hi.x), v, e.e);
    e.f = fma(vec4<f32>(w.hi.y), v, e.f);
    e.g = fma(vec4<f32>(w.hi.z), v, e.g);
    e.h = fma(vec4<f32>(w.hi.w), v, e.h);
  }
  return e;
}
fn add_value(sum: Output, at: u32, raw: RawValue, format: u32, lane: u32) -> Output {
  let v = values_of(raw, format, lane);
  let w = weights_at(at, raw.scale);
  return Output(weighed(sum.a, w, v.a), weighed(sum.b, w, v.b));
}
struct FourValues { a: RawValue, b: RawValue, c: RawValue, d: RawValue }
// Keys j, j + stride, ... of the step; beyond the end the last one, which is then not added.
fn fetch_four(b: Block, k0: i32, count: u32, j: u32, stride: u32, o: u32, format: u32) -> FourValues {
  let at = min(vec4<u32>(j, j + stride, j + 2u * stride, j + 3u * stride), vec4<u32>(count - 1u));
  let keys = min(vec4<i32>(k0) + vec4<i32>(at), vec4<i32>(b.keys.y - 1));
  return FourValues(fetch_value(b, keys.x, o, format), fetch_value(b, keys.y, o, format),
                    fetch_value(b, keys.z, o, format), fetch_value(b, keys.w, o, format));
}
fn add_four(sum: Output, raw: FourValues, count: u32, j: u32, stride: u32, format: u32, lane: u32) -> Output {
  var acc = sum;
  if (j < count) { acc = add_value(acc, j, raw.a, format, lane); }
  if (j + stride < count) { acc = add_value(acc, j + stride, raw.b, format, lane); }
  if (j + 2u * stride < count) { acc = add_value(acc, j + 2u * stride, raw.c, format, lane); }
  if (j + 3u * stride < count) { acc = add_value(acc, j + 3u * stride, raw.d, format, lane); }
  return acc;
}
// Every stride-th key of the step, four at a time, of codes eight: they are small. Beyond the last key p = 0.
fn add_values(b: Block, k0: i32, count: u32, first: u32, stride: u32, o: u32, lane: u32, sum: Output) -> Output {
  let format = select(VALUE_FORMAT, p.value_format, VALUE_FORMAT == RUNTIME);
  let keys_at_once = select(4u, 8u, format == Q8 || format == TBQ4);
  var acc = sum;
  for (var j = first; j < count; j += keys_at_once * stride) {
    let near = fetch_four(b, k0, count, j, stride, o, format);
    if (keys_at_once == 8u) {
      let far = fetch_four(b, k0, count, j + 4u * stride, stride, o, format);
      acc = add_four(acc, near, count, j, stride, format, lane);
      acc = add_four(acc, far, count, j + 4u * stride, stride, format, lane);
    } else {
      acc = add_four(acc, near, count, j, stride, format, lane);
    }
  }
  return acc;
}

// ---- the end: the sums of all threads
fn row_of(e: Eight, r: u32) -> vec4<f32> {
  if (r < 4u) { return select(select(e.a, e.b, r == 1u), select(e.c, e.d, r == 3u), r >= 2u); }
  return select(select(e.e, e.f, r == 5u), select(e.g, e.h, r == 7u), r >= 6u);
}
fn sum_rows(thread: u32) {
  workgroupBarrier();
  for (var e = thread; e < ROWS * 8u; e += THREADS) {
    var sum = 0.0;
    for (var i = 0u; i < THREADS / 8u; i++) { sum += sums_of_threads[(e >> 3u) * THREADS + (e & 7u) + 8u * i]; }
    reduced[e] = sum;
  }
  workgroupBarrier();
}
// Row r of the state, whose partial sums lie in `partial_out`.
fn write_row(b: Block, r: u32, groups: u32, octs: u32, thread: u32) {
  let pair = b.row0 + r;
  if (pair >= b.row_end) { return; }
  var total = 0.0;
  for (var i = 0u; i < 8u; i++) { total += reduced[8u * r + i]; }
  let place = vec2<u32>(b.s.batch, pair / p.group);
  let head = b.kv_head * p.group + pair % p.group;
  let out_row = address(p.out, place, head) + b.split * p.out_split;
  let scale = select(0.0, 1.0 / total, total > 0.0);
  for (var quad = thread; 4u * quad < p.head_dim_v; quad += THREADS) {
    var sum = vec4<f32>();
    for (var i = 0u; i < groups; i++) { sum += partial_out[i * octs * 2u + quad]; }
    out[(out_row >> 4u) + quad] = sum * scale;
  }
  if (thread == 0u) {
    let bits = select(0xff800000u, bitcast<u32>(row_max[r] + log(max(total, 1e-37))), total > 0.0);  // -inf: sees no key
    lse[(address(p.lse, place, head) + b.split * p.lse_split) >> 2u] = bits;
  }
}

@compute @workgroup_size(THREADS)
fn decode(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
  let s = sequence_of(group.z);
  let row_tiles = (p.seqlen_q * p.group + ROWS - 1u) / ROWS;  // of the pairs: query row r / group, head r % group
  let row0 = group.x % row_tiles * ROWS;                      // row tiles of one split are neighbours: they share keys
  let row_end = min(row0 + ROWS, p.seqlen_q * p.group);
  let split = group.x / row_tiles;
  let hull = vec2<i32>(span_of(s, i32(row0 / p.group)).x, span_of(s, i32((row_end - 1u) / p.group)).y);
  let b = Block(s, group.y, row0, row_end, split, share_of(hull, split, i32(THREADS)));
  let lane = thread & 31u;
  stage_queries(b, thread);
  stage_centroids(thread, THREADS);
  for (var r = 0u; r < ROWS; r++) { sums_of_threads[r * THREADS + thread] = 0.0; }
  if (thread < ROWS) { row_max[thread] = NO_SCORE; }
  workgroupBarrier();

  let octs = (p.head_dim_v + 7u) / 8u;
  let groups = THREADS / octs;
  let o = thread % octs;
  let g = thread / octs;
  var acc = Output();
  for (var k0 = b.keys.x; k0 < b.keys.y; k0 += i32(THREADS * STEP_TILES)) {
    let tiles = min(STEP_TILES, (u32(b.keys.y - k0) + THREADS - 1u) / THREADS);
    for (var r = 0u; r < ROWS; r++) { partial[r * THREADS + thread] = NO_SCORE; }
    for (var tile = 0u; tile < tiles; tile += select(1u, 2u, TWO_KEYS)) {
      let position = k0 + i32(tile * THREADS + thread);
      let position2 = position + i32(THREADS);
      let qk = key_dots(key_row(key_place(s, min(position, b.keys.y - 1)), b.kv_head),
                        key_row(key_place(s, min(position2, b.keys.y - 1)), b.kv_head), lane);
      write_scores(b, tile, position, thread, qk.a);
      if (TWO_KEYS) { write_scores(b, tile + 1u, position2, thread, qk.b); }
    }
    update_maxima(thread);
    exponentiate(tiles, thread);
    acc = Output(decayed(acc.a), decayed(acc.b));
    if (g < groups) { acc = add_values(b, k0, tiles * THREADS, g, groups, o, lane, acc); }
    workgroupBarrier();
  }
  sum_rows(thread);
  for (var r = 0u; r < ROWS; r++) {
    workgroupBarrier();
    if (g < groups) {
      partial_out[2u * (g * octs + o)] = row_of(acc.a, r);
      partial_out[2u * (g * octs + o) + 1u] = row_of(acc.b, r);
    }
    workgroupBarrier();
    write_row(b, r, groups, octs, thread);
  }
}
