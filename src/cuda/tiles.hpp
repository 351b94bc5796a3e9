#pragma once
// Every tile size of the CUDA backend, each row with its reason.

namespace attnspan::cuda {

// ---- the portable kernel: columns of the value that one warp accumulates, keys of a tile.
struct MmaTile {
  int columns;
  int keys;
};

// Accumulators are columns / 2 + keys / 2 registers a thread. Shared memory holds 16 rows a warp and the two
// tiles; consumer chips give a block 99 KB.
template <typename T>
struct MmaTiles {
  static constexpr MmaTile table[3] = {
      {64, 64},   // 64 rows, D = 64: 26 KB, three blocks a multiprocessor
      {128, 64},  // 64 rows, D = 128: 51 KB; D = 192 with 128: 67 KB
      {256, 32},  // D = 576: 32 rows 37 KB, keys 37 KB, values 17 KB: 91 KB
  };
};
template <>
struct MmaTiles<float> {
  static constexpr MmaTile table[3] = {
      {64, 64},   // D = 64: 51 KB
      {128, 32},  // D = 192 with 128: 64 rows 50 KB, keys 25 KB, values 17 KB
      {256, 16},  // D = 576: 16 rows 37 KB, keys 37 KB, values 17 KB
  };
};

// The row of the table for stored widths of key and value.
constexpr int mma_bucket(int key_dim, int value_dim) {
  if (key_dim <= 64 && value_dim <= 64) return 0;
  return key_dim <= 192 && value_dim <= 128 ? 1 : 2;
}

}  // namespace attnspan::cuda
