#pragma once
// The one table of tile sizes, for shaders and host. A threadgroup is four simdgroups of 32 threads arranged as
// row groups x column groups: a row group owns 8 stationary rows (the height of a simdgroup matrix); its column
// groups share these rows and divide the streamed rows (scores) and the columns of the result among them.
// Streamed rows come 32 at a time.
//
// Limits that decide the numbers:
// - 32 KiB of threadgroup memory, the least that any Apple GPU with simdgroup matrices offers.
// - A result block of 8 x 8 is 2 registers per thread, of about 128: 16 to 18 blocks (32 to 36 registers) leave
//   room for scores, operands and addresses; 72 blocks (head dim 576 in one simdgroup) would spill.

#define ATTNSPAN_SIMDGROUPS 4
#define ATTNSPAN_THREADS 128
#define ATTNSPAN_STREAMED_ROWS 32

// Keys of a split of decode: 8 tiles. A partial result of 8 rows x 128 values (4 KiB) is then 3% of the keys and
// values it stands for in f16, 12% in tbq4, and 4096 keys of one KV head fill 16 cores.
#define ATTNSPAN_SPLIT_KEYS 256
// Beyond this many splits a sequence gets longer ones: the merge reads all of them.
#define ATTNSPAN_MAX_SPLITS 64

// X(name, largest head dim, row groups, column groups, result blocks per simdgroup)
// blocks * column groups * 8 = the largest head dim, so the two agree by construction.
#define ATTNSPAN_ROW_TILES(X)                                                                        \
  X(rows_32, 32, 4, 1, 4)    /* 32 rows: each streamed row is read once for 32 stationary ones */    \
  X(rows_64, 64, 4, 1, 8)    /* the same */                                                          \
  X(rows_128, 128, 4, 1, 16) /* the same; 30.6 KiB in f32, the fullest tile */                       \
  X(rows_256, 256, 2, 2, 16) /* 32 rows of f32 would be 33 KiB for the query alone: 16 rows */       \
  X(rows_576, 576, 1, 4, 18) /* 16 rows of f32 would be 37 KiB: 8 rows, columns over 4 simdgroups */

// Decode has few rows: 8 of them, and all four simdgroups share each tile of keys.
#define ATTNSPAN_DECODE_TILES(X) \
  X(decode_32, 32, 1, 4, 1)      \
  X(decode_64, 64, 1, 4, 2)      \
  X(decode_128, 128, 1, 4, 4)    \
  X(decode_256, 256, 1, 4, 8)

#define ATTNSPAN_TILES(X) \
  ATTNSPAN_ROW_TILES(X)   \
  ATTNSPAN_DECODE_TILES(X)

namespace attnspan_metal {

constexpr int larger(int a, int b) { return a > b ? a : b; }
constexpr int smaller(int a, int b) { return a < b ? a : b; }

// Rows in threadgroup memory are 16 bytes longer than their values, so that the 8 rows of a matrix do not fall
// into the same banks.
constexpr int padded_row(int columns, int element_bytes) { return columns + 16 / element_bytes; }

// Streamed rows are staged 256 bytes wide: 64 columns of f32, 128 of f16.
constexpr int chunk_columns(int max_dim, int element_bytes) { return smaller(max_dim, 256 / element_bytes); }

// Row of an 8 x 8 matrix in which the two elements of a lane lie: not in Metal's specification, the same on every
// Apple GPU so far, and checked on the device by matrix_layout_probe before the first use.
constexpr int matrix_row(int lane) { return ((lane / 4) & 4) + (lane / 2) % 4; }

// Byte offsets into the threadgroup memory of attention_forward.
struct ForwardLayout {
  int streamed, scores, factors, addresses, bytes;
};
constexpr ForwardLayout forward_layout(int max_dim, int rows, int element_bytes) {
  ForwardLayout layout{};
  const int query = rows * padded_row(max_dim, element_bytes) * element_bytes;
  const int chunk = padded_row(chunk_columns(max_dim, element_bytes), element_bytes) * element_bytes;
  layout.streamed = query;
  layout.scores = layout.streamed + ATTNSPAN_STREAMED_ROWS * chunk;
  // The finished rows are staged in f32 over everything before the factors.
  layout.factors =
      larger(layout.scores + rows * padded_row(ATTNSPAN_STREAMED_ROWS, 4) * 4, rows * padded_row(max_dim, 4) * 4);
  layout.addresses = layout.factors + rows * 4;
  layout.bytes = layout.addresses + 4 * ATTNSPAN_STREAMED_ROWS * 8;
  return layout;
}

// Byte offsets into the threadgroup memory of attention_dq and attention_dkv, which stage both sides by chunks.
struct BackwardLayout {
  int streamed, scores, dscores, statistics, bytes;
};
constexpr BackwardLayout backward_layout(int max_dim, int rows, int element_bytes) {
  BackwardLayout layout{};
  const int chunk = padded_row(chunk_columns(max_dim, element_bytes), element_bytes) * element_bytes;
  const int scores = rows * padded_row(ATTNSPAN_STREAMED_ROWS, 4) * 4;
  layout.streamed = rows * chunk;
  layout.scores = layout.streamed + ATTNSPAN_STREAMED_ROWS * chunk;
  layout.dscores = layout.scores + scores;
  // The finished rows are staged in f32 over everything before the statistics.
  layout.statistics = larger(layout.dscores + scores, rows * padded_row(max_dim, 4) * 4);
  // lse and delta, first and last key of a row
  layout.bytes = layout.statistics + 4 * ATTNSPAN_STREAMED_ROWS * 4;
  return layout;
}

}  // namespace attnspan_metal
