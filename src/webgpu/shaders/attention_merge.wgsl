// Joins softmax states (out, lse) over disjoint keys: the splits of one row, or two results of the caller.
//   lse = log(sum exp(lse_i)),  out = sum exp(lse_i - lse) out_i
// An empty state has lse = -inf and an out that is never read. The sink is one more state without an out. Where
// values were stored rotated (tbq4), the joined row is rotated back here, once.
//
// One workgroup joins one row. Its threads weigh the states, then sum them 32 columns at a time: 8 threads share a
// column, and four loads are in flight in each.

const THREADS = 256u;
const COLUMNS = 32u;
const PARTS = 8u;
const MAX_STATES = 256u;
const MAX_WIDTH = 576u;  // the widest stored row

struct Rows { base: u32, batch: u32, head: u32, row: u32 }
struct MergeParams {
  a: Rows, lse_a: Rows, b: Rows, lse_b: Rows, out: Rows, lse: Rows,
  batch: u32, heads: u32, rows: u32, states_a: u32,
  states_b: u32, a_split: u32, lse_split: u32, width: u32,
  head_dim_v: u32, in_format: u32, out_format: u32, block: u32,
  sinks: u32, grid_x: u32, spare0: u32, spare1: u32,
}
const NONE = 0xffffffffu;
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
@group(0) @binding(0) var<uniform> p: MergeParams;
@group(0) @binding(1) var<storage, read> a: array<u32>;
@group(0) @binding(2) var<storage, read> lse_a: array<u32>;
@group(0) @binding(3) var<storage, read> b: array<u32>;
@group(0) @binding(4) var<storage, read> lse_b: array<u32>;
@group(0) @binding(5) var<storage, read> side: array<u32>;
@group(0) @binding(6) var<storage, read_write> out: array<atomic<u32>>;
@group(0) @binding(7) var<storage, read_write> lse: array<u32>;

var<workgroup> weights: array<f32, MAX_STATES + 1u>;
var<workgroup> row_values: array<f32, MAX_WIDTH>;
var<workgroup> partial: array<f32, THREADS>;
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
// ---- shared: rotation
const SIGNS_128 = vec4<u32>(0xb6032f3fu, 0x966eaf95u, 0xc07a3c61u, 0xe4f51876u);
const SIGNS_64 = vec4<u32>(0x2d3c0039u, 0xe0c6bfbeu, 0u, 0u);
// Value i of a block is negated where its bit is set (docs/kv-formats.md).
fn with_sign(i: u32, block: u32, x: f32) -> f32 {
  let words = select(SIGNS_64, SIGNS_128, block == 128u);
  let at = i % block;
  return select(x, -x, ((words[at >> 5u] >> (at & 31u)) & 1u) != 0u);
}
// Walsh-Hadamard over every block of row_values[0 .. width), scaled to keep lengths. Barriers inside.
fn hadamard(thread: u32, threads: u32, width: u32, block: u32) {
  for (var h = 1u; h < block; h *= 2u) {
    workgroupBarrier();
    for (var i = thread; i < width / 2u; i += threads) {
      let j = (i / h) * 2u * h + i % h;
      let x = row_values[j];
      let y = row_values[j + h];
      row_values[j] = x + y;
      row_values[j + h] = x - y;
    }
  }
  workgroupBarrier();
  let scale = select(0.125, 0.08838834764831845, block == 128u);
  for (var i = thread; i < width; i += threads) { row_values[i] *= scale; }
  workgroupBarrier();
}
// ---- end shared
const NO_SCORE = -3.0e38;

fn element(from_b: bool, row: u32, d: u32) -> f32 {
  var word: u32;
  if (p.in_format == F32_VEC) {
    let at = (row >> 2u) + d;
    if (from_b) { word = b[at]; } else { word = a[at]; }
    return bitcast<f32>(word);
  }
  let at = (row >> 1u) + d;
  if (from_b) { word = b[at >> 1u]; } else { word = a[at >> 1u]; }
  let bits = select(word & 0xffffu, word >> 16u, (at & 1u) != 0u);
  if (p.in_format == F16_VEC) { return unpack2x16float(bits).x; }
  return bitcast<f32>(bits << 16u);
}

struct Place { batch: u32, head: u32, row: u32 }
fn address(rows: Rows, at: Place) -> u32 { return rows.base + at.batch * rows.batch + at.head * rows.head + at.row * rows.row; }
fn lse_bits(state: u32, at: Place) -> u32 {
  if (state < p.states_a) { return lse_a[(address(p.lse_a, at) + state * p.lse_split) >> 2u]; }
  return lse_b[address(p.lse_b, at) >> 2u];
}
// max or sum of `partial`, for every thread
fn reduced(thread: u32, x: f32, is_sum: bool) -> f32 {
  workgroupBarrier();
  partial[thread] = x;
  for (var half = THREADS / 2u; half > 0u; half /= 2u) {
    workgroupBarrier();
    if (thread < half) {
      let other = partial[thread + half];
      partial[thread] = select(max(partial[thread], other), partial[thread] + other, is_sum);
    }
  }
  workgroupBarrier();
  return partial[0];
}

@compute @workgroup_size(THREADS)
fn merge(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
  let index = group.y * p.grid_x + group.x;
  if (index >= p.rows * p.heads * p.batch) { return; }
  let at = Place(index / p.rows / p.heads, index / p.rows % p.heads, index % p.rows);
  let states = p.states_a + p.states_b;

  // the largest lse; NO_SCORE where all are empty
  var m = NO_SCORE;
  for (var i = thread; i < states; i += THREADS) {
    let bits = lse_bits(i, at);
    if (bits != 0xff800000u) { m = max(m, bitcast<f32>(bits)); }
  }
  m = reduced(thread, m, false);
  let has_sink = p.sinks != NONE && side[p.sinks + at.head] != 0xff800000u;
  var sink = NO_SCORE;
  if (has_sink) {
    sink = bitcast<f32>(side[p.sinks + at.head]);
    m = max(m, sink);
  }

  var sum = 0.0;
  for (var i = thread; i < states; i += THREADS) {
    let bits = lse_bits(i, at);
    var w = 0.0;
    if (bits != 0xff800000u) { w = exp(bitcast<f32>(bits) - m); }
    weights[i] = w;
    sum += w;
  }
  sum = reduced(thread, sum, true);
  if (has_sink) { sum += exp(sink - m); }
  let scale = select(0.0, 1.0 / sum, sum > 0.0);

  let row_a = address(p.a, at);
  let part = thread / COLUMNS;
  for (var d0 = 0u; d0 < p.width; d0 += COLUMNS) {
    let d = min(d0 + thread % COLUMNS, p.width - 1u);
    var o = 0.0;
    for (var i = part; i < p.states_a; i += 4u * PARTS) {
      let j = min(vec4<u32>(i, i + PARTS, i + 2u * PARTS, i + 3u * PARTS), vec4<u32>(p.states_a - 1u));
      let v = vec4<f32>(element(false, row_a + j.x * p.a_split, d), element(false, row_a + j.y * p.a_split, d),
                        element(false, row_a + j.z * p.a_split, d), element(false, row_a + j.w * p.a_split, d));
      let w = vec4<f32>(weights[j.x], select(0.0, weights[j.y], i + PARTS < p.states_a),
                        select(0.0, weights[j.z], i + 2u * PARTS < p.states_a),
                        select(0.0, weights[j.w], i + 3u * PARTS < p.states_a));
      let terms = select(vec4<f32>(), w * v, w > vec4<f32>());  // an empty state's out may be anything
      o += (terms.x + terms.y) + (terms.z + terms.w);
    }
    if (part == 0u && p.states_b > 0u && weights[p.states_a] > 0.0) {
      o = fma(weights[p.states_a], element(true, address(p.b, at), d), o);
    }
    workgroupBarrier();
    partial[thread] = o;
    workgroupBarrier();
    if (thread < COLUMNS && d0 + thread < p.width) {
      var total = 0.0;
      for (var i = 0u; i < PARTS; i++) { total += partial[i * COLUMNS + thread]; }
      row_values[d0 + thread] = total * scale;
    }
  }
  workgroupBarrier();
  if (p.block != 0u) {
    hadamard(thread, THREADS, p.width, p.block);
    for (var d = thread; d < p.width; d += THREADS) { row_values[d] = with_sign(d, p.block, row_values[d]); }
    workgroupBarrier();
  }

  let out_row = address(p.out, at);
  if (p.out_format == F32_VEC) {
    for (var d = thread; d < p.head_dim_v; d += THREADS) { atomicStore(&out[(out_row >> 2u) + d], bitcast<u32>(row_values[d])); }
  } else {
    for (var d = thread; d < p.head_dim_v; d += THREADS) { store_half((out_row >> 1u) + d, narrow_bits(row_values[d], p.out_format)); }
  }
  if (thread == 0u && p.lse.base != NONE) {
    var bits = 0xff800000u;
    if (sum > 0.0) { bits = bitcast<u32>(m + log(sum)); }
    lse[address(p.lse, at) >> 2u] = bits;
  }
}
