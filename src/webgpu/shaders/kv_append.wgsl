// Appends to a KV cache: rows of keys, or of values, encoded where they will be read (docs/kv-formats.md has the
// bits). One workgroup encodes one row; its bytes do not depend on its neighbours.
// common: formats store rotation

const THREADS = 128u;
const MAX_WIDTH = 576u;

struct Rows { base: u32, batch: u32, head: u32, row: u32 }
struct AppendParams {
  rows: Rows, codes: Rows, scales: Rows,  // codes and scales: `batch` is the stride of a page
  batch: u32, heads: u32, tokens: u32, dim: u32,
  width: u32, block: u32, in_format: u32, out_format: u32,
  positions: u32, first_position: u32, block_table: u32, block_table_row: u32,
  block_table_column: u32, page_size: u32, quality: u32, grid_x: u32,
}
const NONE = 0xffffffffu;
@group(0) @binding(0) var<uniform> p: AppendParams;
@group(0) @binding(1) var<storage, read> rows: array<u32>;
@group(0) @binding(2) var<storage, read> side: array<u32>;
@group(0) @binding(3) var<storage, read_write> out: array<atomic<u32>>;     // codes
@group(0) @binding(4) var<storage, read_write> scales: array<atomic<u32>>;
@group(0) @binding(5) var<storage, read_write> saturated: array<atomic<u32>>;

var<workgroup> row_values: array<f32, MAX_WIDTH>;
var<workgroup> tree: array<vec2<f32>, THREADS>;
var<workgroup> codes: array<u32, THREADS>;
const THRESHOLDS = array<f32, 8>(0.25822166, 0.52240371, 0.79954979, 1.09928583, 1.43713879, 1.84353185, 2.40080340, 1e30);
const CENTROIDS = array<f32, 8>(0.12839503, 0.38804830, 0.65675912, 0.94234046, 1.25623120, 1.61804639, 2.06901723, 2.73258957);

fn element(row: u32, d: u32) -> f32 {
  if (p.in_format == F32_VEC) { return bitcast<f32>(rows[(row >> 2u) + d]); }
  let at = (row >> 1u) + d;
  let bits = select(rows[at >> 1u] & 0xffffu, rows[at >> 1u] >> 16u, (at & 1u) != 0u);
  if (p.in_format == F16_VEC) { return unpack2x16float(bits).x; }
  return bitcast<f32>(bits << 16u);
}
fn store_scale(at: u32, bits: u32) {
  let shift = 16u * (at & 1u);
  atomicAnd(&scales[at >> 1u], ~(0xffffu << shift));
  atomicOr(&scales[at >> 1u], bits << shift);
}
// f16 bits of a scale in [0, 65504]; others are stored as 65504 and counted.
fn scale_bits(x: f32) -> u32 {
  if (x >= 0.0 && x < 65520.0) { return f16_bits(x); }
  atomicAdd(&saturated[0], 1u);
  return 0x7bffu;
}
// How many thresholds are <= v: 8..15 for the positive half.
fn code_of(v: f32) -> u32 {
  let a = abs(v);
  var k = 0u;
  for (var i = 0u; i < 7u; i++) { k += select(0u, 1u, a >= THRESHOLDS[i]); }
  if (v >= 0.0) { return 8u + k; }
  // on the negative side a threshold itself belongs to the upper code
  var n = 0u;
  for (var i = 0u; i < 7u; i++) { n += select(0u, 1u, a > THRESHOLDS[i]); }
  return 7u - n;
}
fn centroid_of(code: u32) -> f32 { return select(-CENTROIDS[7u - (code & 7u)], CENTROIDS[code & 7u], code >= 8u); }
// Sums of x over the first `n` threads, by a halving tree.
fn summed(thread: u32, n: u32, x: vec2<f32>) -> vec2<f32> {
  workgroupBarrier();
  tree[thread] = select(vec2<f32>(), x, thread < n);
  for (var half = n / 2u; half > 0u; half /= 2u) {
    workgroupBarrier();
    if (thread < half) { tree[thread] += tree[thread + half]; }
  }
  workgroupBarrier();
  return tree[0];
}
fn append_tbq4(thread: u32, codes_row: u32, scales_row: u32) {
  for (var d = thread; d < p.width; d += THREADS) { row_values[d] = with_sign(d, p.block, row_values[d]); }
  hadamard(thread, THREADS, p.width, p.block);
  for (var block0 = 0u; block0 < p.width; block0 += p.block) {
    var y = 0.0;
    if (thread < p.block) { y = row_values[block0 + thread]; }
    let energy = summed(thread, p.block, vec2<f32>(y * y, 0.0)).x;
    let rms = sqrt(energy / f32(p.block));
    var best = -1.0;
    var best_code = 0u;
    var norm = 0.0;
    for (var i = 0u; i < 9u; i++) {
      if (p.quality == 0u && i != 4u) { continue; }
      let scale = (0.84 + 0.04 * f32(i)) * rms;
      var code = 0u;
      if (rms > 0.0) { code = code_of(y / scale); }
      let c = centroid_of(code);
      let sums = summed(thread, p.block, vec2<f32>(y * c, c * c));
      let gain = sums.x * sums.x / max(sums.y * energy, 1e-37);
      if (gain > best) {
        best = gain;
        best_code = code;
        norm = select(sqrt(energy) / sqrt(sums.y), energy / sums.x, p.quality != 0u);
      }
    }
    if (thread == 0u) {
      codes[0] = 0u;
      if (rms > 0.0) { codes[0] = scale_bits(norm); }
    }
    workgroupBarrier();
    let bits = codes[0];
    workgroupBarrier();
    codes[thread] = select(best_code, 0u, bits == 0u);
    workgroupBarrier();
    if (thread < p.block / 8u) {
      var word = 0u;
      for (var i = 0u; i < 8u; i++) { word |= codes[8u * thread + i] << (4u * i); }
      atomicStore(&out[(codes_row >> 2u) + block0 / 8u + thread], word);
    }
    if (thread == 0u) { store_scale((scales_row >> 1u) + block0 / p.block, bits); }
    workgroupBarrier();
  }
}
fn append_q8(thread: u32, codes_row: u32, scales_row: u32) {
  for (var block = thread; 32u * block < p.width; block += THREADS) {
    var largest = 0.0;
    for (var i = 0u; i < 32u; i++) { largest = max(largest, abs(row_values[32u * block + i])); }
    let bits = scale_bits(largest / 127.0);
    let scale = unpack2x16float(bits).x;
    for (var w = 0u; w < 8u; w++) {
      var word = 0u;
      for (var i = 0u; i < 4u; i++) {
        var code = 0;
        if (scale > 0.0) { code = clamp(i32(round(row_values[32u * block + 4u * w + i] / scale)), -127, 127); }
        word |= (bitcast<u32>(code) & 0xffu) << (8u * i);
      }
      atomicStore(&out[(codes_row >> 2u) + 8u * block + w], word);
    }
    store_scale((scales_row >> 1u) + block, bits);
  }
}

@compute @workgroup_size(THREADS)
fn append(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
  let index = group.y * p.grid_x + group.x;
  if (index >= p.tokens * p.heads * p.batch) { return; }
  let batch = index / p.tokens / p.heads;
  let head = index / p.tokens % p.heads;
  let token = index % p.tokens;
  var offset = side[p.positions + batch] + token;
  if (p.first_position != NONE) { offset -= side[p.first_position + batch]; }
  var page = batch;
  if (p.block_table != NONE) {
    page = side[p.block_table + batch * p.block_table_row + offset / p.page_size * p.block_table_column];
    offset %= p.page_size;
  }
  let from_row = p.rows.base + batch * p.rows.batch + head * p.rows.head + token * p.rows.row;
  let codes_row = p.codes.base + page * p.codes.batch + head * p.codes.head + offset * p.codes.row;
  let scales_row = p.scales.base + page * p.scales.batch + head * p.scales.head + offset * p.scales.row;
  for (var d = thread; d < p.width; d += THREADS) {
    var x = 0.0;
    if (d < p.dim) { x = element(from_row, d); }
    row_values[d] = x;
  }
  workgroupBarrier();
  if (p.out_format == TBQ4) { append_tbq4(thread, codes_row, scales_row); return; }
  if (p.out_format == Q8) { append_q8(thread, codes_row, scales_row); return; }
  for (var d = thread; d < p.dim; d += THREADS) {
    if (p.out_format == F32_VEC) { atomicStore(&out[(codes_row >> 2u) + d], bitcast<u32>(row_values[d])); }
    else { store_half((codes_row >> 1u) + d, narrow_bits(row_values[d], p.out_format)); }
  }
}
