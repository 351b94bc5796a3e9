#pragma once
// The forward kernel of Hopper. One block a multiprocessor stays for many tiles of query rows:
//   - a producer warp hands out tiles and keeps a ring of K and V tiles filled by TMA, across tiles of rows;
//   - each consumer warpgroup owns 64 rows. It starts the scores of the next keys and, right behind them, the
//     weighted sum of the current ones; when the scores are there they become weights. Warpgroups take turns
//     in starting products, so that one's softmax hides behind another's products.
// (The schedule is the one published as FlashAttention-3, arXiv:2407.08608.)

#include "cuda/forward_sm90_producer.cuh"
#include "cuda/forward_sm90_scores.cuh"

namespace attnspan::cuda {

// One consumer warpgroup, and what its threads hold between steps.
template <typename T, typename Tile, bool kTransformed>
struct Consumer {
  static constexpr int kKeys = Tile::kKeys;
  using Stage = Ring<Tile::kStages>;

  const Params& p;
  const Sm90Shared<Tile>& shared;
  const int group;
  const Turn<Tile> turn;
  const float unit, natural;  // powers of 2, and natural logits, in one unit of the scores in registers
  Stage ring;
  Ring<Tile::kQueries> queries;
  Ring<kTickets> tickets;
  uint32_t query = 0;  // address of this warpgroup's rows
  Work work;
  float s[kKeys / 2], o[Tile::kColumns / 2];
  uint32_t w[kKeys / 4];
  RowState state;
  float rescale[2] = {1, 1};
  int add = 0;  // 0: the next weighted sum overwrites o

  __device__ __forceinline__ Consumer(const Params& params, const Sm90Shared<Tile>& memory, int index)
      : p(params),
        shared(memory),
        group(index),
        turn{index},
        unit(kTransformed ? kLog2e : params.softmax_scale * kLog2e),
        natural(kTransformed ? 1.0F : params.softmax_scale) {
    if (Tile::kTurns && group == Tile::kWarpgroups - 1) turn.pass();  // warpgroup 0 starts
  }

  __device__ __forceinline__ void release(uint32_t barrier) const {
    if ((threadIdx.x & 31) == 0) barrier_arrive(barrier);
  }

  // The next tile with keys; tiles without any are answered here. Its ticket stays until it is stored.
  __device__ __forceinline__ void take_work() {
    for (;;) {
      barrier_wait(shared.ticket_full(tickets.slot), tickets.phase);
      work = read_ticket(p, shared, tickets.slot, group);
      if (work.batch < 0 || work.begin < work.end) return;
      store_nothing<T>(p, work, read_destination(p, shared, tickets.slot, group));
      release_ticket();
    }
  }
  __device__ __forceinline__ void release_ticket() {
    release(shared.ticket_empty(tickets.slot));
    tickets.advance();
  }
  __device__ __forceinline__ void wait_for_query() {
    barrier_wait(shared.query_full(queries.slot), queries.phase);
    query = shared.query(queries.slot) + group * 64 * 128;
  }
  __device__ __forceinline__ void release_query() {
    release(shared.query_empty(queries.slot));
    queries.advance();
  }
  // With one tile of Q its place is free as soon as the scores of its last keys are there.
  __device__ __forceinline__ void release_single_query() {
    if constexpr (Tile::kQueries == 1) {
      if (work.begin + kKeys >= work.end) release_query();
    }
  }
  // Scores become weights; true where o must be rescaled first.
  __device__ __forceinline__ bool weigh(int32_t key0) {
    if constexpr (kTransformed) transform_scores<kKeys>(p, work, s, key0);
    if (key0 < work.core_begin || key0 + kKeys > work.core_end)
      mask_scores<kKeys>(s, work.span_begin, work.span_end, key0);
    return softmax_scores<kKeys>(s, state, unit, rescale);
  }
  __device__ __forceinline__ void rescale_sum() {
#pragma unroll
    for (int i = 0; i < Tile::kColumns / 2; ++i) o[i] *= rescale[i / 2 % 2];
  }

  // The scores of the keys at `ring` alone.
  __device__ __forceinline__ void first_scores() {
    barrier_wait(shared.key_full(ring.slot), ring.phase);
    if constexpr (Tile::kTurns) turn.wait();
    wgmma_fence();
    start_scores<T, Tile>(s, query, shared.key(ring.slot));
    wgmma_commit();
    if constexpr (Tile::kTurns) turn.pass();
    wgmma_wait<0>();
    keep(s);
    release(shared.key_empty(ring.slot));
    release_single_query();
  }
  // Goes on to the next keys: starts their scores and the weighted sum of the keys before; returns where the
  // latter are, when the scores are there.
  __device__ __forceinline__ Stage next_scores() {
    const Stage previous = ring;
    ring.advance();
    // Addresses first: between the turn's begin and end nothing but products is issued.
    const uint32_t key = shared.key(ring.slot), value = shared.value(previous.slot);
    barrier_wait(shared.key_full(ring.slot), ring.phase);
    if constexpr (Tile::kTurns) turn.wait();
    keep(s);
    keep(w);
    wgmma_fence();
    start_scores<T, Tile>(s, query, key);
    wgmma_commit();
    barrier_wait(shared.value_full(previous.slot), previous.phase);
    keep(o);
    wgmma_fence();
    start_weighted_sum<T, Tile>(o, w, value, add);
    wgmma_commit();
    if constexpr (Tile::kTurns) turn.pass();
    wgmma_wait<1>();
    keep(s);
    release(shared.key_empty(ring.slot));
    return previous;
  }
  __device__ __forceinline__ void finish_sum(const Stage& stage) {
    wgmma_wait<0>();
    keep(o);
    keep(w);
    release(shared.value_empty(stage.slot));
  }
  // The weighted sum of the keys at `ring`, alone.
  __device__ __forceinline__ void last_sum() {
    barrier_wait(shared.value_full(ring.slot), ring.phase);
    keep(o);
    keep(w);
    wgmma_fence();
    start_weighted_sum<T, Tile>(o, w, shared.value(ring.slot), add);
    wgmma_commit();
    finish_sum(ring);
    ring.advance();
  }

  // All keys of a tile but the first, whose weights are in w.
  __device__ __forceinline__ void inner_steps() {
    add = 0;
    for (int32_t key0 = work.begin + kKeys; key0 < work.end; key0 += kKeys) {
      const Stage previous = next_scores();
      add = 1;
      if constexpr (Tile::kQueries == 1) {
        if (key0 + kKeys >= work.end) release_query();
      }
      const bool grown = weigh(key0);
      finish_sum(previous);
      if (grown) rescale_sum();
      pack_weights<T, kKeys>(w, s);
    }
  }

  __device__ __forceinline__ void run() {
    for (;;) {
      take_work();
      if (work.batch < 0) return;
      state = RowState{};
      wait_for_query();
      first_scores();
      weigh(work.begin);
      pack_weights<T, kKeys>(w, s);
      inner_steps();
      if constexpr (Tile::kQueries > 1) release_query();
      last_sum();
      store_tile<T, Tile>(p, work, state, read_destination(p, shared, tickets.slot, group), o, natural);
      release_ticket();
    }
  }
};

// Registers of a thread, once the producer's warpgroup has given most of its own away.
struct Sm90Registers {
  int producer, consumer;
};
constexpr Sm90Registers sm90_registers(int warpgroups) {
  return warpgroups == 2 ? Sm90Registers{40, 232} : Sm90Registers{32, 160};
}

template <typename T, typename Tile, bool kTransformed>
__global__ void __launch_bounds__((Tile::kWarpgroups + 1) * 128, 1)
    forward_sm90_kernel(const __grid_constant__ detail::Sm90Args args) {
  extern __shared__ unsigned char dynamic[];
  // uniform(): an address that is computed anew inside the loops would cost them ten instructions.
  const Sm90Shared<Tile> shared{
      static_cast<uint32_t>(uniform((shared_address(dynamic) + 1023) / 1024 * 1024))};
  if (threadIdx.x == 0) {
    tma_prefetch_map(&args.query);
    tma_prefetch_map(&args.key);
    tma_prefetch_map(&args.value);
    init_barriers(shared);
  }
  __syncthreads();
  const int group = uniform(static_cast<int32_t>(threadIdx.x) / 128);
  if (group == Tile::kWarpgroups) {
    registers_give<sm90_registers(Tile::kWarpgroups).producer>();
    if (threadIdx.x % 128 < 32) produce<Tile>(args, shared);
  } else {
    registers_take<sm90_registers(Tile::kWarpgroups).consumer>();
    Consumer<T, Tile, kTransformed> consumer(args.p, shared, group);
    consumer.run();
  }
}

namespace detail {

template <typename T, typename Tile, bool kTransformed>
cudaError_t launch_tile(const Sm90Args& args, int blocks, cudaStream_t stream) {
  const auto kernel = forward_sm90_kernel<T, Tile, kTransformed>;
  constexpr int kBytes = Sm90Shared<Tile>::kBytes;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return error;
  kernel<<<static_cast<unsigned>(blocks), (Tile::kWarpgroups + 1) * 128, kBytes, stream>>>(args);
  return cudaGetLastError();
}

template <typename T, typename Tile>
cudaError_t launch_tile(const Sm90Args& args, bool transformed, int blocks, cudaStream_t stream) {
  return transformed ? launch_tile<T, Tile, true>(args, blocks, stream)
                     : launch_tile<T, Tile, false>(args, blocks, stream);
}

template <typename T>
cudaError_t launch_forward_sm90_as(const Sm90Args& args, int bucket, bool transformed, int blocks,
                                   cudaStream_t stream) {
  switch (bucket) {
    case 0:
      return launch_tile<T, Sm90Dim64Short>(args, transformed, blocks, stream);
    case 1:
      return launch_tile<T, Sm90Dim64, false>(args, blocks, stream);
    case 2:
      return launch_tile<T, Sm90Dim96>(args, transformed, blocks, stream);
    case 3:
      return launch_tile<T, Sm90Dim128>(args, transformed, blocks, stream);
    case 4:
      return launch_tile<T, Sm90Dim192>(args, transformed, blocks, stream);
    default:
      return launch_tile<T, Sm90Dim256>(args, transformed, blocks, stream);
  }
}

}  // namespace detail
}  // namespace attnspan::cuda
