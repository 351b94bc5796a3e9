// Rotates query rows into the domain in which a tbq4 cache stores its keys, once for all keys:
//   rotated = Walsh-Hadamard(signs * query) / sqrt(block), zero-padded to whole blocks, in f32.

const THREADS = 64u;
const MAX_WIDTH = 576u;

struct Rows { base: u32, batch: u32, head: u32, row: u32 }
struct RotateParams {
  query: Rows, rotated: Rows,
  batch: u32, heads: u32, rows: u32, head_dim: u32,
  width: u32, block: u32, in_format: u32, grid_x: u32,
}
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
@group(0) @binding(0) var<uniform> p: RotateParams;
@group(0) @binding(1) var<storage, read> query: array<u32>;
@group(0) @binding(2) var<storage, read_write> rotated: array<f32>;

var<workgroup> row_values: array<f32, MAX_WIDTH>;
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
fn element(row: u32, d: u32) -> f32 {
  if (p.in_format == F32_VEC) { return bitcast<f32>(query[(row >> 2u) + d]); }
  let at = (row >> 1u) + d;
  let bits = select(query[at >> 1u] & 0xffffu, query[at >> 1u] >> 16u, (at & 1u) != 0u);
  if (p.in_format == F16_VEC) { return unpack2x16float(bits).x; }
  return bitcast<f32>(bits << 16u);
}

@compute @workgroup_size(THREADS)
fn rotate(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
  let index = group.y * p.grid_x + group.x;
  if (index >= p.rows * p.heads * p.batch) { return; }
  let batch = index / p.rows / p.heads;
  let head = index / p.rows % p.heads;
  let row = index % p.rows;
  let from_row = p.query.base + batch * p.query.batch + head * p.query.head + row * p.query.row;
  let to_row = p.rotated.base + batch * p.rotated.batch + head * p.rotated.head + row * p.rotated.row;
  for (var d = thread; d < p.width; d += THREADS) {
    var x = 0.0;
    if (d < p.head_dim) { x = with_sign(d, p.block, element(from_row, d)); }
    row_values[d] = x;
  }
  hadamard(thread, THREADS, p.width, p.block);
  for (var d = thread; d < p.width; d += THREADS) { rotated[(to_row >> 2u) + d] = row_values[d]; }
}
