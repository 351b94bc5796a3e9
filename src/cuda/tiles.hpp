#pragma once
// Every tile size of the CUDA backend, each row with its reason.

#include <cstddef>

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

// ---- the sm_90a forward kernel: head dims up to these run in it (TMA fills missing columns with zeros).
template <int kDepth_, int kColumns_, int kWarpgroups_, int kKeys_, int kStages_, int kQueries_, bool kTurns_>
struct Sm90Tile {
  static constexpr int kDepth = kDepth_;            // head_dim
  static constexpr int kColumns = kColumns_;        // head_dim_v
  static constexpr int kWarpgroups = kWarpgroups_;  // that compute, 64 query rows each
  static constexpr int kKeys = kKeys_;              // of a tile
  static constexpr int kStages = kStages_;          // tiles of K and of V in flight
  static constexpr int kQueries = kQueries_;  // tiles of Q: with two the next one is there when it is needed
  // Warpgroups take turns in starting products. Measured on an H200 at S = 16384: 4% less without at D = 128;
  // with three warpgroups (D = 64) and at D = 256, where products cover everything, 1 to 4% more.
  static constexpr bool kTurns = kTurns_;
};

// A thread holds keys / 2 scores, keys / 4 weights and columns / 2 outputs: with two warpgroups in 232
// registers, with three in 160. D = 64 is bound by the softmax: long sequences hide it behind three
// warpgroups; 192 rows a tile waste too much of short ones. Shared memory: Q + K and V.
using Sm90Dim64Short = Sm90Tile<64, 64, 2, 128, 4, 2, true>;  // 2 x 16 + 4 x 32 = 160 KB
using Sm90Dim64 = Sm90Tile<64, 64, 3, 128, 4, 1, false>;      // 24 + 4 x 32 = 152 KB
using Sm90Dim96 = Sm90Tile<96, 96, 2, 128, 2, 1, true>;       // stored as 128 columns: 32 + 2 x 64 = 160 KB
using Sm90Dim128 = Sm90Tile<128, 128, 2, 128, 2, 1, true>;    // 32 + 2 x 64 = 160 KB
using Sm90Dim192 = Sm90Tile<192, 128, 2, 112, 2, 1, true>;    // 48 + 2 x 70 = 188 KB
using Sm90Dim256 = Sm90Tile<256, 256, 2, 80, 2, 1, false>;    // 64 + 2 x 80 = 224 KB

// ---- the sm_90a backward kernels: a block keeps kSm90OwnRows keys (or query rows), 64 a warpgroup; the
// other side passes in steps.
inline constexpr int kSm90OwnRows = 128;
template <bool kOwnsKeys_, int kDim_, int kStep_, int kStages_>
struct Sm90BackwardTile {
  static constexpr bool kOwnsKeys = kOwnsKeys_;  // dk and dv, query rows pass; else dq, keys pass
  static constexpr int kDim = kDim_;             // head_dim and head_dim_v at most
  static constexpr int kStep = kStep_;
  static constexpr int kStages = kStages_;  // steps in flight
};
// A thread holds step / 2 products of each kind, step / 4 packed ones of each that is summed, and dim / 2
// sums of dq or dim of dk and dv: 128 + 64 + 32 = 224 registers of 240 at most. Shared memory: own tiles +
// steps.
template <int kDim>
using Sm90KeyTile = Sm90BackwardTile<true, kDim, kDim == 64 ? 128 : 64, 3>;  // 32 + 99, 64 + 97 KB
template <int kDim>
using Sm90QueryTile = Sm90BackwardTile<false, kDim, 128, kDim == 64 ? 3 : 2>;  // 32 + 96, 64 + 128 KB

inline constexpr int kSm90LongRows = 2048;  // query rows from which Sm90Dim64 wins over Sm90Dim64Short
// Up to so many tiles of rows a sequence they are dealt in a fixed order; beyond, a counter hands them out.
inline constexpr int kSm90DealtTiles = 4;

// ---- decode: a team is up to 4 warps, which share a unit of work; the rest of a block is more teams.
inline constexpr int kTeamWarps = 4;

// Dense caches: one team a block, two blocks a multiprocessor. A warp's step is 16 keys; its ring takes 24 KB
// (D = 256: 48 KB), so that 130 KB are under way on a multiprocessor, where 33 KB would cover the latency of
// a memory that gives each 33 GB/s.
constexpr int dense_stages(int dim) { return dim == 64 ? 6 : 3; }
// Query rows of a unit: outputs of 16 rows of 256 values leave no registers.
constexpr int dense_rows(int dim, int rows) { return rows <= 8 || dim > 128 ? 8 : 16; }
// Fewer keys than this are not worth a partial state of their own. Twice as many make batches 1 to 8% faster
// and a single sequence of 4096 keys 30 to 45% slower (H200).
inline constexpr int kDenseSplitKeys = 512;
inline constexpr int kQuantisedSplitKeys = 1024;

// Rows of 576 values of which values are the first 512: one block a multiprocessor, two steps of 64 keys (74
// KB each), and what its warps exchange.
inline constexpr size_t kMlaSharedBytes = 2 * 64 * 576 * 2 + 22 * 1024;

// Quantised caches: one block a multiprocessor, whose teams share the table of tbq4 (64 KB). Registers bound
// the teams, shared memory the steps in a ring; groups: of 16 keys in a step. D = 128, tbq4: 12 warps of 168
// registers, 3 steps of 4.1 KB each: 149 KB beside the table. Where a block has 99 KB: a team of 2 warps
// (8.6, 8.9) or 3, two steps each.
struct QuantisedShape {
  int teams, groups, stages;
};
constexpr QuantisedShape quantised_shape(int dim, int rows, bool key_q8, bool value_q8) {
  const bool any_q8 = key_q8 || value_q8;
  if (dim == 64) return {rows <= 8 ? 4 : 3, 2, 3};
  if (dim == 128) return {rows <= 8 ? 3 : 2, 2, any_q8 ? 2 : 3};
  return {2, any_q8 ? 1 : 2, 2};
}
constexpr int quantised_rows(int dim, int rows, bool any_q8) {
  return rows <= 8 || dim > 128 || any_q8 ? 8 : 16;
}
inline constexpr int kQuantisedAhead = 2;  // steps under way, at most

// The table's address in the shared window is a constant. A block's memory starts at 1024 there in code for
// 9.0, at 0 in code for 8.0. In front of the table each team has up to 1 KB and its queries in f16.
constexpr int shared_base(int major) { return major >= 9 ? 1024 : 0; }
inline constexpr int kTableBytes = 256 * 256;
constexpr int quantised_table(int dim, int rows) {
  const int teams = quantised_shape(dim, rows, false, false).teams;
  return 1024 + (teams * (1152 + rows * (dim + 8) * 2) + 1023) / 1024 * 1024;
}
// A step in shared memory, whose slot also takes a state of 8 query rows when a split ends.
constexpr int quantised_step_bytes(int dim, bool key_q8, bool value_q8, int groups) {
  const auto row = [dim](bool q8) { return q8 ? dim + dim / 32 * 2 : dim / 2 + (dim <= 128 ? 1 : 2) * 2; };
  const int step = 16 * groups * (row(key_q8) + row(value_q8)), state = 8 * (dim + 4) * 4;
  return ((step > state ? step : state) + 127) / 128 * 128;
}

}  // namespace attnspan::cuda
