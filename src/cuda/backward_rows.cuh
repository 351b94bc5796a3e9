#pragma once
// What every sweep of backward needs of a query row besides its products, and which rows a block owns.

#include "cuda/backward.hpp"
#include "cuda/sequence.cuh"

namespace attnspan::cuda {

// First padded row of a sequence in the statistics. Packed ones start kStatRows further apart than their
// rows, rounded down: aligned, and never overlapping.
__device__ __forceinline__ int64_t stat_row0(const Params& p, const DeviceSequence& s) {
  if (p.cu_seqlens_q != nullptr) return (s.q_row0 / kStatRows + s.batch) * kStatRows;
  return static_cast<int64_t>(s.batch) * ((p.seqlen_q + kStatRows - 1) / kStatRows * kStatRows);
}

// Tile `index` of all sequences' rows. Equal lengths: the sequence changes first, so that tiles are dealt in
// order of their position. Packed sequence b starts at tile cu_seqlens[b] / rows + b: at least as many tiles
// as it needs, so a tile may lie behind its end. All lanes of a warp together.
__device__ inline RowTile backward_tile(const int32_t* cu_seqlens, int32_t batch, int32_t rows,
                                        uint32_t index) {
  RowTile found;
  if (cu_seqlens == nullptr) {
    found.batch = static_cast<int32_t>(index % static_cast<uint32_t>(batch));
    found.tile = static_cast<int32_t>(index / static_cast<uint32_t>(batch));
    return found;
  }
  const int lane = static_cast<int>(threadIdx.x) & 31;
  for (int32_t first = 0; first < batch; first += 32) {
    const int32_t b = first + lane;
    const int64_t start = b < batch ? cu_seqlens[b] / rows + b : 0;
    const bool holds = b < batch && start <= index && index < cu_seqlens[b + 1] / rows + b + 1;
    const uint32_t owners = __ballot_sync(0xffffffffU, holds);
    if (owners == 0) continue;
    const int owner = __ffs(static_cast<int>(owners)) - 1;
    found.batch = first + owner;
    found.tile = static_cast<int32_t>(index - __shfl_sync(0xffffffffU, start, owner));
    return found;
  }
  return found;
}

// The rows that see a key: a span as well, because ends of spans never decrease.
__device__ inline KeySpan rows_of_key(const DeviceSequence& s, int64_t key) {
  const SpanRule& rule = s.rule;
  if (key < rule.key_begin || key >= rule.key_limit) return {};
  // The first row of which `ends` (a non-decreasing array) exceeds the key.
  const auto first_beyond = [&](const int32_t* ends) {
    int32_t low = 0, high = s.seqlen_q;
    while (low < high) {
      const int32_t middle = low + (high - low) / 2;
      if (ends[middle] > key) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    return static_cast<int64_t>(low);
  };
  KeySpan rows{max(key - rule.diagonal - rule.window_right, static_cast<int64_t>(0)),
               min(key - rule.diagonal + rule.window_left + 1, static_cast<int64_t>(s.seqlen_q))};
  if (rule.key_end != nullptr) rows.begin = max(rows.begin, first_beyond(rule.key_end));
  if (rule.key_start != nullptr) rows.end = min(rows.end, first_beyond(rule.key_start));
  return rows;
}

// The rows that see key `index`, or the keys that row `index` sees.
template <bool kOwnsKeys>
__device__ __forceinline__ KeySpan span_of(const DeviceSequence& s, int64_t index) {
  if constexpr (kOwnsKeys) return rows_of_key(s, index);
  return s.rule.span(index);
}

}  // namespace attnspan::cuda
