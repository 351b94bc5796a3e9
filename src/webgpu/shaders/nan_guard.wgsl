// nan_guard: every value of a tensor that is no finite number becomes 0, and is counted. By bit pattern: compilers
// may assume that arithmetic meets no NaN. One thread a value.
// common: formats store

const THREADS = 64u;

struct Rows { base: u32, batch: u32, head: u32, row: u32 }
struct GuardParams {
  out: Rows,
  batch: u32, heads: u32, rows: u32, dim: u32,
  format: u32, grid_x: u32, spare0: u32, spare1: u32,
}
@group(0) @binding(0) var<uniform> p: GuardParams;
@group(0) @binding(1) var<storage, read_write> out: array<atomic<u32>>;
@group(0) @binding(2) var<storage, read_write> count: array<atomic<u32>>;
@compute @workgroup_size(THREADS)
fn guard(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
  let row_index = group.y * p.grid_x + group.x;
  if (row_index >= p.rows * p.heads * p.batch) { return; }
  let batch = row_index / p.rows / p.heads;
  let head = row_index / p.rows % p.heads;
  let row = p.out.base + batch * p.out.batch + head * p.out.head + row_index % p.rows * p.out.row;
  for (var d = thread; d < p.dim; d += THREADS) {
    if (p.format == F32_VEC) {
      if ((atomicLoad(&out[(row >> 2u) + d]) & 0x7f800000u) == 0x7f800000u) {
        atomicStore(&out[(row >> 2u) + d], 0u);
        atomicAdd(&count[0], 1u);
      }
      continue;
    }
    let at = (row >> 1u) + d;
    let word = atomicLoad(&out[at >> 1u]);
    let bits = select(word & 0xffffu, word >> 16u, (at & 1u) != 0u);
    let infinite = select(0x7f80u, 0x7c00u, p.format == F16_VEC);
    if ((bits & infinite) == infinite) {
      store_half(at, 0u);
      atomicAdd(&count[0], 1u);
    }
  }
}
