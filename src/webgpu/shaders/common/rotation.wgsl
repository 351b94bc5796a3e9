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
