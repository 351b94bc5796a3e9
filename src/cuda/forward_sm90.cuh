#pragma once
// The forward kernel of Hopper. One block a multiprocessor stays for many tiles of query rows:
//   - a producer warp hands out tiles and keeps a ring of K and V tiles filled by TMA, across tiles of rows;
//   - each consumer warpgroup owns 64 rows. It starts the scores of the next keys, then the weighted sum of
//   the
//     current ones, and computes the softmax of the former while the latter runs. Warpgroups take turns in
//     starting products, so that one's softmax hides behind another's products.
// (The schedule is the one published as FlashAttention-3, arXiv:2407.08608.)

#include "cuda/forward_sm90_producer.cuh"
#include "cuda/forward_sm90_scores.cuh"

namespace attnspan::cuda {

// The next tile with keys; tiles without any are answered here.
template <typename T, typename Tile>
__device__ inline Work take_work(const Params& p, const Sm90Shared<Tile>& shared, int group,
                                 Ring<2>& tickets) {
  for (;;) {
    barrier_wait(shared.ticket_full(tickets.slot), tickets.phase);
    const uint32_t at = shared.base + Sm90Shared<Tile>::kTicketStart + tickets.slot * 16;
    Ticket ticket;
    uint32_t unused;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(ticket.batch), "=r"(ticket.head), "=r"(ticket.tile), "=r"(unused)
                 : "r"(at)
                 : "memory");
    ticket = {uniform(ticket.batch), uniform(ticket.head), uniform(ticket.tile)};
    if ((threadIdx.x & 31) == 0) barrier_arrive(shared.ticket_empty(tickets.slot));
    tickets.advance();
    const Work work = work_of<Tile>(p, ticket, group);
    if (work.batch < 0 || work.begin < work.end) return work;
    store_nothing<T>(p, work);
  }
}

// Tile by tile: within one, while the weighted sum of one step runs, the scores of the next one are taken.
template <typename T, typename Tile, bool kTransformed>
__device__ inline void consume_by_tile(const Params& p, const Sm90Shared<Tile>& shared, int group) {
  constexpr int kKeys = Tile::kKeys;
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const Turn<Tile> turn{group};
  if (group == Tile::kWarpgroups - 1) turn.pass();  // warpgroup 0 starts
  const float unit = kTransformed ? kLog2e : p.softmax_scale * kLog2e;
  const float natural = kTransformed ? 1.0F : p.softmax_scale;
  Ring<Tile::kStages> ring;
  Ring<2> tickets;
  uint32_t query_phase = 0;
  const uint32_t query = shared.query(0) + group * 64 * 128;
  const auto release = [&](uint32_t barrier) {
    if (lane == 0) barrier_arrive(barrier);
  };
  for (;;) {
    const Work work = take_work<T, Tile>(p, shared, group, tickets);
    if (work.batch < 0) return;
    float o[Tile::kColumns / 2];
    float s[kKeys / 2];
    uint32_t w[kKeys / 4];
    RowState state;
    float rescale[2] = {1, 1};
    const auto weigh = [&](int32_t key0) {
      if constexpr (kTransformed) transform_scores<kKeys>(p, work, s, key0);
      if (key0 < work.core_begin || key0 + kKeys > work.core_end) mask_scores<kKeys>(s, work, key0);
      return softmax_scores<kKeys>(s, state, unit, rescale);
    };
    barrier_wait(shared.query_full(0), query_phase);
    query_phase ^= 1;
    barrier_wait(shared.key_full(ring.slot), ring.phase);
    turn.wait();
    wgmma_fence();
    start_scores<T, Tile>(s, query, shared.key(ring.slot));
    wgmma_commit();
    turn.pass();
    wgmma_wait<0>();
    keep(s);
    release(shared.key_empty(ring.slot));
    weigh(work.begin);
    pack_weights<T, kKeys>(w, s);
    int add = 0;  // the first weighted sum overwrites o
    for (int32_t key0 = work.begin + kKeys; key0 < work.end; key0 += kKeys) {
      const Ring<Tile::kStages> previous = ring;
      ring.advance();
      barrier_wait(shared.key_full(ring.slot), ring.phase);
      turn.wait();
      keep(s);
      keep(w);
      wgmma_fence();
      start_scores<T, Tile>(s, query, shared.key(ring.slot));
      wgmma_commit();
      barrier_wait(shared.value_full(previous.slot), previous.phase);
      keep(o);
      wgmma_fence();
      start_weighted_sum<T, Tile>(o, w, shared.value(previous.slot), add);
      wgmma_commit();
      add = 1;
      turn.pass();
      wgmma_wait<1>();
      keep(s);
      release(shared.key_empty(ring.slot));
      const bool grown = weigh(key0);
      wgmma_wait<0>();
      keep(o);
      keep(w);
      release(shared.value_empty(previous.slot));
      if (grown) {
#pragma unroll
        for (int i = 0; i < Tile::kColumns / 2; ++i) o[i] *= rescale[i / 2 % 2];
      }
      pack_weights<T, kKeys>(w, s);
    }
    release(shared.query_empty(0));
    barrier_wait(shared.value_full(ring.slot), ring.phase);
    keep(o);
    keep(w);
    wgmma_fence();
    start_weighted_sum<T, Tile>(o, w, shared.value(ring.slot), add);
    wgmma_commit();
    wgmma_wait<0>();
    keep(o);
    release(shared.value_empty(ring.slot));
    ring.advance();
    store_tile<T, Tile>(p, {work.batch, work.head, work.q_row0, work.seqlen_q, work.row, state}, o, natural);
  }
}

// Tiles of keys of all tiles of rows form one sequence of steps: while the weighted sum of one step runs, the
// scores of the next one are taken, across the borders of tiles of rows too, so that storing a finished tile
// hides behind products as the softmax does.
template <typename T, typename Tile, bool kTransformed>
__device__ inline void consume_across(const Params& p, const Sm90Shared<Tile>& shared, int group) {
  constexpr int kKeys = Tile::kKeys;
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const Turn<Tile> turn{group};
  if (group == Tile::kWarpgroups - 1) turn.pass();  // warpgroup 0 starts
  const float unit = kTransformed ? kLog2e : p.softmax_scale * kLog2e;
  const float natural = kTransformed ? 1.0F : p.softmax_scale;
  Ring<Tile::kStages> ring;
  Ring<Tile::kQueries> queries;
  Ring<2> tickets;
  const auto release = [&](uint32_t barrier) {
    if (lane == 0) barrier_arrive(barrier);
  };

  Work work = take_work<T, Tile>(p, shared, group, tickets);
  if (work.batch < 0) return;
  float o[Tile::kColumns / 2];
  float s[kKeys / 2];
  uint32_t w[kKeys / 4];
  RowState state;
  float rescale[2] = {1, 1};
  int32_t key0 = work.begin;
  const auto weigh = [&] {
    if constexpr (kTransformed) transform_scores<kKeys>(p, work, s, key0);
    if (key0 < work.core_begin || key0 + kKeys > work.core_end) mask_scores<kKeys>(s, work, key0);
    return softmax_scores<kKeys>(s, state, unit, rescale);
  };
  const auto release_keys = [&] {
    release(shared.key_empty(ring.slot));
    if (key0 + kKeys >= work.end) release(shared.query_empty(queries.slot));
  };

  // Starts the scores of the step at `ring` and the weighted sum of the one before; returns when the scores
  // are there.
  const auto start_step = [&](const Ring<Tile::kStages>& previous, int add) {
    // Addresses first: between the turn's begin and end nothing but products is issued.
    const uint32_t query = shared.query(uniform(queries.slot)) + group * 64 * 128;
    const uint32_t key = shared.key(uniform(ring.slot)), value = shared.value(uniform(previous.slot));
    barrier_wait(shared.key_full(ring.slot), ring.phase);
    turn.wait();
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
    turn.pass();
    wgmma_wait<1>();
    keep(s);
    release_keys();
  };

  barrier_wait(shared.query_full(queries.slot), queries.phase);
  barrier_wait(shared.key_full(ring.slot), ring.phase);
  turn.wait();
  wgmma_fence();
  start_scores<T, Tile>(s, shared.query(queries.slot) + group * 64 * 128, shared.key(ring.slot));
  wgmma_commit();
  turn.pass();
  wgmma_wait<0>();
  keep(s);
  release_keys();
  weigh();
  pack_weights<T, kKeys>(w, s);
  Finished done;
  for (;;) {
    int add = 0;  // the first weighted sum of a tile overwrites o
    for (key0 += kKeys; key0 < work.end; key0 += kKeys) {
      const Ring<Tile::kStages> previous = ring;
      ring.advance();
      start_step(previous, add);
      add = 1;
      const bool grown = weigh();
      wgmma_wait<0>();
      keep(o);
      keep(w);
      release(shared.value_empty(previous.slot));
      if (grown) {
#pragma unroll
        for (int i = 0; i < Tile::kColumns / 2; ++i) o[i] *= rescale[i / 2 % 2];
      }
      pack_weights<T, kKeys>(w, s);
    }
    // The border: the first scores of the next tile beside the last weighted sum of this one.
    done = {work.batch, work.head, work.q_row0, work.seqlen_q, work.row, state};
    work = take_work<T, Tile>(p, shared, group, tickets);
    if (work.batch < 0) {
      barrier_wait(shared.value_full(ring.slot), ring.phase);
      keep(o);
      keep(w);
      wgmma_fence();
      start_weighted_sum<T, Tile>(o, w, shared.value(ring.slot), add);
      wgmma_commit();
      wgmma_wait<0>();
      keep(o);
      store_tile<T, Tile>(p, done, o, natural);
      return;
    }
    queries.advance();
    barrier_wait(shared.query_full(queries.slot), queries.phase);
    state = RowState{};
    key0 = work.begin;
    const Ring<Tile::kStages> previous = ring;
    ring.advance();
    start_step(previous, add);
    weigh();
    wgmma_wait<0>();
    keep(o);
    keep(w);
    release(shared.value_empty(previous.slot));
    store_tile<T, Tile>(p, done, o, natural);
    pack_weights<T, kKeys>(w, s);
  }
}

template <typename T, typename Tile, bool kTransformed>
__global__ void __launch_bounds__((Tile::kWarpgroups + 1) * 128, 1)
    forward_sm90_kernel(const __grid_constant__ detail::Sm90Args args) {
  extern __shared__ unsigned char dynamic[];
  const Sm90Shared<Tile> shared{(shared_address(dynamic) + 1023) / 1024 * 1024};
  if (threadIdx.x == 0) {
    tma_prefetch_map(&args.query);
    tma_prefetch_map(&args.key);
    tma_prefetch_map(&args.value);
    init_barriers(shared);
  }
  __syncthreads();
  const int group = uniform(static_cast<int32_t>(threadIdx.x) / 128);
  if (group == 0) {
    registers_give<Tile::kWarpgroups == 2 ? 40 : 32>();
    if (threadIdx.x < 32) produce<Tile>(args, shared);
  } else {
    registers_take<Tile::kWarpgroups == 2 ? 232 : 160>();
    if constexpr (Tile::kAcross) {
      consume_across<T, Tile, kTransformed>(args.p, shared, group - 1);
    } else {
      consume_by_tile<T, Tile, kTransformed>(args.p, shared, group - 1);
    }
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
      return launch_tile<T, Sm90Dim64>(args, transformed, blocks, stream);
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
