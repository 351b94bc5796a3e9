#pragma once
// The tiles of every kernel of this backend, and why.

#include <algorithm>
#include <cstdint>

namespace attnspan::webgpu {

// attention_forward.wgsl: a thread has 8 rows and 4 keys of the scores, 8 rows and column_vecs vec4 of out.
// So have attention_bwd_dq.wgsl and attention_bwd_dkv.wgsl, of a gradient; there rows are what a workgroup
// owns. Each thread moves four vec4 of query, of keys and of values a step.
struct ForwardTile {
  uint32_t rows, keys;
  uint32_t dim_quads, value_keys;
  uint32_t
      column_vecs;  // 1, 2 or 4; wider rows of out are cut into blocks, each of which makes the scores anew

  constexpr uint32_t threads() const { return rows / 8 * keys / 4; }
  constexpr uint32_t columns() const { return keys * column_vecs; }  // of out, in a block
  constexpr uint32_t stage_vecs() const {
    const uint32_t score = (rows + keys) * dim_quads + (rows + keys) / 4;
    const uint32_t value = value_keys * keys / 4 * column_vecs;
    const uint32_t out = rows * keys / 4;
    return std::max({score, value, out});
  }
  constexpr uint32_t storage_bytes() const {
    return 16 * (stage_vecs() + rows * keys / 4 + rows / 8 + rows * keys / 16);
  }
  constexpr bool loads_in_fours() const {
    const uint32_t step = 4 * threads();
    return rows * dim_quads == step && keys * dim_quads == step &&
           value_keys * keys / 4 * column_vecs == step;
  }
};

inline constexpr ForwardTile kForwardTiles[] = {
    // 64 x 64 scores by 128 threads: 12 vec4 out of workgroup memory for 128 products. 38 KB.
    {64, 64, 8, 32, 1},
    {64, 64, 8, 16, 2},
    {64, 64, 8, 8, 4},
    // The default limits of WebGPU, 16 KiB and 256 threads: 32 x 32 scores by 32 threads. 9.3 KB.
    {32, 32, 4, 8, 2},
    {32, 32, 4, 4, 4},
};
static_assert(std::ranges::all_of(kForwardTiles, &ForwardTile::loads_in_fours));

// attention_forward_matrix.wgsl: `subgroups` share each staged key. Rows = matrix * subgroups; keys = 16
// times the lanes that share a row of a matrix.
struct MatrixTile {
  uint32_t widest;  // serves rows of up to this many values
  uint32_t subgroups;

  uint32_t rows(uint32_t matrix) const { return matrix * subgroups; }
  static uint32_t keys(uint32_t matrix, uint32_t subgroup) { return 16 * (subgroup / matrix); }
  // Strides are padded to an odd number of 16-byte vectors.
  uint32_t storage_bytes(uint32_t matrix, uint32_t subgroup, uint32_t dim, uint32_t dim_v) const {
    const uint32_t k = keys(matrix, subgroup);
    const uint32_t key_bytes = std::max(16 * k * (dim / 8 | 1), 4 * subgroups * matrix * matrix);
    return key_bytes + 16 * k * (dim_v / 8 | 1) + 16 * rows(matrix) * (k / 4 + 1) + 4 * rows(matrix) + 16;
  }
};

inline constexpr uint32_t kWidestMatrixRow = 128;  // wider rows of out would not fit the registers

// The first within the limits. On 16 x 16 matrices and subgroups of 32 the first two fetch every key a step
// ahead; on an H200 half or twice the subgroups are slower: 51 and 96 TFLOP/s instead of 103 at 64 columns,
// causal; at 128 columns 50 with half, and more do not fit.
inline constexpr MatrixTile kMatrixTiles[] = {
    {64, 4},   // 64 x 32 tiles, 19 KB
    {128, 8},  // 128 x 32 tiles, 36 KB
    {128, 4}, {128, 2}, {128, 1},
};

// attention_decode.wgsl. Rows are the (query row, head) pairs that share each loaded key.
struct DecodeTile {
  uint32_t threads;     // keys of a tile; 8 columns of the value a thread
  uint32_t rows;        // at most; a power of two
  uint32_t step_tiles;  // tiles between two maxima: rows * threads * step_tiles probabilities are kept

  uint32_t storage_bytes(uint32_t used_rows, uint32_t query_quads) const {
    return 16 * used_rows * query_quads + 4 * used_rows * threads * (step_tiles + 2) + 40 * used_rows +
           32 * threads + 2048;
  }
};

inline constexpr uint32_t kDecodeRows = 8;  // rows whose sums a thread keeps in registers

inline constexpr DecodeTile kDecodeTiles[] = {
    // The fewer the rows, the more tiles share the cost of a maximum. 11 to 27 KB at head_dim 128.
    {128, 1, 8},
    {128, 2, 8},
    {128, 4, 4},
    {128, 8, 2},
    // The default limit of 16 KiB: fewer rows at once.
    {128, 4, 1},
    {128, 2, 1},
    {128, 1, 1},
};

}  // namespace attnspan::webgpu
