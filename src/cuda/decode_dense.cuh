#pragma once
// Decode over keys and values in the query's own 16-bit dtype. Copies of 16 bytes go straight to shared
// memory (rows of 128-byte multiples, chunk c of row r at c ^ (r % 8)), products through mma.sync: at 4 query
// heads a KV head a multiprocessor receives 19 bytes a clock and needs 2 of its 16 tensor-core clocks for
// them.

#include "attnspan/tensor.hpp"
#include "cuda/decode_store.cuh"

namespace attnspan::cuda {

template <int kDim>
struct DenseDecode {
  static constexpr int kStep = 16;  // keys of one step of a warp
  static constexpr int kRowBytes = kDim * 2;
  static constexpr int kPlaneBytes = kStep * kRowBytes;
  static constexpr int kStageBytes = 2 * kPlaneBytes;  // K, then V
  static constexpr int kStages = kDim == 64 ? 6 : 3;   // 24 KB a warp (D = 256: 48 KB)
  static constexpr int kChunks = kRowBytes / 16;       // of a row
  static constexpr int kRowsAtOnce = 32 / kChunks;     // that a warp copies with one instruction
};

// Shared address of chunk c of row r.
template <int kDim>
__device__ __host__ constexpr uint32_t chunk_at(uint32_t plane, int row, int chunk) {
  return plane + row * DenseDecode<kDim>::kRowBytes + (chunk ^ (row & 7)) * 16;
}

// What a lane copies of keys or of values: one chunk of every kRowsAtOnce-th row. Strides fit 32 bits
// (plan_decode_kernel).
template <int kDim>
struct DenseCopies {
  using D = DenseDecode<kDim>;
  const uint8_t* from = nullptr;  // the chunk of its first row, of the unit's first page
  uint32_t page_stride, token_stride;
  bool column;  // the tensor has this chunk; if not it is filled with zeros

  __device__ __forceinline__ explicit DenseCopies(const KvPlane& plane)
      : page_stride(static_cast<uint32_t>(plane.page_stride)),
        token_stride(static_cast<uint32_t>(plane.token_stride)),
        column(lane_index() % D::kChunks * 8 < plane.dim) {}

  __device__ __forceinline__ void enter(const Params& p, const KvPlane& plane, const DecodeUnit& u) {
    const int row = lane_index() / D::kChunks, chunk = lane_index() % D::kChunks;
    const int64_t sequence = p.block_table == nullptr ? u.batch * plane.page_stride : 0;
    from = plane.codes + u.kv_head * plane.head_stride + sequence + row * plane.token_stride +
           (column ? chunk * 16 : 0);
  }

  // Rows [first, last) of 16 keys to `plane`; the others become zeros.
  template <bool kWhole>
  __device__ __forceinline__ void copy(uint32_t plane, uint32_t to, uint32_t page, uint32_t token, int first,
                                       int last) const {
    const uint8_t* chunk = advance(advance(from, page, page_stride), token, token_stride);
#pragma unroll
    for (int i = 0; i < D::kStep / D::kRowsAtOnce; ++i) {
      const int row = lane_index() / D::kChunks + i * D::kRowsAtOnce;
      const bool exists = kWhole || (row >= first && row < last);
      copy_async_16(plane + (to ^ chunk_at<kDim>(0, i * D::kRowsAtOnce, 0)),
                    exists ? advance(chunk, i * D::kRowsAtOnce, token_stride) : from, exists && column);
    }
  }
};

// The ring of one warp: copies run kStages - 1 steps ahead of the products, across splits and units, so that
// the memory never waits for one to be finished.
template <int kDim, int kRows>
struct DenseRing {
  using D = DenseDecode<kDim>;
  StepCursor<D::kStep, D::kStages - 1, kRows> cursor;
  DenseCopies<kDim> keys, values;
  uint32_t ring, to;  // to: chunk_at of the lane's chunk of row lane / kChunks
  int slot = 0;       // of the step to use next

  __device__ __forceinline__ DenseRing(const Params& p, const DecodeGrid& grid, const DecodeTeam<kRows>& team,
                                       uint32_t memory)
      : keys(p.key),
        values(p.value),
        ring(memory + team_warp() * D::kStages * D::kStageBytes),
        to(kept(chunk_at<kDim>(0, lane_index() / D::kChunks, lane_index() % D::kChunks))) {
    cursor.start(p, team);
    enter(p, team);
#pragma unroll 1  // less code to fetch before the first copy
    for (int i = 0; i < D::kStages - 1; ++i) copy(p, grid, team, i);
  }
  __device__ __forceinline__ void enter(const Params& p, const DecodeTeam<kRows>& team) {
    keys.enter(p, p.key, team.units[cursor.slot]);
    values.enter(p, p.value, team.units[cursor.slot]);
  }
  // Starts the copies of a step and moves to the next.
  __device__ __forceinline__ void copy(const Params& p, const DecodeGrid& grid, const DecodeTeam<kRows>& team,
                                       int slot_to) {
    const int first = cursor.begin - cursor.at, last = cursor.end - cursor.at;
    const uint32_t stage = ring + slot_to * D::kStageBytes, page = cursor.page[0], token = cursor.token[0];
    if (first <= 0 && last >= D::kStep) {
      keys.template copy<true>(stage, to, page, token, first, last);
      values.template copy<true>(stage + D::kPlaneBytes, to, page, token, first, last);
    } else if (last > 0) {
      keys.template copy<false>(stage, to, page, token, first, last);
      values.template copy<false>(stage + D::kPlaneBytes, to, page, token, first, last);
    }
    copy_async_commit();
    if (cursor.move(p, grid, team)) enter(p, team);
  }
  __device__ __forceinline__ int free_slot() const { return slot == 0 ? D::kStages - 1 : slot - 1; }
  // The next step, which is there, while the copies of another one start in the slot used before.
  __device__ __forceinline__ uint32_t next(const Params& p, const DecodeGrid& grid,
                                           const DecodeTeam<kRows>& team) {
    copy_async_wait<D::kStages - 2>();
    __syncwarp();  // nobody reads the free slot any more
    copy(p, grid, team, free_slot());
    const uint32_t stage = ring + slot * D::kStageBytes;
    slot = slot + 1 == D::kStages ? 0 : slot + 1;
    return stage;
  }
};

// Query rows as the second operand: 8 rows a tile, missing ones and missing columns zero.
template <typename T, int kDim, int kTiles>
__device__ inline void load_query_operands(const Params& p, const DecodeUnit& u,
                                           uint32_t (&q)[kDim / 16][kTiles][2]) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    const int r = lane / 4 + 8 * n;
    const bool exists = r < u.rows;
    const T* row = static_cast<const T*>(p.query.data) +
                   (exists ? p.query.index(u.batch, head_of_row(p, u, r), query_row(p, u, r)) : 0);
    const bool words = __all_sync(0xffffffffU, reinterpret_cast<uintptr_t>(row) % 4 == 0);
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        const int column = k * 16 + side * 8 + 2 * (lane & 3);
        const bool there = exists && column < p.head_dim;  // head_dim is a multiple of 8
        const uint16_t* values = reinterpret_cast<const uint16_t*>(row) + column;
        if (words) {
          q[k][n][side] = there ? *reinterpret_cast<const uint32_t*>(values) : 0U;
        } else {
          q[k][n][side] = there ? values[0] | static_cast<uint32_t>(values[1]) << 16 : 0U;
        }
      }
    }
  }
}

template <typename T, int kDim, int kTiles>
__device__ __forceinline__ void step_scores(float (&s)[kTiles][4], const uint32_t (&q)[kDim / 16][kTiles][2],
                                            uint32_t keys) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
#pragma unroll
  for (int k = 0; k < kDim / 16; ++k) {
    uint32_t a[4];
    ldmatrix(a, chunk_at<kDim>(keys, lane & 15, 2 * k + (lane >> 4)));
#pragma unroll
    for (int n = 0; n < kTiles; ++n) mma(s[n], a, q[k][n][0], q[k][n][1], T{});
  }
}

template <typename T, int kDim, int kTiles>
__device__ __forceinline__ void step_weighted_sum(float (&o)[kDim / 16][kTiles][4],
                                                  const float (&w)[kTiles][4], uint32_t values) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  uint32_t weights[kTiles][2];
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    weights[n][0] = transpose_matrix(pack(w[n][0], w[n][1], T{}));
    weights[n][1] = transpose_matrix(pack(w[n][2], w[n][3], T{}));
  }
#pragma unroll
  for (int c = 0; c < kDim / 16; ++c) {
    uint32_t a[4];
    ldmatrix_transposed(a, chunk_at<kDim>(values, (lane >> 4) * 8 + (lane & 7), 2 * c + ((lane >> 3) & 1)));
#pragma unroll
    for (int n = 0; n < kTiles; ++n) mma(o[c][n], a, weights[n][0], weights[n][1], T{});
  }
}

template <typename T, int kDim, int kTiles>
struct DenseKernel {
  using D = DenseDecode<kDim>;
  static constexpr int kRows = 8 * kTiles, kAhead = D::kStages - 1, kRing = D::kStages * D::kStageBytes;
  const Params& p;
  const DecodeGrid& grid;
  const DecodeTeam<kRows>& team;
  unsigned char* memory;
  DenseRing<kDim, kRows> ring;
  uint32_t q[kDim / 16][kTiles][2];

  // The steps of a warp in one split.
  __device__ __forceinline__ WarpState<kDim / 16, kTiles> walk(const DecodeUnit& u, const SplitSteps& split) {
    WarpState<kDim / 16, kTiles> state;
    const int32_t base = u.base;
    const int32_t inside = max(u.core_begin, split.begin), inside_end = min(u.core_end, split.end);
    int32_t at = split.start + team_warp() * D::kStep;
    for (int32_t i = 0; i < split.count; ++i, at += ring.cursor.stride()) {
      const uint32_t stage = ring.next(p, grid, team);
      if (at >= split.end) continue;
      float s[kTiles][4] = {};
      step_scores<T, kDim, kTiles>(s, q, stage);
      score_step(p, team, split, base, at < inside || at + D::kStep > inside_end, at, s);
      weigh_step(s, state);
      step_weighted_sum<T, kDim, kTiles>(state.o, s, stage + D::kPlaneBytes);
    }
    return state;
  }
  // Queries go straight to registers, while a split is stored.
  __device__ __forceinline__ void ask(const DecodeUnit& u) { load_query_operands<T, kDim, kTiles>(p, u, q); }
  __device__ __forceinline__ void stage(const DecodeUnit&) const {}
  __device__ __forceinline__ void receive() const {}

  __device__ __forceinline__ float* free_place() const {
    return reinterpret_cast<float*>(memory + team_warp() * kRing + ring.free_slot() * D::kStageBytes);
  }
  __device__ __forceinline__ static int place_stride() { return kRing / static_cast<int>(sizeof(float)); }
  __device__ __forceinline__ static OutputPlace output_place(int tile, int e) {
    return {row_of(0, e), tile * 16 + lane_index() / 4 + 8 * (e / 2)};
  }
};

template <typename T, int kDim, int kTiles>
__device__ __forceinline__ void decode_dense(const Params& p, const DecodeGrid& grid) {
  using Kernel = DenseKernel<T, kDim, kTiles>;
  extern __shared__ __align__(128) unsigned char shared[];
  auto& team = *reinterpret_cast<DecodeTeam<Kernel::kRows>*>(shared + team_warps() * Kernel::kRing);
  if (team_index() >= grid.units) return;
  find_first_unit(p, grid, team);
  team_sync();
  Kernel kernel{p, grid, team, shared, {p, grid, team, shared_address(shared)}, {}};
  kernel.ask(team.units[0]);
  prepare_unit(p, grid, team, 0, team_index());
  team_sync();
  decode_units<kDim, 0>(p, grid, team, kernel);
}

// The dtype decides at run time: the two differ in their products alone.
template <int kDim, int kTiles>
__global__ void __launch_bounds__(32 * kTeamWarps, 2)
    decode_dense_kernel(const __grid_constant__ Params p, const __grid_constant__ DecodeGrid grid) {
  wait_for_predecessor();
  if (p.dtype == static_cast<int>(DType::f16)) {
    decode_dense<__half, kDim, kTiles>(p, grid);
  } else {
    decode_dense<__nv_bfloat16, kDim, kTiles>(p, grid);
  }
}

}  // namespace attnspan::cuda
