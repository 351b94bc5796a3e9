// Rotates query rows into the domain in which a tbq4 cache stores its keys, once for all keys:
//   rotated = Walsh-Hadamard(signs * query) / sqrt(block), zero-padded to whole blocks, in f32.
// common: formats rotation

const THREADS = 64u;
const MAX_WIDTH = 576u;

struct Rows { base: u32, batch: u32, head: u32, row: u32 }
struct RotateParams {
  query: Rows, rotated: Rows,
  batch: u32, heads: u32, rows: u32, head_dim: u32,
  width: u32, block: u32, in_format: u32, grid_x: u32,
}
@group(0) @binding(0) var<uniform> p: RotateParams;
@group(0) @binding(1) var<storage, read> query: array<u32>;
@group(0) @binding(2) var<storage, read_write> rotated: array<f32>;

var<workgroup> row_values: array<f32, MAX_WIDTH>;
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
