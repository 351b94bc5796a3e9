// Backward, first: for every query row (lse, delta), delta = rowsum(dout * out) - dlse; and the gradient of the
// sinks, d_sinks = -sum over rows of exp(sink - lse) delta. An empty row (lse = -inf) gets (0, 0).
// common: formats

const THREADS = 64u;

struct Rows { base: u32, batch: u32, head: u32, row: u32 }
struct DeltaParams {
  out: Rows, dout: Rows, lse: Rows, dlse: Rows, stats: Rows,
  batch: u32, heads: u32, rows: u32, head_dim_v: u32,
  in_format: u32, grid_x: u32, spare0: u32, spare1: u32,
}
const NONE = 0xffffffffu;
@group(0) @binding(0) var<uniform> p: DeltaParams;
@group(0) @binding(1) var<storage, read> out: array<u32>;
@group(0) @binding(2) var<storage, read> dout: array<u32>;
@group(0) @binding(3) var<storage, read> lse: array<u32>;
@group(0) @binding(4) var<storage, read> dlse: array<f32>;
@group(0) @binding(5) var<storage, read> sinks: array<f32>;
@group(0) @binding(6) var<storage, read_write> stats: array<vec2<f32>>;
@group(0) @binding(7) var<storage, read_write> d_sinks: array<f32>;

var<workgroup> partial: array<f32, THREADS>;

// the sum of x over the workgroup, in a fixed order
fn summed(thread: u32, x: f32) -> f32 {
  partial[thread] = x;
  for (var half = THREADS / 2u; half > 0u; half /= 2u) {
    workgroupBarrier();
    if (thread < half) { partial[thread] += partial[thread + half]; }
  }
  workgroupBarrier();
  return partial[0];
}
fn element(word: u32, at: u32) -> f32 {
  if (p.in_format == F32_VEC) { return bitcast<f32>(word); }
  let bits = select(word & 0xffffu, word >> 16u, (at & 1u) != 0u);
  if (p.in_format == F16_VEC) { return unpack2x16float(bits).x; }
  return bitcast<f32>(bits << 16u);
}
fn address(rows: Rows, batch: u32, head: u32, row: u32) -> u32 {
  return rows.base + batch * rows.batch + head * rows.head + row * rows.row;
}
// One thread a row: the sum runs in the order of dout . value in the other kernels, so that a row that sees one
// key has a gradient of exactly 0.
@compute @workgroup_size(THREADS)
fn delta(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
  let index = (group.y * p.grid_x + group.x) * THREADS + thread;
  if (index >= p.rows * p.heads * p.batch) { return; }
  let batch = index / p.rows / p.heads;
  let head = index / p.rows % p.heads;
  let row = index % p.rows;
  let shift = select(1u, 2u, p.in_format == F32_VEC);  // bytes -> elements
  let out_at = address(p.out, batch, head, row) >> shift;
  let dout_at = address(p.dout, batch, head, row) >> shift;
  let narrow = 2u - shift;  // elements -> words
  var sum = 0.0;
  for (var d = 0u; d < p.head_dim_v; d++) {
    let i = out_at + d;
    let j = dout_at + d;
    sum = fma(element(dout[j >> narrow], j), element(out[i >> narrow], i), sum);
  }
  let bits = lse[address(p.lse, batch, head, row) >> 2u];
  var result = vec2<f32>();
  if (bits != 0xff800000u) {
    if (p.dlse.base != NONE) { sum -= dlse[address(p.dlse, batch, head, row) >> 2u]; }
    result = vec2<f32>(bitcast<f32>(bits), sum);
  }
  stats[address(p.stats, batch, head, row) >> 3u] = result;
}
// One workgroup a head.
@compute @workgroup_size(THREADS)
fn sink_gradient(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
  let head = group.x;
  let sink = sinks[head];
  let absent = bitcast<u32>(sink) == 0xff800000u;
  var sum = 0.0;
  for (var i = thread; i < p.rows * p.batch; i += THREADS) {
    let s = stats[address(p.stats, i / p.rows, head, i % p.rows) >> 3u];
    if (!absent) { sum -= exp(sink - s.x) * s.y; }
  }
  sum = summed(thread, sum);
  if (thread == 0u) { d_sinks[head] = sum; }
}
