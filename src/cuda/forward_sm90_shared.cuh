#pragma once
// What producer and consumers of the Hopper forward kernel share: the layout of shared memory, rings of
// buffers, and the tickets that say which rows a block works on.

#include "cuda/forward_sm90.hpp"
#include "cuda/sequence.cuh"
#include "cuda/sm90_fragments.cuh"
#include "cuda/tiles.hpp"
#include "cuda/tma.cuh"

namespace attnspan::cuda {

// ---- shared memory

inline constexpr int kTickets = 4;  // the producer may be ahead by some short tiles

template <typename Tile>
struct Sm90Shared {
  static constexpr int kRows = Tile::kWarpgroups * 64;
  static constexpr int kDepthBlocks = (Tile::kDepth + 63) / 64;  // of 64 columns = 128 bytes
  static constexpr int kColumnBlocks = (Tile::kColumns + 63) / 64;
  static constexpr int kQueryBytes = kDepthBlocks * kRows * 128;
  static constexpr int kKeyBytes = kDepthBlocks * Tile::kKeys * 128;
  static constexpr int kValueBytes = kColumnBlocks * Tile::kKeys * 128;
  static constexpr int kKeyStart = Tile::kQueries * kQueryBytes;
  static constexpr int kValueStart = kKeyStart + Tile::kStages * kKeyBytes;
  static constexpr int kBarrierStart = kValueStart + Tile::kStages * kValueBytes;
  static constexpr int kQueryBarriers = 4 * Tile::kStages;
  static constexpr int kTicketBarriers = kQueryBarriers + 2 * Tile::kQueries;
  static constexpr int kBarriers = kTicketBarriers + 2 * kTickets + 1;
  static constexpr int kTicketStart = (kBarrierStart + 8 * kBarriers + 15) / 16 * 16;
  // A ticket, in words: batch (< 0: no more), head, first row, seqlen_q | the keys that some row of the tile
  // sees, and those of its first row before they are cut to the sequence | where the first row's out and lse
  // lie, 64 bits each | seqlen_k, unused | for each warpgroup the keys that all of its rows see
  static constexpr int kTicketBytes = (56 + 8 * Tile::kWarpgroups + 15) / 16 * 16;
  static constexpr int kBytes =
      kTicketStart + kTickets * kTicketBytes + 1024;  // TMA's swizzle wants multiples of 1024

  uint32_t base;  // shared address, a multiple of 1024

  __device__ uint32_t query(int slot) const { return base + slot * kQueryBytes; }
  __device__ uint32_t key(int stage) const { return base + kKeyStart + stage * kKeyBytes; }
  __device__ uint32_t value(int stage) const { return base + kValueStart + stage * kValueBytes; }
  __device__ uint32_t barrier(int index) const { return base + kBarrierStart + 8 * index; }
  __device__ uint32_t key_full(int stage) const { return barrier(stage); }
  __device__ uint32_t key_empty(int stage) const { return barrier(Tile::kStages + stage); }
  __device__ uint32_t value_full(int stage) const { return barrier(2 * Tile::kStages + stage); }
  __device__ uint32_t value_empty(int stage) const { return barrier(3 * Tile::kStages + stage); }
  __device__ uint32_t query_full(int slot) const { return barrier(kQueryBarriers + slot); }
  __device__ uint32_t query_empty(int slot) const { return barrier(kQueryBarriers + Tile::kQueries + slot); }
  __device__ uint32_t ticket_full(int slot) const { return barrier(kTicketBarriers + slot); }
  __device__ uint32_t ticket_empty(int slot) const { return barrier(kTicketBarriers + kTickets + slot); }
  __device__ uint32_t ticket(int slot) const { return base + kTicketStart + slot * kTicketBytes; }
  __device__ uint32_t tail() const { return barrier(kTicketBarriers + 2 * kTickets); }
};

template <typename Tile>
__device__ inline void init_barriers(const Sm90Shared<Tile>& shared) {
  constexpr int kConsumerWarps = 4 * Tile::kWarpgroups;
  for (int stage = 0; stage < Tile::kStages; ++stage) {
    barrier_init(shared.key_full(stage), 1);
    barrier_init(shared.key_empty(stage), kConsumerWarps);
    barrier_init(shared.value_full(stage), 1);
    barrier_init(shared.value_empty(stage), kConsumerWarps);
  }
  for (int slot = 0; slot < Tile::kQueries; ++slot) {
    barrier_init(shared.query_full(slot), 1);
    barrier_init(shared.query_empty(slot), kConsumerWarps);
  }
  for (int slot = 0; slot < kTickets; ++slot) {
    barrier_init(shared.ticket_full(slot), 1);
    barrier_init(shared.ticket_empty(slot), kConsumerWarps);
  }
  barrier_init(shared.tail(), 1);
  barrier_init_fence();
}

// ---- tiles of rows

// Which rows: batch < 0: none.
struct Place {
  int32_t batch = -1, head = 0, tile = 0;
};

// All lanes of the producer warp together.
__device__ inline Place place_of_tile(const Params& p, const Sm90Schedule& schedule, int rows,
                                      int64_t index) {
  if (p.cu_seqlens_q != nullptr) {
    const RowTile at = locate_tile(p, rows, 1, index / p.heads);
    return {at.batch, static_cast<int32_t>(index % p.heads), at.tile};
  }
  if (index >= schedule.tiles) return {};
  // Sections and the tiles in one fit 32 bits; only how many sections there are may not.
  const uint32_t per_section = static_cast<uint32_t>(schedule.section) * schedule.row_tiles;
  const int32_t sections = static_cast<int32_t>(index / per_section);
  const uint32_t rest = static_cast<uint32_t>(index - static_cast<int64_t>(sections) * per_section);
  const int32_t first = sections * schedule.section;
  const uint32_t width = static_cast<uint32_t>(
      min(static_cast<int64_t>(p.batch) * p.heads - first, static_cast<int64_t>(schedule.section)));
  const int32_t pair = first + static_cast<int32_t>(rest % width);
  return {pair / p.heads, pair % p.heads, schedule.row_tiles - 1 - static_cast<int32_t>(rest / width)};
}

// The rows of a tile, and the keys that they see together.
struct RowsOfTile {
  DeviceSequence s;
  int32_t row0 = 0, rows = 0;
  KeySpan keys;
};
__device__ inline RowsOfTile rows_of_tile(const Params& p, Place place, int rows_per_tile) {
  RowsOfTile r;
  r.s = sequence_of(p, place.batch);
  r.row0 = place.tile * rows_per_tile;
  const int32_t left = r.s.seqlen_q - r.row0;
  r.rows = left < rows_per_tile ? left : rows_per_tile;
  if (r.rows > 0) r.keys = r.s.rule.hull(r.row0, r.row0 + r.rows);
  return r;
}

}  // namespace attnspan::cuda
