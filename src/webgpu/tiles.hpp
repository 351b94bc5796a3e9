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

// attention_forward_matrix.wgsl: rows = matrix * subgroups, keys = matrix * key_tiles.
struct MatrixTile {
  uint32_t subgroups, key_tiles;

  uint32_t storage_bytes(uint32_t matrix, uint32_t widest) const {
    const uint32_t rows = matrix * subgroups, keys = matrix * key_tiles;
    return 2 * (rows > keys ? rows : keys) * (widest + 8) + 4 * rows * (keys + 4) + 2 * rows * (keys + 8) +
           4 * rows + 64;
  }
};

inline constexpr uint32_t kWidestMatrixRow = 128;  // wider rows of out would not fit the registers

inline constexpr MatrixTile kMatrixTiles[] = {
    {4, 4},  // 64 x 64 on 16 x 16 matrices: 44 KB at 128 columns
    {4, 2},  // 32 KB
    {2, 2},  // 15 KB
    {1, 2},
};

// attention_decode.wgsl. Rows are the (query row, head) pairs that share each loaded key.
struct DecodeTile {
  uint32_t threads;     // keys of a tile; 8 columns of the value a thread
  uint32_t chunk;       // 16-byte vectors of a key row staged at a time
  uint32_t rows;        // at most; a power of two
  uint32_t step_tiles;  // tiles between two maxima: rows * threads * step_tiles probabilities are kept

  uint32_t storage_bytes(uint32_t used_rows, uint32_t query_quads) const {
    return 16 * threads * (chunk + 1) + 16 * used_rows * query_quads +
           4 * used_rows * threads * (step_tiles + 2) + 40 * used_rows + 2048;
  }
};

inline constexpr DecodeTile kDecodeTiles[] = {
    // 128 bytes of each key in flight a thread, eight 16-byte loads; the fewer the rows, the more tiles share
    // the
    // cost of a maximum. 25 to 46 KB at head_dim 128.
    {128, 8, 1, 8},
    {128, 8, 2, 4},
    {128, 8, 4, 4},
    {128, 8, 8, 2},
    {128, 8, 16, 1},
    // The default limit of 16 KiB: smaller stages, fewer rows at once.
    {128, 2, 16, 1},
    {128, 2, 8, 1},
    {128, 2, 4, 1},
    {128, 2, 2, 1},
    {128, 2, 1, 1},
};

}  // namespace attnspan::webgpu
