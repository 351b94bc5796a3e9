#pragma once
// The end of a split: a team's warps put their states into shared memory, join them row by row in a fixed
// order, and write the split's partial result.

#include "cuda/decode.cuh"
#include "cuda/rotation.cuh"

namespace attnspan::cuda {

// Row of the partial results: [split][head][row of all sequences].
__device__ inline int64_t partial_row(const Params& p, const DecodeUnit& u, int32_t split, int r) {
  return (static_cast<int64_t>(u.split0 + split) * p.heads + head_of_row(p, u, r)) *
             (static_cast<int64_t>(p.batch) * p.seqlen_q) +
         static_cast<int64_t>(u.batch) * p.seqlen_q + query_row(p, u, r);
}

// Empty states for splits [first, last) of the unit.
__device__ inline void store_empty(const Params& p, const DecodeUnit& u, int32_t first, int32_t last) {
  for (int i = static_cast<int>(threadIdx.x); i < (last - first) * u.rows; i += static_cast<int>(blockDim.x))
    p.partial_lse[partial_row(p, u, first + i / u.rows, i % u.rows)] = -INFINITY;
}

struct OutputPlace {
  int row, column;
};

// Where a state lies in shared memory: lanes that store together have columns 16 apart, which are moved to
// banks of their own.
template <int kDim>
__device__ __forceinline__ int state_at(int row, int column) {
  return row * (kDim + 4) + (column ^ (column >> 4 & 7));
}

// A warp's state of 8 query rows: a [row][kDim + 4] tile in `place`, and (m, l) of each row. place_of(c, e):
// query row (of the 8) and stored column of a lane's element e of tile c.
template <int kDim, int kOutputs, int kTiles, typename PlaceOf>
__device__ __forceinline__ void put_state(const WarpState<kOutputs, kTiles>& state, int n, float* place,
                                          float (&stats)[8][2], PlaceOf place_of) {
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const float l = column_sum(state.l[n][e]);
    if (lane_index() < 4) {
      stats[row_of(0, e)][0] = state.m[n][e];
      stats[row_of(0, e)][1] = l;
    }
  }
#pragma unroll
  for (int c = 0; c < kOutputs; ++c) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const OutputPlace to = place_of(c, e);
      place[state_at<kDim>(to.row, to.column)] = state.o[c][n][e];
    }
  }
}

// Joins row r (of 8) of all warps' states and writes it as row `packed` of the unit. places: the first
// warp's tile; the others follow at distance `apart`. kRotated: tbq4's block, or 0.
template <int kDim, int kRotated>
__device__ __forceinline__ void join_row(const Params& p, const DecodeUnit& u, int32_t split, int packed,
                                         int r, const float* places, int apart,
                                         const float (&stats)[kTeamWarps][8][2]) {
  const int lane = lane_index(), warps = team_warps();
  // Every lane weighs all warps' states: they are few.
  float own[kTeamWarps], top = -INFINITY, sum = 0;
#pragma unroll
  for (int w = 0; w < kTeamWarps; ++w) {
    own[w] = w < warps && stats[w][r][1] > 0 ? stats[w][r][0] : -INFINITY;
    top = fmaxf(top, own[w]);
  }
#pragma unroll
  for (int w = 0; w < kTeamWarps; ++w) {
    own[w] = own[w] == -INFINITY ? 0.0F : exp2_approx((own[w] - top) * kLog2e);
    sum += own[w] > 0 ? stats[w][r][1] * own[w] : 0.0F;
  }
  float value[kDim / 32] = {};
#pragma unroll
  for (int w = 0; w < kTeamWarps; ++w) {
    if (!(own[w] > 0)) continue;
#pragma unroll
    for (int i = 0; i < kDim / 32; ++i)
      value[i] += own[w] * places[w * apart + state_at<kDim>(r, lane + 32 * i)];
  }
  const float inverse = sum > 0 ? 1.0F / sum : 0.0F;
#pragma unroll
  for (float& x : value) x *= inverse;
  if constexpr (kRotated > 0) {
#pragma unroll
    for (int block = 0; block < kDim / kRotated; ++block)
      rotate_values<kRotated>(value + block * (kRotated / 32), true);
  }
  const int64_t to = partial_row(p, u, split, packed);
#pragma unroll
  for (int i = 0; i < kDim / 32; ++i) {
    if (lane + 32 * i < p.head_dim_v) p.partial_out[to * p.head_dim_v + lane + 32 * i] = value[i];
  }
  if (lane == 0) p.partial_lse[to] = sum > 0 ? top + logf(sum) : -INFINITY;
}

// Writes a split's partial result. place: this warp's free slot of its ring; the warps' rings lie `apart`
// floats from each other. between: what else the team does between two of its barriers; it may not touch the
// unit.
template <int kDim, int kRotated, int kRows, int kOutputs, int kTiles, typename PlaceOf, typename Between>
__device__ __forceinline__ void store_split(const Params& p, const DecodeUnit& u, int32_t split,
                                            bool has_keys, const WarpState<kOutputs, kTiles>& state,
                                            float* place, int apart, DecodeTeam<kRows>& team,
                                            PlaceOf place_of, Between between) {
  const int warp = team_warp();
  __syncwarp();  // the slot's keys have been read
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    if (has_keys) put_state<kDim>(state, n, place, team.stats[warp], place_of);
    team_sync();
    if (n == kTiles - 1) between();
    if (has_keys) {
      for (int r = warp; r < 8 && 8 * n + r < u.rows; r += team_warps())
        join_row<kDim, kRotated>(p, u, split, 8 * n + r, r, place - warp * apart, apart, team.stats);
    }
    team_sync();  // the slots are free again, and what `between` wrote is there
  }
  if (!has_keys) store_empty(p, u, split, split + 1);
}

// All units of a team, from the one that prepare_unit has been called for. kernel: walk(unit, split) is a
// warp's state after its steps; ask(unit) starts reading queries, stage(unit) and receive() go on with that
// before and behind a barrier.
template <int kDim, int kRotated, int kRows, typename Kernel>
__device__ __forceinline__ void decode_units(const Params& p, const DecodeGrid& grid, DecodeTeam<kRows>& team,
                                             Kernel& kernel) {
  uint32_t index = team_index();
  int slot = 0;
  for (int32_t split = 0;;) {
    const DecodeUnit& u = team.units[slot];
    const SplitSteps steps = SplitSteps::of<Kernel::kAhead>(u, split, kernel.ring.cursor.stride());
    const auto state = kernel.walk(u, steps);
    const bool last = split + 1 >= u.splits, more = index + team_count() < grid.units;
    const int next = slot + 1 == kTeamUnits ? 0 : slot + 1;
    if (last && more) kernel.ask(team.units[next]);
    // The merge may take its place now. Earlier, its blocks would crowd on the multiprocessors that have
    // room.
    if (last && !more) start_dependents();
    store_split<kDim, kRotated>(p, u, split, steps.begin < steps.end, state, kernel.free_place(),
                                kernel.place_stride(), team, Kernel::output_place, [&] {
                                  if (!last || !more) return;
                                  prepare_unit(p, grid, team, next, index + team_count());
                                  kernel.stage(team.units[next]);
                                });
    ++split;
    if (!last) continue;
    store_empty(p, u, split, u.owed);
    if (!more) break;
    kernel.receive();
    index += team_count();
    slot = next;
    split = 0;
  }
  copy_async_wait<0>();
}

}  // namespace attnspan::cuda
