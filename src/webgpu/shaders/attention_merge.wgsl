// Joins softmax states (out, lse) over disjoint keys: the splits of one row, or two results of the caller.
//   lse = log(sum exp(lse_i)),  out = sum exp(lse_i - lse) out_i
// An empty state has lse = -inf and an out that is never read. The sink is one more state without an out. Where
// values were stored rotated (tbq4), the joined row is rotated back here, once.
//
// One workgroup joins one row. Splits are f32 and whole vec4s: 32 threads take a vec4 each of one state, 8 states side
// by side, four loads under way in each thread.
// common: formats store rotation

const THREADS = 256u;
const LANES = 32u;
const PARTS = 8u;
const MAX_STATE_VECS = 65u;  // of four states
const MAX_WIDTH = 576u;      // the widest stored row

struct Rows { base: u32, batch: u32, head: u32, row: u32 }
struct MergeParams {
  a: Rows, lse_a: Rows, b: Rows, lse_b: Rows, out: Rows, lse: Rows,
  batch: u32, heads: u32, rows: u32, states_a: u32,
  states_b: u32, a_split: u32, lse_split: u32, width: u32,
  head_dim_v: u32, in_format: u32, out_format: u32, block: u32,
  sinks: u32, grid_x: u32, spare0: u32, spare1: u32,
}
const NONE = 0xffffffffu;
@group(0) @binding(0) var<uniform> p: MergeParams;
@group(0) @binding(1) var<storage, read> a: array<vec4<u32>>;
@group(0) @binding(2) var<storage, read> lse_a: array<u32>;
@group(0) @binding(3) var<storage, read> b: array<vec4<u32>>;
@group(0) @binding(4) var<storage, read> lse_b: array<u32>;
@group(0) @binding(5) var<storage, read> side: array<u32>;
@group(0) @binding(6) var<storage, read_write> out: array<atomic<u32>>;
@group(0) @binding(7) var<storage, read_write> lse: array<u32>;

var<workgroup> weights: array<vec4<f32>, MAX_STATE_VECS>;  // of the states: lse, then exp(lse - maximum)
var<workgroup> row_values: array<f32, MAX_WIDTH>;
var<workgroup> partial: array<vec4<f32>, THREADS>;
const NO_SCORE = -3.0e38;

fn element(from_b: bool, row: u32, d: u32) -> f32 {
  let half = select((row >> 1u) + d, 2u * ((row >> 2u) + d), p.in_format == F32_VEC);
  var word: u32;
  if (from_b) { word = b[half >> 3u][(half >> 1u) & 3u]; } else { word = a[half >> 3u][(half >> 1u) & 3u]; }
  if (p.in_format == F32_VEC) { return bitcast<f32>(word); }
  let bits = select(word & 0xffffu, word >> 16u, (half & 1u) != 0u);
  if (p.in_format == F16_VEC) { return unpack2x16float(bits).x; }
  return bitcast<f32>(bits << 16u);
}

struct Place { batch: u32, head: u32, row: u32 }
fn address(rows: Rows, at: Place) -> u32 { return rows.base + at.batch * rows.batch + at.head * rows.head + at.row * rows.row; }
fn lse_bits(state: u32, at: Place) -> u32 {
  if (state < p.states_a) { return lse_a[(address(p.lse_a, at) + state * p.lse_split) >> 2u]; }
  return lse_b[address(p.lse_b, at) >> 2u];
}
// lse of state `i`; NO_SCORE where it is empty or beyond the last
fn lse_of(i: u32, at: Place) -> f32 {
  let states = p.states_a + p.states_b;
  let bits = lse_bits(min(i, states - 1u), at);
  return select(bitcast<f32>(bits), NO_SCORE, bits == 0xff800000u || i >= states);
}
fn weights_of(lses: vec4<f32>, m: f32) -> vec4<f32> { return select(exp(lses - m), vec4<f32>(), lses <= vec4<f32>(NO_SCORE)); }
fn weight(i: u32) -> f32 { return weights[i >> 2u][i & 3u]; }

// The caller's two states.
fn join_pair(at: Place, scale: f32, thread: u32) {
  for (var d = thread; d < p.width; d += THREADS) {
    var o = 0.0;  // an empty state's out may be anything
    if (weights[0].x > 0.0) { o = weights[0].x * element(false, address(p.a, at), d); }
    if (weights[0].y > 0.0) { o = fma(weights[0].y, element(true, address(p.b, at), d), o); }
    row_values[d] = o * scale;
  }
}
fn weighed_state(i: u32, row: u32, quad: u32) -> vec4<f32> {
  let state = min(i, p.states_a - 1u);
  let w = select(0.0, weight(state), i < p.states_a);
  return select(vec4<f32>(), w * bitcast<vec4<f32>>(a[((row + state * p.a_split) >> 4u) + quad]), w > 0.0);
}
fn join_splits(at: Place, scale: f32, thread: u32) {
  let row = address(p.a, at);
  for (var q0 = 0u; 4u * q0 < p.width; q0 += LANES) {
    let quad = min(q0 + thread % LANES, p.width / 4u - 1u);
    var o = vec4<f32>();
    for (var i = thread / LANES; i < p.states_a; i += 8u * PARTS) {
      let near = (weighed_state(i, row, quad) + weighed_state(i + PARTS, row, quad))
               + (weighed_state(i + 2u * PARTS, row, quad) + weighed_state(i + 3u * PARTS, row, quad));
      let far = (weighed_state(i + 4u * PARTS, row, quad) + weighed_state(i + 5u * PARTS, row, quad))
              + (weighed_state(i + 6u * PARTS, row, quad) + weighed_state(i + 7u * PARTS, row, quad));
      o += near + far;
    }
    workgroupBarrier();
    partial[thread] = o;
    workgroupBarrier();
    if (thread < LANES && 4u * (q0 + thread) < p.width) {
      var total = vec4<f32>();
      for (var i = 0u; i < PARTS; i++) { total += partial[i * LANES + thread]; }
      for (var c = 0u; c < 4u; c++) { row_values[4u * (q0 + thread) + c] = total[c] * scale; }
    }
  }
}

@compute @workgroup_size(THREADS)
fn merge(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
  let index = group.y * p.grid_x + group.x;
  if (index >= p.rows * p.heads * p.batch) { return; }
  let at = Place(index / p.rows / p.heads, index / p.rows % p.heads, index % p.rows);
  let vecs = (p.states_a + p.states_b + 3u) / 4u;

  // every thread: the largest lse, NO_SCORE where all are empty; then the sum of exp(lse - largest)
  if (thread < vecs) {
    let i = 4u * thread;
    let a = lse_of(i, at);
    let b = lse_of(i + 1u, at);
    let c = lse_of(i + 2u, at);
    let d = lse_of(i + 3u, at);
    weights[thread] = vec4<f32>(a, b, c, d);
  }
  workgroupBarrier();
  var most = vec4<f32>(NO_SCORE);
  for (var i = 0u; i < vecs; i++) { most = max(most, weights[i]); }
  var m = max(max(most.x, most.y), max(most.z, most.w));
  let has_sink = p.sinks != NONE && side[p.sinks + at.head] != 0xff800000u;
  var sink = NO_SCORE;
  if (has_sink) {
    sink = bitcast<f32>(side[p.sinks + at.head]);
    m = max(m, sink);
  }
  workgroupBarrier();
  if (thread < vecs) { weights[thread] = weights_of(weights[thread], m); }
  workgroupBarrier();
  var sums = vec4<f32>();
  for (var i = 0u; i < vecs; i++) { sums += weights[i]; }
  var sum = (sums.x + sums.y) + (sums.z + sums.w);
  if (has_sink) { sum += exp(sink - m); }
  let scale = select(0.0, 1.0 / sum, sum > 0.0);

  if (p.states_b != 0u) {
    join_pair(at, scale, thread);
  } else {
    join_splits(at, scale, thread);
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
