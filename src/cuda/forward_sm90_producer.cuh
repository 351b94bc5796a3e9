#pragma once
// The producer warp of the Hopper forward kernel: hands out tiles of rows and keeps the rings of K and V
// full.

#include "cuda/forward_sm90_shared.cuh"

namespace attnspan::cuda {

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

__device__ __forceinline__ void store_words(uint32_t to, int32_t a, int32_t b) {
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(to), "r"(a), "r"(b) : "memory");
}
__device__ __forceinline__ void store_words(uint32_t to, int32_t a, int32_t b, int32_t c, int32_t d) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

// Where the producer stands in its rings.
template <typename Tile>
struct Production {
  Ring<Tile::kStages> keys;
  Ring<Tile::kQueries> queries;
  Ring<kTickets> tickets;
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

__device__ __forceinline__ void store_offsets(uint32_t to, int64_t a, int64_t b) {
  asm volatile("st.shared.v2.b64 [%0], {%1, %2};" ::"r"(to), "l"(a), "l"(b) : "memory");
}

// Lane 0. What consumers would have to work out for every tile is worked out here, beside their loop.
template <typename Tile>
__device__ inline void hand_out(const Params& p, const Sm90Shared<Tile>& shared, const Place& place,
                                const RowsOfTile& r, Production<Tile>& at) {
  barrier_wait(shared.ticket_empty(at.tickets.slot), at.tickets.phase ^ 1);
  const uint32_t to = shared.ticket(at.tickets.slot);
  store_words(to, place.batch, place.head, r.row0, r.s.seqlen_q);
  if (place.batch >= 0) {
    // Rows further down add less than 256 to these: below -256 is as good as any.
    const SpanRule& rule = r.s.rule;
    const int64_t position = r.row0 + rule.diagonal, limit = rule.key_limit;
    const int64_t first_begin = min(max(position - rule.window_left, static_cast<int64_t>(-256)), limit);
    const int64_t first_end = min(max(position + rule.window_right + 1, static_cast<int64_t>(-256)), limit);
    store_words(to + 16, static_cast<int32_t>(r.keys.begin), static_cast<int32_t>(r.keys.end),
                static_cast<int32_t>(first_begin), static_cast<int32_t>(first_end));
    const int64_t row = r.s.q_row0 + r.row0;
    store_offsets(to + 32, p.out.index(place.batch, place.head, row),
                  p.lse.index(place.batch, place.head, row));
    store_words(to + 48, r.s.seqlen_k, 0);
    for (int group = 0; group < Tile::kWarpgroups; ++group) {
      const int32_t first = r.row0 + 64 * group, last = min(first + 64, r.s.seqlen_q);
      const KeySpan core = first < last ? rule.core(first, last) : KeySpan{};
      store_words(to + 56 + 8 * group, static_cast<int32_t>(core.begin), static_cast<int32_t>(core.end));
    }
  }
  barrier_arrive(shared.ticket_full(at.tickets.slot));
}

// A tile of rows on the producer's side; place.batch < 0: none.
struct Upcoming {
  Place place;
  RowsOfTile r;
};

// All lanes.
template <typename Tile>
__device__ inline Upcoming take_next(const detail::Sm90Args& args, const Sm90Shared<Tile>& shared,
                                     int64_t index, Production<Tile>& at) {
  Upcoming next;
  next.place = place_of_tile(args.p, args.schedule, Sm90Shared<Tile>::kRows, index);
  if (next.place.batch >= 0) next.r = rows_of_tile(args.p, next.place, Sm90Shared<Tile>::kRows);
  if ((threadIdx.x & 31) == 0) hand_out(args.p, shared, next.place, next.r, at);
  __syncwarp();
  at.tickets.advance();
  return next;
}

// The index of a block's tile number `turn`. Without a counter tiles are dealt forth and back, so that a
// block whose first tile is among the longest gets one of the shorter ones next: a memset less before the
// kernel.
__device__ inline int64_t claim_index(const detail::Sm90Args& args, int32_t turn) {
  const int64_t round = static_cast<int64_t>(turn) * gridDim.x;
  if (turn == 0) return blockIdx.x;
  if (args.schedule.next == nullptr) return round + (turn % 2 == 0 ? blockIdx.x : gridDim.x - 1 - blockIdx.x);
  uint32_t taken = 0;
  if ((threadIdx.x & 31) == 0) taken = atomicAdd(args.schedule.next, 1U);
  return static_cast<int64_t>(gridDim.x) + __shfl_sync(0xffffffffU, taken, 0);
}

// Queries follow behind the first keys: the old ones may still be in use then.
template <typename Tile>
__device__ inline void produce(const detail::Sm90Args& args, const Sm90Shared<Tile>& shared) {
  Production<Tile> at;
  const bool packed = args.p.cu_seqlens_q != nullptr;
  for (int32_t turn = 0;; ++turn) {
    const Upcoming now = take_next(args, shared, claim_index(args, turn), at);
    if (now.place.batch < 0) return;
    const int batch = packed ? 0 : now.place.batch;
    const int32_t kv_head = now.place.head / args.p.group;
    const int32_t begin = static_cast<int32_t>(now.r.keys.begin), end = static_cast<int32_t>(now.r.keys.end);
    for (int32_t key0 = begin; key0 < end; key0 += Tile::kKeys) {
      load_key(args, shared, now.r, kv_head, batch, key0, at);
      if (key0 == begin) load_query(args, shared, now.r, now.place.head, batch, at);
      load_value(args, shared, now.r, kv_head, batch, key0, at);
      __syncwarp();
      at.keys.advance();
    }
  }
}

}  // namespace attnspan::cuda
