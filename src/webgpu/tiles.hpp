#pragma once
// The tiles of every kernel of this backend, and why.

#include <cstdint>

namespace attnspan::webgpu {

// attention_forward.wgsl. Workgroup memory in vec4 (16 bytes): stage + rows * keys / 4 + rows * keys / 16.
struct ForwardTile {
  int64_t value_width;  // serves head_dim_v up to this: keys / 4 * column_vecs * 4
  uint32_t rows, keys;
  uint32_t dim_quads, value_keys;
  uint32_t column_vecs;

  uint32_t threads() const { return rows / 4 * keys / 4; }
  uint32_t stage_vecs() const {
    const uint32_t score = (rows + keys) * dim_quads + (rows + keys) / 4;
    const uint32_t value = value_keys * keys / 4 * column_vecs;
    return score > value ? score : value;
  }
  uint32_t storage_bytes() const { return 16 * (stage_vecs() + rows * keys / 4 + rows * keys / 16); }
};

inline constexpr ForwardTile kForwardTiles[] = {
    // 48 KiB of workgroup memory and 256 threads: 64 x 64 scores reuse each staged value 64 times, and 16
    // rows
    // of threads leave 4 x (4 + 4 column_vecs) accumulators a thread. 37 to 38 KB.
    {64, 64, 64, 8, 64, 1},
    {128, 64, 64, 8, 32, 2},
    {256, 64, 64, 8, 16, 4},
    {576, 64, 64, 8, 8, 9},
    // The default limits of WebGPU (16 KiB, 256 threads): 32 x 32 scores by 64 threads, 13.5 to 14.3 KB.
    {64, 32, 32, 8, 32, 2},
    {128, 32, 32, 8, 16, 4},
    {256, 32, 32, 8, 8, 8},
    {576, 32, 32, 8, 4, 18},
};

}  // namespace attnspan::webgpu
