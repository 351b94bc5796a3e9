#pragma once
// tbq4's rotation of rows in threadgroup memory: y = H(s * x) / sqrt(block), by one simdgroup per row.

#include "element.h"

// Bit i: value i of a block changes its sign. SplitMix64 seeded with the block size (docs/kv-formats.md).
constant uint kSigns128[4] = {0xb6032f3fu, 0x966eaf95u, 0xc07a3c61u, 0xe4f51876u};
constant uint kSigns64[2] = {0x2d3c0039u, 0xe0c6bfbeu};

inline float signed_value(int block, int i, float value) {
  const uint word = block == 128 ? kSigns128[i / 32] : kSigns64[i / 32];
  return ((word >> (i % 32)) & 1u) != 0u ? -value : value;
}
inline float inverse_sqrt(int block) { return block == 128 ? 0.08838834764831845f : 0.125f; }

// Butterflies h = 1, 2, 4, ... in place. Every lane of one simdgroup calls it; the row is settled before and after.
inline void walsh_hadamard(threadgroup float* x, int block, int lane) {
  for (int h = 1; h < block; h *= 2) {
    for (int pair = lane; pair < block / 2; pair += 32) {
      const int j = pair / h * 2 * h + pair % h;
      const float a = x[j];
      const float b = x[j + h];
      x[j] = a + b;
      x[j + h] = a - b;
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
  }
}

// In place: `width` values of a row, whole blocks, zeros beyond the row's own values. Before and after, value i
// belongs to lane i % 32: no barrier is needed towards a caller that touches rows in the same way.
inline void rotate_row(threadgroup float* x, int width, int block, int lane) {
  for (int i = lane; i < width; i += 32) x[i] = signed_value(block, i % block, x[i]);
  simdgroup_barrier(mem_flags::mem_threadgroup);
  for (int start = 0; start < width; start += block) walsh_hadamard(x + start, block, lane);
  for (int i = lane; i < width; i += 32) x[i] = x[i] * inverse_sqrt(block);
}

// The inverse; the row is settled before.
inline void unrotate_row(threadgroup float* x, int width, int block, int lane) {
  for (int start = 0; start < width; start += block) walsh_hadamard(x + start, block, lane);
  for (int i = lane; i < width; i += 32) x[i] = signed_value(block, i % block, x[i] * inverse_sqrt(block));
}
