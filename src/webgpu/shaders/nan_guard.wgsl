// nan_guard: every value of a tensor that is no finite number becomes 0, and is counted. By bit pattern: compilers
// may assume that arithmetic meets no NaN. One thread a value.

const THREADS = 64u;

struct Rows { base: u32, batch: u32, head: u32, row: u32 }
struct GuardParams {
  out: Rows,
  batch: u32, heads: u32, rows: u32, dim: u32,
  format: u32, grid_x: u32, spare0: u32, spare1: u32,
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
@group(0) @binding(0) var<uniform> p: GuardParams;
@group(0) @binding(1) var<storage, read_write> out: array<atomic<u32>>;
@group(0) @binding(2) var<storage, read_write> count: array<atomic<u32>>;
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
