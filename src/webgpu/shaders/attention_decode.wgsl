// Attention of few query rows over many keys: decode. Bound by memory, so every byte of the keys and values of a KV
// head is read once for all rows of its query heads.
//
// One workgroup takes up to ROWS (query row, head of the group) pairs and one split of the keys; its state
// (out, lse) goes to attention_merge.wgsl. A step covers THREADS * STEP_TILES keys:
//   scores: rows of keys are staged as they lie (16-byte loads, codes stay codes); thread t decodes key t once for
//     all ROWS products, so no sum crosses threads;
//   online softmax: one maximum a step and row;
//   out += p . value: thread (g, o) owns columns 8 o .. 8 o + 7 of every G-th key, straight from memory to
//     registers; the G partial sums meet once, at the end.

override THREADS: u32 = 128u;
override ROWS: u32 = 4u;
override STEP_TILES: u32 = 1u;     // tiles of THREADS keys between two maxima
override CHUNK: u32 = 4u;          // 16-byte vectors of a key row staged at a time
override QUERY_VECS: u32 = 128u;   // ROWS * head_dim / 4, or more
const MAX_ROWS = 16u;
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
@group(0) @binding(1) var<storage, read> query: array<u32>;
@group(0) @binding(2) var<storage, read> key: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read> value: array<vec4<u32>>;
@group(0) @binding(4) var<storage, read> key_scale: array<u32>;
@group(0) @binding(5) var<storage, read> value_scale: array<u32>;
@group(0) @binding(6) var<storage, read> side: array<u32>;
@group(0) @binding(7) var<storage, read_write> out: array<vec4<f32>>;
@group(0) @binding(8) var<storage, read_write> lse: array<u32>;

var<workgroup> stage: array<vec4<u32>, THREADS * (CHUNK + 1u)>;  // one vector of padding keeps the banks apart
var<workgroup> queries: array<vec4<f32>, QUERY_VECS>;
var<workgroup> probabilities: array<f32, ROWS * THREADS * STEP_TILES>;
var<workgroup> partial: array<f32, ROWS * THREADS>;
var<workgroup> maxima: array<f32, ROWS * 8u>;
var<workgroup> sums_of_threads: array<f32, ROWS * THREADS>;  // of probabilities, each thread's own keys
var<workgroup> row_max: array<f32, ROWS>;
var<workgroup> row_decay: array<f32, ROWS>;
var<workgroup> centroids: array<f32, 512>;  // 16 centroids, one copy for each of 32 banks
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
fn query_element(row: u32, d: u32) -> f32 {
  if (d >= p.head_dim) { return 0.0; }
  if (p.query_format == F32_VEC) { return bitcast<f32>(query[(row >> 2u) + d]); }
  let at = (row >> 1u) + d;
  let bits = half_of(query[at >> 1u], (at & 1u) != 0u);
  return select(bf16_of(bits), f16_of(bits), p.query_format == F16_VEC);
}
fn tbq4_looked_up(codes: u32, lane: u32) -> vec4<f32> {
  return vec4<f32>(centroids[((codes & 15u) << 5u) + lane], centroids[((codes << 1u) & 0x1e0u) + lane],
                   centroids[((codes >> 3u) & 0x1e0u) + lane], centroids[((codes >> 7u) & 0x1e0u) + lane]);
}
// Values 4 quad .. 4 quad + 3 of one 16-byte vector, without their scale.
fn decoded_quad(raw: vec4<u32>, quad: u32, format: u32, lane: u32) -> vec4<f32> {
  if (format == F32_VEC) { return bitcast<vec4<f32>>(raw); }
  if (format == F16_VEC || format == BF16_VEC) {
    let words = select(raw.xy, raw.zw, quad == 1u);
    if (format == F16_VEC) { return f16_quad(words); }
    return bf16_quad(words);
  }
  if (format == Q8) { return q8_quad(raw[quad], 1.0); }
  return tbq4_looked_up(raw[quad >> 1u] >> (16u * (quad & 1u)), lane);
}
// Quads in a 16-byte vector.
fn quads_of(format: u32) -> u32 {
  if (format == F32_VEC) { return 1u; }
  if (format == Q8) { return 4u; }
  return select(2u, 8u, format == TBQ4);
}
fn scale_at(scale_row: u32, index: u32, of_key: bool) -> f32 {
  let at = (scale_row >> 1u) + index;
  var word: u32;
  if (of_key) { word = key_scale[at >> 1u]; } else { word = value_scale[at >> 1u]; }
  return f16_of(half_of(word, (at & 1u) != 0u));
}

struct Values { a: vec4<f32>, b: vec4<f32> }
// Columns 8 o .. 8 o + 7 of the value at `place`.
fn value_oct(place: vec2<u32>, kv_head: u32, o: u32, lane: u32) -> Values {
  let format = select(VALUE_FORMAT, p.value_format, VALUE_FORMAT == RUNTIME);
  let row = address(p.value, place, kv_head);
  if (format == F32_VEC) {
    var v = Values(bitcast<vec4<f32>>(value[(row >> 4u) + 2u * o]), vec4<f32>());
    if (8u * o + 4u < p.head_dim_v) { v.b = bitcast<vec4<f32>>(value[(row >> 4u) + 2u * o + 1u]); }
    return v;
  }
  if (format == F16_VEC) {
    let raw = value[(row >> 4u) + o];
    return Values(f16_quad(raw.xy), f16_quad(raw.zw));
  }
  if (format == BF16_VEC) {
    let raw = value[(row >> 4u) + o];
    return Values(bf16_quad(raw.xy), bf16_quad(raw.zw));
  }
  let scale = scale_at(address(p.value_scale, place, kv_head), 8u * o / p.value_block, false);
  if (format == Q8) {
    let word = (row >> 2u) + 2u * o;
    let words = pair_of(value[word >> 2u], word);
    return Values(q8_quad(words.x, scale), q8_quad(words.y, scale));
  }
  let word = (row >> 2u) + o;
  let codes = value[word >> 2u][word & 3u];
  return Values(scale * tbq4_looked_up(codes, lane), scale * tbq4_looked_up(codes >> 16u, lane));
}

@compute @workgroup_size(THREADS)
fn decode(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
  let s = sequence_of(group.z);
  let kv_head = group.y;
  let split = group.x % p.splits;
  let row0 = group.x / p.splits * ROWS;               // of the pairs: query row r / group, head r % group
  let row_end = min(row0 + ROWS, p.seqlen_q * p.group);
  let lane = thread & 31u;
  let key_format = select(KEY_FORMAT, p.key_format, KEY_FORMAT == RUNTIME);
  let quads = quads_of(key_format);
  let key_vecs = (p.head_dim + 4u * quads - 1u) / (4u * quads);
  let query_quads = p.query_quads;

  for (var e = thread; e < ROWS * query_quads; e += THREADS) {
    let r = row0 + e / query_quads;
    let d = 4u * (e % query_quads);
    var q = vec4<f32>();
    if (r < row_end) {
      let row = address(p.query, vec2<u32>(s.batch, r / p.group), kv_head * p.group + r % p.group);
      q = vec4<f32>(query_element(row, d), query_element(row, d + 1u), query_element(row, d + 2u), query_element(row, d + 3u));
    }
    queries[e] = q;
  }
  for (var e = thread; e < 512u; e += THREADS) { centroids[e] = centroid(e >> 5u); }

  let first_row = i32(row0 / p.group);
  let last_row = i32((row_end - 1u) / p.group);
  let hull = share_of(vec2<i32>(span_of(s, first_row).x, span_of(s, last_row).y), split, i32(THREADS));

  // Private arrays are indexed in short loops only: an index left to run time would move them out of registers.
  var acc = array<Values, MAX_ROWS>();
  for (var r = 0u; r < ROWS; r++) { sums_of_threads[r * THREADS + thread] = 0.0; }
  if (thread < ROWS) { row_max[thread] = NO_SCORE; }
  let octs = (p.head_dim_v + 7u) / 8u;
  let groups = THREADS / octs;
  let o = thread % octs;
  let g = thread / octs;
  let step_keys = THREADS * STEP_TILES;

  for (var k0 = hull.x; k0 < hull.y; k0 += i32(step_keys)) {
    for (var r = 0u; r < ROWS; r++) { partial[r * THREADS + thread] = NO_SCORE; }

    for (var tile = 0u; tile < STEP_TILES; tile++) {
      let key0 = k0 + i32(tile * THREADS);
      if (key0 >= hull.y) { break; }
      let position = key0 + i32(thread);

      // scores = query . key
      var scores = array<f32, MAX_ROWS>();
      let scale_row = address(p.key_scale, key_place(s, min(position, hull.y - 1)), kv_head);
      for (var v0 = 0u; v0 < key_vecs; v0 += CHUNK) {
        workgroupBarrier();
        for (var e = thread; e < THREADS * CHUNK; e += THREADS) {
          let r = e / CHUNK;
          let v = v0 + e % CHUNK;
          if (v < key_vecs && key0 + i32(r) < hull.y) {
            stage[r * (CHUNK + 1u) + e % CHUNK] = key[(address(p.key, key_place(s, key0 + i32(r)), kv_head) >> 4u) + v];
          }
        }
        workgroupBarrier();
        if (position < hull.y) {
          for (var v = v0; v < min(v0 + CHUNK, key_vecs); v++) {
            let raw = stage[thread * (CHUNK + 1u) + v - v0];
            var sums = array<f32, MAX_ROWS>();
            for (var quad = 0u; quad < quads; quad++) {
              let k = decoded_quad(raw, quad, key_format, lane);
              for (var r = 0u; r < ROWS; r++) {
                let q = queries[r * query_quads + v * quads + quad];
                sums[r] = fma(q.w, k.w, fma(q.z, k.z, fma(q.y, k.y, fma(q.x, k.x, sums[r]))));
              }
            }
            var scale = 1.0;
            if (key_format == Q8 || key_format == TBQ4) { scale = scale_at(scale_row, v * quads * 4u / p.key_block, true); }
            for (var r = 0u; r < ROWS; r++) { scores[r] = fma(scale, sums[r], scores[r]); }
          }
        }
      }

      // score transform and mask
      for (var r = 0u; r < ROWS; r++) { probabilities[r * step_keys + tile * THREADS + thread] = scores[r]; }
      for (var r = 0u; r < ROWS; r++) {
        let at = r * step_keys + tile * THREADS + thread;
        var x = NO_SCORE;
        let pair = row0 + r;
        if (pair < row_end && position < hull.y) {
          let row = i32(pair / p.group);
          let span = span_of(s, row);
          if (position >= span.x && position < span.y) {
            x = logit(s, kv_head * p.group + pair % p.group, row, position, probabilities[at]);
          }
        }
        probabilities[at] = x;
        partial[r * THREADS + thread] = max(partial[r * THREADS + thread], x);
      }
    }

    // online softmax: the maximum of a row over the step, in two strides
    workgroupBarrier();
    for (var e = thread; e < ROWS * 8u; e += THREADS) {
      var x = NO_SCORE;
      for (var i = 0u; i < THREADS / 8u; i++) { x = max(x, partial[(e >> 3u) * THREADS + (e & 7u) + 8u * i]); }
      maxima[e] = x;
    }
    workgroupBarrier();
    if (thread < ROWS) {
      var m_new = row_max[thread];
      for (var i = 0u; i < 8u; i++) { m_new = max(m_new, maxima[8u * thread + i]); }
      row_decay[thread] = exp(row_max[thread] - m_new);
      row_max[thread] = m_new;
    }
    workgroupBarrier();
    for (var r = 0u; r < ROWS; r++) {
      acc[r].a *= row_decay[r];
      acc[r].b *= row_decay[r];
    }
    for (var r = 0u; r < ROWS; r++) {
      var sum = sums_of_threads[r * THREADS + thread] * row_decay[r];
      for (var tile = 0u; tile < STEP_TILES; tile++) {
        if (k0 + i32(tile * THREADS) >= hull.y) { break; }
        let at = r * step_keys + tile * THREADS + thread;
        let x = probabilities[at];
        let e = select(exp(x - row_max[r]), 0.0, x <= NO_SCORE);
        probabilities[at] = e;
        sum += e;
      }
      sums_of_threads[r * THREADS + thread] = sum;
    }
    workgroupBarrier();

    // out += p . value
    let count = min(step_keys, u32(hull.y - k0));
    if (g < groups) {
      for (var j = g; j < count; j += 4u * groups) {
        var values = array<Values, 4>();
        for (var u = 0u; u < 4u; u++) {
          let at = min(j + u * groups, count - 1u);  // beyond the end: a value that counts, with p = 0
          values[u] = value_oct(key_place(s, k0 + i32(at)), kv_head, o, lane);
        }
        for (var u = 0u; u < 4u; u++) {
          let at = j + u * groups;
          for (var r = 0u; r < ROWS; r++) {
            var weight = 0.0;
            if (at < count) { weight = probabilities[r * step_keys + at]; }
            acc[r].a = fma(vec4<f32>(weight), values[u].a, acc[r].a);
            acc[r].b = fma(vec4<f32>(weight), values[u].b, acc[r].b);
          }
        }
      }
    }
  }

  // the partial sums of all threads, row by row
  workgroupBarrier();
  for (var e = thread; e < ROWS * 8u; e += THREADS) {
    var sum = 0.0;
    for (var i = 0u; i < THREADS / 8u; i++) { sum += sums_of_threads[(e >> 3u) * THREADS + (e & 7u) + 8u * i]; }
    maxima[e] = sum;
  }
  for (var r = 0u; r < ROWS; r++) {
    var mine = Values();
    for (var i = 0u; i < ROWS; i++) {
      if (i == r) { mine = acc[i]; }
    }
    workgroupBarrier();
    if (g < groups) {
      stage[(g * octs + o) * 2u] = bitcast<vec4<u32>>(mine.a);
      stage[(g * octs + o) * 2u + 1u] = bitcast<vec4<u32>>(mine.b);
    }
    workgroupBarrier();
    let pair = row0 + r;
    if (pair < row_end) {
      var total = 0.0;
      for (var i = 0u; i < 8u; i++) { total += maxima[8u * r + i]; }
      let place = vec2<u32>(s.batch, pair / p.group);
      let head = kv_head * p.group + pair % p.group;
      let out_row = address(p.out, place, head) + split * p.out_split;
      let scale = select(0.0, 1.0 / total, total > 0.0);
      for (var quad = thread; 4u * quad < p.head_dim_v; quad += THREADS) {
        var sum = vec4<f32>();
        for (var i = 0u; i < groups; i++) { sum += bitcast<vec4<f32>>(stage[i * octs * 2u + quad]); }
        out[(out_row >> 4u) + quad] = sum * scale;
      }
      if (thread == 0u) {
        var bits = 0xff800000u;
        if (total > 0.0) { bits = bitcast<u32>(row_max[r] + log(total)); }
        lse[(address(p.lse, place, head) + split * p.lse_split) >> 2u] = bits;
      }
    }
  }
}
