#pragma once
// What producer and consumers of a Hopper backward sweep share, and the producer.

#include "cuda/backward_rows.cuh"
#include "cuda/backward_sm90.hpp"
#include "cuda/sm90_fragments.cuh"
#include "cuda/tiles.hpp"
#include "cuda/tma.cuh"

namespace attnspan::cuda {

template <typename Tile>
struct BackwardShared {
  static constexpr int kColumnBlocks = Tile::kDim / 64;  // of 64 columns = 128 bytes
  static constexpr int kOwnBytes = kColumnBlocks * kSm90OwnRows * 128;
  static constexpr int kStepBytes = kColumnBlocks * Tile::kStep * 128;
  static constexpr int kStepStart = 2 * kOwnBytes;
  static constexpr int kStatBytes = Tile::kOwnsKeys ? Tile::kStep * static_cast<int>(sizeof(RowStat)) : 0;
  static constexpr int kStatStart = kStepStart + Tile::kStages * 2 * kStepBytes;
  static constexpr int kBarrierStart = kStatStart + Tile::kStages * kStatBytes;
  static constexpr int kBytes = kBarrierStart + 8 * (2 * Tile::kStages + 2) + 1024;  // swizzle: from 1024s on

  uint32_t base;  // shared address, a multiple of 1024

  __device__ uint32_t own(int tensor) const { return base + tensor * kOwnBytes; }
  __device__ uint32_t step(int stage, int tensor) const {
    return base + kStepStart + (2 * stage + tensor) * kStepBytes;
  }
  __device__ uint32_t stats(int stage) const { return base + kStatStart + stage * kStatBytes; }
  __device__ uint32_t barrier(int index) const { return base + kBarrierStart + 8 * index; }
  __device__ uint32_t full(int stage) const { return barrier(stage); }
  __device__ uint32_t empty(int stage) const { return barrier(Tile::kStages + stage); }
  __device__ uint32_t own_full() const { return barrier(2 * Tile::kStages); }
  __device__ uint32_t tail() const { return barrier(2 * Tile::kStages + 1); }
};

template <typename Tile>
__device__ inline void init_barriers(const BackwardShared<Tile>& shared) {
  for (int stage = 0; stage < Tile::kStages; ++stage) {
    barrier_init(shared.full(stage), 1);
    barrier_init(shared.empty(stage), kSm90OwnRows / 16);  // consumer warps
  }
  barrier_init(shared.own_full(), 1);
  barrier_init(shared.tail(), 1);
  barrier_init_fence();
}

// What a block works on. "Own" rows are keys in the sweep of dk and dv, query rows in that of dq; steps go
// over the other side.
struct BackwardWork {
  DeviceSequence s;
  int32_t head = 0;                // of the own side
  int32_t own0 = 0, own_rows = 0;  // the first, and how many there are in the tensor; 0: nothing to do
  int32_t own_limit = 0;           // rows of the sequence: those behind it (seqused_k) get zeros
  int32_t begin = 0, end = 0;      // steps
};

__device__ __forceinline__ int32_t narrow(int64_t x) {
  return static_cast<int32_t>(min(max(x, static_cast<int64_t>(0)), static_cast<int64_t>(0x3fffffff)));
}

template <typename Tile>
__device__ inline BackwardWork find_work(const detail::Sm90BackwardArgs& args) {
  const Params& p = args.b.forward;
  const uint32_t heads = static_cast<uint32_t>(Tile::kOwnsKeys ? p.kv_heads : p.heads);
  // Under a causal mask early keys and late rows have the most work: they start first.
  const uint32_t block = Tile::kOwnsKeys ? blockIdx.x : gridDim.x - 1 - blockIdx.x;
  const RowTile tile =
      backward_tile(Tile::kOwnsKeys ? p.cu_seqlens_k : p.cu_seqlens_q, p.batch, kSm90OwnRows, block / heads);
  BackwardWork w;
  if (tile.batch < 0) return w;
  w.s = sequence_of(p, tile.batch);
  w.head = static_cast<int32_t>(block % heads);
  w.own0 = tile.tile * kSm90OwnRows;
  w.own_limit = Tile::kOwnsKeys ? w.s.seqlen_k : w.s.seqlen_q;
  const int32_t exist = Tile::kOwnsKeys && p.cu_seqlens_k == nullptr ? p.seqlen_k : w.own_limit;
  w.own_rows = min(kSm90OwnRows, exist - w.own0);
  const int32_t last = min(w.own0 + kSm90OwnRows, w.own_limit);
  if (w.own0 >= last) return w;
  const KeySpan hull{span_of<Tile::kOwnsKeys>(w.s, w.own0).begin,
                     span_of<Tile::kOwnsKeys>(w.s, last - 1).end};
  w.begin = narrow(hull.begin);
  w.end = narrow(hull.end);
  if (Tile::kOwnsKeys) w.begin -= w.begin % Tile::kStep;  // the statistics come in whole tiles
  return w;
}

// Rows of a step beyond the sequence are another's, perhaps NaN, and 0 x NaN is NaN: clear them.
template <typename Tile>
__device__ inline void clear_tail(const BackwardShared<Tile>& shared, int stage, int first_missing) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const int chunks = (Tile::kStep - first_missing) * 8;  // of 16 bytes in one block of columns
  for (int i = lane; i < 2 * BackwardShared<Tile>::kColumnBlocks * chunks; i += 32) {
    const uint32_t at =
        shared.step(stage, 0) + i / chunks * (Tile::kStep * 128) + first_missing * 128 + i % chunks * 16;
    asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(at), "r"(0) : "memory");
  }
  fence_async_proxy();
  __syncwarp();
}

// One warp. `batch`: of the tensor maps; packed tensors have one.
template <typename Tile>
struct BackwardProducer {
  using S = BackwardShared<Tile>;
  const detail::Sm90BackwardArgs& args;
  const S& shared;
  const BackwardWork& w;
  const int batch;
  Ring<Tile::kStages> ring;
  uint32_t tail_phase = 0;

  __device__ __forceinline__ void load_own() const {
    const int row = static_cast<int>(Tile::kOwnsKeys ? w.s.k_row0 : w.s.q_row0) + w.own0;
    barrier_arrive_expecting(shared.own_full(), 2 * S::kOwnBytes);
    for (int tensor = 0; tensor < 2; ++tensor) {
      for (int c = 0; c < S::kColumnBlocks; ++c) {
        tma_load(shared.own(tensor) + c * kSm90OwnRows * 128, &args.own[tensor], shared.own_full(), c * 64,
                 row, w.head, batch);
      }
    }
  }

  __device__ __forceinline__ void load_step(int32_t head, int32_t step0, uint32_t barrier) const {
    const int row = static_cast<int>(Tile::kOwnsKeys ? w.s.q_row0 : w.s.k_row0) + step0;
    barrier_wait(shared.empty(ring.slot), ring.phase ^ 1);
    barrier_arrive_expecting(barrier, 2 * S::kStepBytes + S::kStatBytes);
    for (int tensor = 0; tensor < 2; ++tensor) {
      for (int c = 0; c < S::kColumnBlocks; ++c) {
        tma_load(shared.step(ring.slot, tensor) + c * Tile::kStep * 128, &args.step[tensor], barrier, c * 64,
                 row, head, batch);
      }
    }
    if constexpr (Tile::kOwnsKeys) {
      const BackwardParams& b = args.b;
      bulk_load(shared.stats(ring.slot), b.stats + head * b.stat_rows + stat_row0(b.forward, w.s) + step0,
                barrier, S::kStatBytes);
    }
  }

  __device__ __forceinline__ void run() {
    const bool first_lane = (threadIdx.x & 31) == 0;
    const Params& p = args.b.forward;
    const int32_t limit = Tile::kOwnsKeys ? w.s.seqlen_q : w.s.seqlen_k;
    const int32_t head0 = Tile::kOwnsKeys ? w.head * p.group : w.head / p.group;
    if (first_lane && w.begin < w.end) load_own();
    for (int32_t head = head0; head < head0 + (Tile::kOwnsKeys ? p.group : 1); ++head) {
      for (int32_t step0 = w.begin; step0 < w.end; step0 += Tile::kStep) {
        const bool tail = args.zero_tail && step0 + Tile::kStep > limit;
        if (first_lane) load_step(head, step0, tail ? shared.tail() : shared.full(ring.slot));
        __syncwarp();
        if (tail) {
          barrier_wait(shared.tail(), tail_phase);
          tail_phase ^= 1;
          clear_tail(shared, ring.slot, limit - step0);
          if (first_lane) barrier_arrive(shared.full(ring.slot));
        }
        ring.advance();
      }
    }
  }
};

}  // namespace attnspan::cuda
