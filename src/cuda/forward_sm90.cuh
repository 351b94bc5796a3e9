#pragma once
// The forward kernel of Hopper. One block a multiprocessor stays for many tiles of query rows:
//   - a producer warp hands out tiles and keeps a ring of K and V tiles filled by TMA, across tiles of rows;
//   - each consumer warpgroup owns 64 rows. It starts the scores of the next keys, then the weighted sum of
//   the
//     current ones, and computes the softmax of the former while the latter runs. Warpgroups take turns in
//     starting products, so that one's softmax hides behind another's products.
// (The schedule is the one published as FlashAttention-3, arXiv:2407.08608.)

#include "cuda/forward_sm90.hpp"
#include "cuda/ptx.cuh"
#include "cuda/score.cuh"
#include "cuda/sequence.cuh"
#include "cuda/tiles.hpp"
#include "cuda/tma.cuh"
#include "cuda/wgmma.cuh"

namespace attnspan::cuda {

// ---- shared memory

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
  static constexpr int kBarriers = kTicketBarriers + 5;
  static constexpr int kTicketStart = kBarrierStart + 8 * kBarriers + 8;
  static constexpr int kBytes = kTicketStart + 2 * 16 + 1024;  // TMA's swizzle wants multiples of 1024

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
  __device__ uint32_t ticket_empty(int slot) const { return barrier(kTicketBarriers + 2 + slot); }
  __device__ uint32_t tail() const { return barrier(kTicketBarriers + 4); }
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
  for (int slot = 0; slot < 2; ++slot) {
    barrier_init(shared.ticket_full(slot), 1);
    barrier_init(shared.ticket_empty(slot), kConsumerWarps);
  }
  barrier_init(shared.tail(), 1);
  barrier_init_fence();
}

// Position in a ring of `kStages`: which slot, and the parity of its phase.
template <int kStages>
struct Ring {
  int slot = 0;
  uint32_t phase = 0;
  __device__ void advance() {
    if (++slot == kStages) {
      slot = 0;
      phase ^= 1;
    }
  }
};

// ---- tiles of rows

// What the producer tells the consumers: which rows. batch < 0: no more.
struct Ticket {
  int32_t batch, head, tile;
};

// All lanes of the producer warp together.
__device__ inline Ticket ticket_of(const Params& p, const Sm90Schedule& schedule, int rows, int64_t index) {
  if (p.cu_seqlens_q != nullptr) {
    const RowTile at = locate_tile(p, rows, 1, index / p.heads);
    return {at.batch, static_cast<int32_t>(index % p.heads), at.tile};
  }
  if (index >= schedule.tiles) return {-1, 0, 0};
  const int64_t per_section = static_cast<int64_t>(schedule.section) * schedule.row_tiles;
  const int64_t first = index / per_section * schedule.section;
  const int64_t pairs = static_cast<int64_t>(p.batch) * p.heads - first;
  const int32_t width = static_cast<int32_t>(pairs < schedule.section ? pairs : schedule.section);
  const int32_t rest = static_cast<int32_t>(index % per_section);
  const int64_t pair = first + rest % width;
  return {static_cast<int32_t>(pair / p.heads), static_cast<int32_t>(pair % p.heads),
          schedule.row_tiles - 1 - rest / width};
}

// The keys that the tile's rows see together.
struct RowsOfTile {
  DeviceSequence s;
  int32_t row0 = 0, rows = 0;
  KeySpan keys;
};
__device__ inline RowsOfTile rows_of_ticket(const Params& p, Ticket ticket, int rows_per_tile) {
  RowsOfTile r;
  r.s = sequence_of(p, ticket.batch);
  r.row0 = ticket.tile * rows_per_tile;
  const int32_t left = r.s.seqlen_q - r.row0;
  r.rows = left < rows_per_tile ? left : rows_per_tile;
  if (r.rows > 0) r.keys = r.s.rule.hull(r.row0, r.row0 + r.rows);
  return r;
}

// ---- the producer

// V rows beyond the sequence's keys arrive with another sequence's bytes, perhaps NaN, and 0 x NaN is NaN:
// wait for the tile, clear them, and only then hand it over.
template <typename Tile>
__device__ inline void clear_tail(const Sm90Shared<Tile>& shared, int stage, int first_missing) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  constexpr int kBlocks = Sm90Shared<Tile>::kColumnBlocks;
  const int chunks = (Tile::kKeys - first_missing) * 8;  // of 16 bytes in one block of columns
  for (int i = lane; i < kBlocks * chunks; i += 32) {
    const uint32_t at =
        shared.value(stage) + i / chunks * (Tile::kKeys * 128) + first_missing * 128 + i % chunks * 16;
    asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(at), "r"(0) : "memory");
  }
  fence_async_proxy();
  __syncwarp();
}

// Where the producer stands in its rings.
template <typename Tile>
struct Production {
  Ring<Tile::kStages> keys;
  Ring<Tile::kQueries> queries;
  Ring<2> tickets;
  uint32_t tail_phase = 0;
};

// All lanes; the first one waits and starts the copies.
template <typename Tile>
__device__ inline void load_query(const detail::Sm90Args& args, const Sm90Shared<Tile>& shared,
                                  const RowsOfTile& r, int32_t head, int batch, Production<Tile>& at) {
  using S = Sm90Shared<Tile>;
  if ((threadIdx.x & 31) == 0) {
    const uint32_t full = shared.query_full(at.queries.slot);
    barrier_wait(shared.query_empty(at.queries.slot), at.queries.phase ^ 1);
    barrier_arrive_expecting(full, S::kQueryBytes);
    for (int c = 0; c < S::kDepthBlocks; ++c) {
      tma_load(shared.query(at.queries.slot) + c * S::kRows * 128, &args.query, full, c * 64,
               static_cast<int>(r.s.q_row0) + r.row0, head, batch);
    }
  }
  at.queries.advance();
}

template <typename Tile>
__device__ inline void load_value(const detail::Sm90Args& args, const Sm90Shared<Tile>& shared,
                                  const RowsOfTile& r, int32_t kv_head, int batch, int32_t key0,
                                  Production<Tile>& at) {
  using S = Sm90Shared<Tile>;
  const int stage = at.keys.slot;
  const bool tail = args.schedule.zero_tail && key0 + Tile::kKeys > r.s.rule.key_limit;
  if ((threadIdx.x & 31) == 0) {
    const uint32_t full = tail ? shared.tail() : shared.value_full(stage);
    barrier_wait(shared.value_empty(stage), at.keys.phase ^ 1);
    barrier_arrive_expecting(full, S::kValueBytes);
    for (int c = 0; c < S::kColumnBlocks; ++c) {
      tma_load(shared.value(stage) + c * Tile::kKeys * 128, &args.value, full, c * 64,
               static_cast<int>(r.s.k_row0) + key0, kv_head, batch);
    }
  }
  if (!tail) return;
  __syncwarp();
  barrier_wait(shared.tail(), at.tail_phase);
  at.tail_phase ^= 1;
  clear_tail(shared, stage, static_cast<int>(r.s.rule.key_limit - key0));
  if ((threadIdx.x & 31) == 0) barrier_arrive(shared.value_full(stage));
}

template <typename Tile>
__device__ inline void load_key(const detail::Sm90Args& args, const Sm90Shared<Tile>& shared,
                                const RowsOfTile& r, int32_t kv_head, int batch, int32_t key0,
                                Production<Tile>& at) {
  using S = Sm90Shared<Tile>;
  if ((threadIdx.x & 31) != 0) return;
  const uint32_t full = shared.key_full(at.keys.slot);
  barrier_wait(shared.key_empty(at.keys.slot), at.keys.phase ^ 1);
  barrier_arrive_expecting(full, S::kKeyBytes);
  for (int c = 0; c < S::kDepthBlocks; ++c) {
    tma_load(shared.key(at.keys.slot) + c * Tile::kKeys * 128, &args.key, full, c * 64,
             static_cast<int>(r.s.k_row0) + key0, kv_head, batch);
  }
}

template <typename Tile>
__device__ inline void hand_out(const Sm90Shared<Tile>& shared, Ticket ticket, Production<Tile>& at) {
  if ((threadIdx.x & 31) == 0) {
    barrier_wait(shared.ticket_empty(at.tickets.slot), at.tickets.phase ^ 1);
    const uint32_t to = shared.base + Sm90Shared<Tile>::kTicketStart + at.tickets.slot * 16;
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %3};" ::"r"(to), "r"(ticket.batch), "r"(ticket.head),
                 "r"(ticket.tile)
                 : "memory");
    barrier_arrive(shared.ticket_full(at.tickets.slot));
  }
  __syncwarp();
  at.tickets.advance();
}

// A tile of rows on the producer's side; ticket.batch < 0: none.
struct Upcoming {
  Ticket ticket;
  RowsOfTile r;
};

// All lanes. Without a counter every block has one tile: the next index is past the end.
template <typename Tile>
__device__ inline Upcoming take_next(const detail::Sm90Args& args, const Sm90Shared<Tile>& shared,
                                     int64_t index, Production<Tile>& at) {
  Upcoming next;
  next.ticket = ticket_of(args.p, args.schedule, Sm90Shared<Tile>::kRows, index);
  hand_out(shared, next.ticket, at);
  if (next.ticket.batch >= 0) next.r = rows_of_ticket(args.p, next.ticket, Sm90Shared<Tile>::kRows);
  return next;
}

template <typename Tile>
__device__ inline int64_t claim_index(const detail::Sm90Args& args) {
  uint32_t taken = 0;
  if ((threadIdx.x & 31) == 0 && args.schedule.next != nullptr) taken = atomicAdd(args.schedule.next, 1U);
  return static_cast<int64_t>(gridDim.x) + __shfl_sync(0xffffffffU, taken, 0);
}

// The next tile is taken while the first keys of this one load; with two buffers its queries follow at once.
// With one, they wait behind its first keys until the old ones are done with.
template <typename Tile>
__device__ inline void produce(const detail::Sm90Args& args, const Sm90Shared<Tile>& shared) {
  constexpr bool kEarly = Tile::kQueries == 2;
  Production<Tile> at;
  const bool packed = args.p.cu_seqlens_q != nullptr;
  const auto query_of = [&](const Upcoming& u) {
    load_query(args, shared, u.r, u.ticket.head, packed ? 0 : u.ticket.batch, at);
  };
  Upcoming now = take_next(args, shared, blockIdx.x, at);
  bool loaded = false;  // the queries of `now`
  while (now.ticket.batch >= 0) {
    const int batch = packed ? 0 : now.ticket.batch;
    const int32_t kv_head = now.ticket.head / args.p.group;
    const int32_t begin = static_cast<int32_t>(now.r.keys.begin), end = static_cast<int32_t>(now.r.keys.end);
    Upcoming next;
    bool next_loaded = false;
    if (begin >= end) next = take_next(args, shared, claim_index<Tile>(args), at);
    for (int32_t key0 = begin; key0 < end; key0 += Tile::kKeys) {
      load_key(args, shared, now.r, kv_head, batch, key0, at);
      if (key0 == begin && !loaded) query_of(now);
      load_value(args, shared, now.r, kv_head, batch, key0, at);
      __syncwarp();
      at.keys.advance();
      if (key0 != begin) continue;
      next = take_next(args, shared, claim_index<Tile>(args), at);
      if (kEarly && next.ticket.batch >= 0 && !next.r.keys.empty()) {
        query_of(next);
        next_loaded = true;
      }
    }
    now = next;
    loaded = next_loaded;
  }
}

// ---- the consumers

// A tile of rows as a thread of a consumer warpgroup sees it. Lengths fit 32 bits.
struct Work {
  int32_t batch = -1, head = 0;  // batch < 0: no more
  int32_t q_row0 = 0, seqlen_q = 0;
  int32_t row = 0;                       // of this thread; its other row is 8 further
  int32_t begin = 0, end = 0;            // keys that some row of the tile sees
  int32_t core_begin = 0, core_end = 0;  // keys that all rows of this warpgroup see
  int32_t span_begin[2] = {0, 0}, span_end[2] = {0, 0};
  int32_t diagonal = 0;
};

template <typename Tile>
__device__ inline Work work_of(const Params& p, Ticket ticket, int group) {
  Work w;
  w.batch = ticket.batch;
  w.head = ticket.head;
  if (ticket.batch < 0) return w;
  const RowsOfTile r = rows_of_ticket(p, ticket, Sm90Shared<Tile>::kRows);
  w.q_row0 = static_cast<int32_t>(r.s.q_row0);
  w.seqlen_q = r.s.seqlen_q;
  w.begin = static_cast<int32_t>(r.keys.begin);
  w.end = static_cast<int32_t>(r.keys.end);
  w.diagonal = static_cast<int32_t>(r.s.rule.diagonal);
  const int32_t first = r.row0 + 64 * group, last = min(first + 64, r.s.seqlen_q);
  if (first < last) {
    const KeySpan core = r.s.rule.core(first, last);
    w.core_begin = static_cast<int32_t>(core.begin);
    w.core_end = static_cast<int32_t>(core.end);
  }
  const int lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) / 32 % 4;
  w.row = first + 16 * warp + lane / 4;
  for (int half = 0; half < 2; ++half) {
    if (w.row + 8 * half >= r.s.seqlen_q) continue;
    const KeySpan span = r.s.rule.span(w.row + 8 * half);
    w.span_begin[half] = static_cast<int32_t>(span.begin);
    w.span_end[half] = static_cast<int32_t>(span.end);
  }
  return w;
}

// The state of a thread's two rows (lane / 4 and lane / 4 + 8 of its warp). m is in units of the scores as
// they stand in registers; `unit` turns them into powers of 2.
struct RowState {
  float m[2] = {-INFINITY, -INFINITY};
  float l[2] = {0, 0};
};

// The maximum may grow by this many powers of 2 before old results are rescaled: weights stay below 256,
// exact in f32 and no less precise in 16 bits, and most tiles need no rescaling at all.
inline constexpr float kLazyRescale = 8.0F;

// s becomes weights; true where older outputs must be multiplied by `rescale` (all lanes of a warp agree).
template <int kKeys>
__device__ __forceinline__ bool softmax_scores(float (&s)[kKeys / 2], RowState& state, float unit,
                                               float (&rescale)[2]) {
  float top[2];
  bool grows = false;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    top[half] = fmaxf(s[2 * half], s[2 * half + 1]);
#pragma unroll
    for (int t = 1; t < kKeys / 8; ++t)
      top[half] = fmaxf(top[half], fmaxf(s[4 * t + 2 * half], s[4 * t + 2 * half + 1]));
    top[half] = quad_max(top[half]);
    // With m = -inf and a finite top the difference is inf; with both -inf it is NaN: not greater.
    grows = grows || (top[half] - state.m[half]) * unit > kLazyRescale;
  }
  grows = __any_sync(0xffffffffU, grows);
  if (grows) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float m = fmaxf(top[half], state.m[half]);
      rescale[half] = m == -INFINITY ? 1.0F : exp2_approx((state.m[half] - m) * unit);
      state.m[half] = m;
      state.l[half] *= rescale[half];
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float base = state.m[half] == -INFINITY ? 0.0F : state.m[half] * unit;
    float sum[2] = {0, 0};
#pragma unroll
    for (int t = 0; t < kKeys / 8; ++t) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& x = s[4 * t + 2 * half + e];
        x = exp2_approx(fmaf(x, unit, -base));
        sum[e] += x;
      }
    }
    state.l[half] += sum[0] + sum[1];
  }
  return grows;
}

// Keys outside a row's span get -inf. Columns of the tile, relative to key0, are 8 t + 2 (lane % 4) + e.
template <int kKeys>
__device__ __forceinline__ void mask_scores(float (&s)[kKeys / 2], const Work& work, int32_t key0) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int begin = max(work.span_begin[half] - key0, 0), end = min(work.span_end[half] - key0, kKeys);
    const int first = begin - 2 * (static_cast<int>(threadIdx.x) & 3);
    const uint32_t size = static_cast<uint32_t>(max(end - begin, 0));
#pragma unroll
    for (int t = 0; t < kKeys / 8; ++t) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (static_cast<uint32_t>(8 * t + e - first) >= size) s[4 * t + 2 * half + e] = -INFINITY;
      }
    }
  }
}

__device__ __forceinline__ float tanh_approx(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// softcap, bias and alibi on products: s becomes logits in natural units. tanh.approx is off by 2^-11 at
// most, which is f16's own rounding.
template <int kKeys>
__device__ __forceinline__ void transform_scores(const Params& p, const Work& work, float (&s)[kKeys / 2],
                                                 int32_t key0) {
  if (p.softcap != 0) {
    const float inner = p.softmax_scale / p.softcap;
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) s[i] = p.softcap * tanh_approx(s[i] * inner);
  } else {
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) s[i] *= p.softmax_scale;
  }
  const int column = 2 * (static_cast<int>(threadIdx.x) & 3);
  if (p.alibi_slopes.data != nullptr) {
    const float slope = p.alibi_slopes.data[work.batch * p.alibi_slopes.batch_stride + work.head];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float offset = static_cast<float>(work.row + 8 * half + work.diagonal - key0 - column);
#pragma unroll
      for (int t = 0; t < kKeys / 8; ++t) {
#pragma unroll
        for (int e = 0; e < 2; ++e)
          s[4 * t + 2 * half + e] -= slope * fabsf(offset - static_cast<float>(8 * t + e));
      }
    }
  }
  if (p.bias.data == nullptr) return;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float* bias = p.bias.data + work.batch * p.bias.batch_stride + work.head * p.bias.head_stride +
                        (work.row + 8 * half) * p.bias.row_stride + (key0 + column) * p.bias.key_stride;
    const int begin = work.span_begin[half] - key0 - column, end = work.span_end[half] - key0 - column;
#pragma unroll
    for (int t = 0; t < kKeys / 8; ++t) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (8 * t + e < begin || 8 * t + e >= end) continue;
        const float b = bias[(8 * t + e) * p.bias.key_stride];
        float& x = s[4 * t + 2 * half + e];
        x = b <= kMaskingBiasValue ? -INFINITY : x + b;
      }
    }
  }
}

// Starts s = Q K^T for this warpgroup's rows.
template <typename T, typename Tile>
__device__ __forceinline__ void start_scores(float (&s)[Tile::kKeys / 2], uint32_t query, uint32_t key) {
#pragma unroll
  for (int k = 0; k < Tile::kDepth / 16; ++k) {
    const uint32_t block = k / 4, within = k % 4 * 32;
    const uint64_t a = wgmma_descriptor(query + block * Sm90Shared<Tile>::kRows * 128 + within, 16);
    const uint64_t b = wgmma_descriptor(key + block * Tile::kKeys * 128 + within, 16);
    Wgmma<Tile::kKeys>::template keys<T>(s, a, b, k != 0);
  }
}

// Starts o += weights V.
template <typename T, typename Tile>
__device__ __forceinline__ void start_weighted_sum(float (&o)[Tile::kColumns / 2],
                                                   const uint32_t (&w)[Tile::kKeys / 4], uint32_t value,
                                                   int add) {
#pragma unroll
  for (int k = 0; k < Tile::kKeys / 16; ++k) {
    const uint64_t b = wgmma_descriptor(value + k * 2048, Tile::kKeys * 128);
    Wgmma<Tile::kColumns>::template values<T>(o, w + 4 * k, b, k == 0 ? add : 1);
  }
}

template <typename T, int kKeys>
__device__ __forceinline__ void pack_weights(uint32_t (&w)[kKeys / 4], const float (&s)[kKeys / 2]) {
#pragma unroll
  for (int i = 0; i < kKeys / 4; ++i) w[i] = pack(s[2 * i], s[2 * i + 1], T{});
}

// Four lanes exchange 4 words each: word k of lane t becomes word t of lane k.
__device__ __forceinline__ void transpose_quad(uint32_t (&w)[4]) {
  const bool odd = (threadIdx.x & 1) != 0, high = (threadIdx.x & 2) != 0;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t other = __shfl_xor_sync(0xffffffffU, odd ? w[i] : w[i + 1], 1);
    (odd ? w[i] : w[i + 1]) = other;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t other = __shfl_xor_sync(0xffffffffU, high ? w[i] : w[i + 2], 2);
    (high ? w[i] : w[i + 2]) = other;
  }
}

template <typename T>
__device__ inline int guard_pair(uint32_t& word) {
  T* values = reinterpret_cast<T*>(&word);
  int replaced = 0;
  for (int i = 0; i < 2; ++i) {
    if (isfinite(to_float(values[i]))) continue;
    values[i] = from_float<T>(0.0F);
    ++replaced;
  }
  return replaced;
}

// A tile whose keys are done: where its rows go, and their state.
struct Finished {
  int32_t batch, head, q_row0, seqlen_q, row;
  RowState state;
};

// Normalises, adds the sink, and writes out (16 bytes a lane) and lse.
template <typename T, typename Tile>
__device__ inline void store_tile(const Params& p, const Finished& done, const float (&o)[Tile::kColumns / 2],
                                  float natural) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  int replaced = 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = done.row + 8 * half;
    const bool exists = row < done.seqlen_q;
    float l = quad_sum(done.state.l[half]);
    float m = done.state.m[half] * natural, scale = 1;
    if (p.sinks != nullptr && p.sinks[done.head] != -INFINITY) {
      const float sink = p.sinks[done.head], top = l > 0 ? fmaxf(m, sink) : sink;
      scale = l > 0 ? expf(m - top) : 0.0F;
      l = l * scale + expf(sink - top);
      m = top;
    }
    const float factor = l > 0 ? scale / l : 0.0F;
    if (exists && (lane & 3) == 0 && p.lse.data != nullptr) {
      static_cast<float*>(p.lse.data)[p.lse.index(done.batch, done.head, done.q_row0 + row)] =
          l > 0 ? m + logf(l) : -INFINITY;
    }
    T* out = static_cast<T*>(p.out.data) + p.out.index(done.batch, done.head, done.q_row0 + row);
#pragma unroll
    for (int c = 0; c < Tile::kColumns / 8; c += 4) {
      uint32_t w[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        w[i] = pack(o[4 * (c + i) + 2 * half] * factor, o[4 * (c + i) + 2 * half + 1] * factor, T{});
        if (p.nan_guard && exists && (c + i) * 8 < p.head_dim_v) replaced += guard_pair<T>(w[i]);
      }
      transpose_quad(w);
      const int column = (c + (lane & 3)) * 8;
      if (exists && column < p.head_dim_v)
        *reinterpret_cast<uint4*>(out + column) = make_uint4(w[0], w[1], w[2], w[3]);
    }
  }
  if (replaced > 0) atomicAdd(p.replaced, static_cast<unsigned long long>(replaced));
}

// One consumer warpgroup: its turn in the ring of warpgroups that start products.
template <typename Tile>
struct Turn {
  int group;
  __device__ void wait() const { named_barrier_sync(1 + group, 256); }
  __device__ void pass() const { named_barrier_arrive(1 + (group + 1) % Tile::kWarpgroups, 256); }
};

// Rows that see no key: zeros, and the sink alone in lse.
template <typename T>
__device__ inline void store_nothing(const Params& p, const Work& work) {
  const int quarter = static_cast<int>(threadIdx.x) & 3;
  for (int half = 0; half < 2; ++half) {
    const int row = work.row + 8 * half;
    if (row >= work.seqlen_q) continue;
    T* out = static_cast<T*>(p.out.data) + p.out.index(work.batch, work.head, work.q_row0 + row);
    for (int c = 8 * quarter; c < p.head_dim_v; c += 32)
      *reinterpret_cast<uint4*>(out + c) = make_uint4(0, 0, 0, 0);
    if (quarter == 0 && p.lse.data != nullptr) {
      static_cast<float*>(p.lse.data)[p.lse.index(work.batch, work.head, work.q_row0 + row)] =
          p.sinks != nullptr ? p.sinks[work.head] : -INFINITY;
    }
  }
}

// A value that all lanes of the warp share, told to the compiler: addresses made of it stay in uniform
// registers.
__device__ __forceinline__ int32_t uniform(int32_t x) { return __shfl_sync(0xffffffffU, x, 0); }

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

// Tiles of keys of all tiles of rows form one sequence of steps: while the weighted sum of one step runs, the
// scores of the next one are taken, across the borders of tiles of rows too, so that storing a finished tile
// hides behind products as the softmax does.
template <typename T, typename Tile, bool kTransformed>
__device__ inline void consume(const Params& p, const Sm90Shared<Tile>& shared, int group) {
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
    barrier_wait(shared.key_full(ring.slot), ring.phase);
    turn.wait();
    keep(s);
    keep(w);
    wgmma_fence();
    start_scores<T, Tile>(s, shared.query(uniform(queries.slot)) + group * 64 * 128,
                          shared.key(uniform(ring.slot)));
    wgmma_commit();
    barrier_wait(shared.value_full(previous.slot), previous.phase);
    keep(o);
    wgmma_fence();
    start_weighted_sum<T, Tile>(o, w, shared.value(uniform(previous.slot)), add);
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
    consume<T, Tile, kTransformed>(args.p, shared, group - 1);
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
