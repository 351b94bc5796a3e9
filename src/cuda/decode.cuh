#pragma once
// What the decode kernels share. A block is one or more teams of warps. A team takes units of work in turn: a
// run of splits of one (sequence, KV head, tile of packed query rows). Its warps walk over their own steps of
// keys, each with its own ring of asynchronous copies and its own softmax state, and meet at the end of every
// split to join their states into the split's partial result (decode_store.cuh).
//
// Both products are taken transposed, S^T = K Q^T and O^T = V^T P^T: keys and columns fill the 16 rows of an
// mma and the few query rows its 8 columns, which halves products and registers. Lane l holds, of S^T, keys
// g = l / 4 and g + 8 of each 16 for query rows 2 (l % 4) and the next; of O^T, two columns for the same
// rows.

#include "cuda/decode.hpp"
#include "cuda/kv_loader.cuh"
#include "cuda/score.cuh"
#include "cuda/split.hpp"

namespace attnspan::cuda {

// ---- units of work

// Positions count from the sequence's first stored key (`base`): 32 bits hold them.
struct DecodeUnit {
  int32_t batch, kv_head;
  int32_t row0, rows;            // packed rows
  int32_t split0, splits, owed;  // the first split, how many have keys, how many partial states there are
  int32_t keys_per_split;
  int32_t base, limit;  // of the keys that exist, `limit` from the base
  int64_t diagonal;
  int32_t whole_begin, whole_end;  // seen by any row of the sequence: what is split
  int32_t seen_begin, seen_end;    // by any row of the unit
  int32_t core_begin, core_end;    // by all of them
};

// What a team's warps share. Of units it keeps the one whose products are taken, the one whose keys may be
// under way already, and the one that is being found.
inline constexpr int kTeamUnits = 3;
template <int kRows>
struct DecodeTeam {
  DecodeUnit units[kTeamUnits];
  RowScore rows[kRows];           // of the first of these
  float peaks[kRows];             // largest value of a query row (quantised caches)
  float stats[kTeamWarps][8][2];  // (m, l) of 8 rows of each warp's state
};

__device__ __forceinline__ int team_warp() { return static_cast<int>(threadIdx.x) / 32; }
__device__ __forceinline__ int team_warps() { return static_cast<int>(blockDim.x) / 32; }
__device__ __forceinline__ int lane_index() { return static_cast<int>(threadIdx.x) & 31; }
__device__ __forceinline__ void team_sync() {
  asm volatile("bar.sync %0, %1;" ::"r"(threadIdx.y + 1), "r"(blockDim.x) : "memory");
}
// Teams with the same index are neighbours: a few units spread over all multiprocessors.
__device__ __forceinline__ uint32_t team_index() { return threadIdx.y * gridDim.x + blockIdx.x; }
__device__ __forceinline__ uint32_t team_count() { return blockDim.y * gridDim.x; }

__device__ __forceinline__ int32_t clamp_position(int64_t x, const SpanRule& rule) {
  x = x < rule.key_begin ? rule.key_begin : x > rule.key_limit ? rule.key_limit : x;
  return static_cast<int32_t>(x - rule.key_begin);
}

// Heads are neighbours: in a [token, head, dim] cache they read neighbouring bytes.
__device__ inline DecodeUnit find_unit(const Params& p, const DecodeGrid& grid, int32_t tile_rows,
                                       uint32_t index) {
  DecodeUnit u;
  u.kv_head = static_cast<int32_t>(index % p.kv_heads);
  index /= p.kv_heads;
  const int32_t rows = p.seqlen_q * p.group;
  u.row0 = 0;
  if (rows > tile_rows) {
    const int32_t tiles = (rows + tile_rows - 1) / tile_rows;
    u.row0 = static_cast<int32_t>(index % tiles) * tile_rows;
    index /= tiles;
  }
  u.rows = rows - u.row0 < tile_rows ? rows - u.row0 : tile_rows;
  u.split0 = static_cast<int32_t>(index % grid.runs) * grid.run_splits;
  u.batch = static_cast<int32_t>(index / grid.runs);
  u.owed = p.max_splits - u.split0 < grid.run_splits ? p.max_splits - u.split0 : grid.run_splits;

  const DeviceSequence s = sequence_of(p, u.batch);
  int64_t first = 0, last = 0;
  if (p.seqlen_q > 1) {
    first = u.row0 / p.group;
    last = (u.row0 + u.rows - 1) / p.group;
  }
  const KeySpan whole = s.rule.hull(0, p.seqlen_q);
  const KeySpan seen = s.rule.hull(first, last + 1), core = s.rule.core(first, last + 1);
  const SplitPlan plan = plan_splits(whole.size(), p.split_target, p.min_split_keys);
  const int32_t splits = plan.splits - u.split0;
  u.splits = splits < 0 ? 0 : splits < u.owed ? splits : u.owed;
  u.keys_per_split = static_cast<int32_t>(plan.keys_per_split);
  u.base = static_cast<int32_t>(s.rule.key_begin);
  u.limit = static_cast<int32_t>(s.rule.key_limit - s.rule.key_begin);
  u.diagonal = s.rule.diagonal;
  u.whole_begin = clamp_position(whole.begin, s.rule);
  u.whole_end = clamp_position(whole.end, s.rule);
  u.seen_begin = clamp_position(seen.begin, s.rule);
  u.seen_end = clamp_position(seen.end, s.rule);
  u.core_begin = clamp_position(core.begin, s.rule);
  u.core_end = clamp_position(core.end, s.rule);
  return u;
}

__device__ inline int32_t head_of_row(const Params& p, const DecodeUnit& u, int r) {
  return u.kv_head * p.group + (p.seqlen_q == 1 ? u.row0 + r : (u.row0 + r) % p.group);
}
__device__ inline int32_t query_row(const Params& p, const DecodeUnit& u, int r) {
  return p.seqlen_q == 1 ? 0 : (u.row0 + r) / p.group;
}

// The unit's sequence again, from what is known of it.
__device__ inline DeviceSequence sequence_of(const Params& p, const DecodeUnit& u) {
  DeviceSequence s;
  s.batch = u.batch;
  s.rule.diagonal = u.diagonal;
  s.rule.window_left = p.window_left;
  s.rule.window_right = p.window_right;
  s.rule.key_begin = u.base;
  s.rule.key_limit = u.base + u.limit;
  if (p.key_start.data != nullptr) s.rule.key_start = p.key_start.data + u.batch * p.key_start.batch_stride;
  if (p.key_end.data != nullptr) s.rule.key_end = p.key_end.data + u.batch * p.key_end.batch_stride;
  return s;
}

// One thread a row.
template <int kRows>
__device__ inline void find_rows(const Params& p, const DecodeUnit& u, RowScore (&rows)[kRows], int r) {
  if (r >= kRows) return;
  RowScore row;
  if (r < u.rows) row = row_score(p, sequence_of(p, u), head_of_row(p, u, r), query_row(p, u, r));
  rows[r] = row;
}

// ---- steps

// The keys of one split that the unit sees, and how a team walks over them: step i of warp w starts at
// start + i * stride + w * (keys of a step), and all warps take the same number of steps. 16 keys from a
// multiple of 16 on lie in one page.
struct SplitSteps {
  int32_t begin, end, start, count;

  // A unit has more than kAhead steps, which may be under way, so that the next step to copy never lies more
  // than one unit ahead.
  template <int kAhead>
  __device__ __forceinline__ static SplitSteps of(const DecodeUnit& u, int32_t split, int32_t stride) {
    SplitSteps s;
    const int32_t begin = u.whole_begin + (u.split0 + split) * u.keys_per_split;
    const int32_t end = begin + u.keys_per_split < u.whole_end ? begin + u.keys_per_split : u.whole_end;
    s.begin = begin < u.seen_begin ? u.seen_begin : begin;
    s.end = end < u.seen_end ? end : u.seen_end;
    if (s.end < s.begin || split >= u.splits) s.end = s.begin;
    s.start = s.begin & ~15;
    const int32_t least = split + 1 < u.splits ? 1 : kAhead + 1;
    s.count = static_cast<int32_t>(static_cast<uint32_t>(s.end - s.start + stride - 1) /
                                   static_cast<uint32_t>(stride));
    if (s.end == s.begin || s.count < least) s.count = least;
    return s;
  }
};

// The compiler computes a lane's offsets again in every step unless it does not know where they came from.
__device__ __forceinline__ uint32_t kept(uint32_t x) {
  asm volatile("" : "+r"(x));
  return x;
}
template <typename T>
__device__ __forceinline__ const T* kept(const T* x) {
  asm volatile("" : "+l"(x));
  return x;
}
// from + index * stride bytes, in one instruction
template <typename T>
__device__ __forceinline__ const T* advance(const T* from, uint32_t index, uint32_t stride) {
  const T* to;
  asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(to) : "r"(index), "r"(stride), "l"(from));
  return to;
}

// The step that a warp copies next. kKeys: of a step; kAhead: steps under way.
template <int kKeys, int kAhead, int kRows>
struct StepCursor {
  static constexpr int kGroups = kKeys / 16;
  uint32_t index;             // of the unit; grid.units: there are no more steps
  int32_t slot, split, left;  // of the unit; of its run; steps of the split after this one
  int32_t at, begin, end;     // the step's first key; keys of the split
  const int32_t* table;       // pages of this sequence, or none: its rows lie in one line
  // Where each 16 keys lie: they share a page. Without a table, pages count from the sequence's own.
  uint32_t page[kGroups], token[kGroups];

  __device__ __forceinline__ int32_t stride() const { return team_warps() * kKeys; }
  __device__ __forceinline__ bool has_keys() const { return at < end; }

  __device__ __forceinline__ void enter_unit(const Params& p, const DecodeUnit& u) {
    table = p.block_table == nullptr ? nullptr : p.block_table + u.batch * p.block_table_stride;
    split = 0;
    enter_split(u);
  }
  __device__ __forceinline__ void enter_split(const DecodeUnit& u) {
    const SplitSteps s = SplitSteps::of<kAhead>(u, split, stride());
    begin = s.begin;
    end = s.end;
    left = s.count - 1;
    at = s.start + team_warp() * kKeys;
  }
  // At the team's first unit.
  __device__ __forceinline__ void start(const Params& p, const DecodeTeam<kRows>& team) {
    index = team_index();
    slot = 0;
    enter_unit(p, team.units[0]);
    if (has_keys()) find_pages(p);
  }
  // Returns whether a unit was entered.
  __device__ __forceinline__ bool move(const Params& p, const DecodeGrid& grid,
                                       const DecodeTeam<kRows>& team) {
    bool entered = false;
    if (left > 0) {
      --left;
      at += stride();
    } else if (split + 1 < team.units[slot].splits) {
      ++split;
      enter_split(team.units[slot]);
    } else {
      index += team_count();
      at = end = 0;
      if (index < grid.units) {
        slot = slot + 1 == kTeamUnits ? 0 : slot + 1;
        enter_unit(p, team.units[slot]);
        entered = true;
      }
    }
    if (has_keys()) find_pages(p);
    return entered;
  }
  __device__ __forceinline__ void find_pages(const Params& p) {
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      const int32_t offset = at + 16 * i;
      page[i] = 0;
      token[i] = offset;
      if (table == nullptr) continue;
      const int32_t number = p.page_shift >= 0 ? offset >> p.page_shift : offset / p.page_size;
      token[i] = offset - number * p.page_size;
      if (offset < end) page[i] = table[number * p.block_table_page_stride];
    }
  }
};

// ---- the softmax

// The query row behind element e of a thread's column tile n.
__device__ __forceinline__ int row_of(int n, int e) {
  return 8 * n + 2 * (static_cast<int>(threadIdx.x) & 3) + (e & 1);
}

// Turns products into logits in natural units, in place; s[n][e] is key `at` + g + 8 (e / 2). masked: some
// row may not see the whole step.
template <int kRows, int kTiles>
__device__ __forceinline__ void score_step(const Params& p, const DecodeTeam<kRows>& team,
                                           const SplitSteps& split, int32_t base, bool masked, int32_t at,
                                           float (&s)[kTiles][4]) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) s[n][e] *= p.softmax_scale;
  }
  const bool transformed = is_transformed(p);
  if (!masked && !transformed) return;
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const RowScore& r = team.rows[row_of(n, e)];
      const int32_t key = at + lane_index() / 4 + 8 * (e / 2);
      const bool visible = key >= split.begin && key < split.end && r.span.contains(base + key);
      float x = s[n][e];
      if (transformed) x = transform(p, r, x, base + key, visible);
      s[n][e] = visible ? x : -INFINITY;
    }
  }
}

// Over the lanes that hold the same query rows (l % 4).
__device__ __forceinline__ float column_max(float x) {
#pragma unroll
  for (int d = 4; d < 32; d *= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffU, x, d));
  return x;
}
__device__ __forceinline__ float column_sum(float x) {
#pragma unroll
  for (int d = 4; d < 32; d *= 2) x += __shfl_xor_sync(0xffffffffU, x, d);
  return x;
}

// An 8x8 matrix of 16-bit values, transposed across the warp.
__device__ __forceinline__ uint32_t transpose_matrix(uint32_t x) {
  uint32_t y;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// The softmax state of a warp's query rows: outputs in kOutputs tiles of 16 columns x 8 rows.
template <int kOutputs, int kTiles>
struct WarpState {
  float o[kOutputs][kTiles][4] = {};
  float m[kTiles][2];
  float l[kTiles][2] = {};

  __device__ WarpState() {
    for (int n = 0; n < kTiles; ++n) m[n][0] = m[n][1] = -INFINITY;
  }
  __device__ __forceinline__ void scale(const float (&factor)[kTiles][2]) {
#pragma unroll
    for (int c = 0; c < kOutputs; ++c) {
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) o[c][n][e] *= factor[n][e & 1];
      }
    }
  }
};

// Logits in natural units become weights. Maxima lag: older outputs are rescaled where some score exceeds its
// row's by more than kLogitLag, so that weights stay below e^4 and most steps need no exchange between lanes.
inline constexpr float kLogitLag = 4;

template <int kOutputs, int kTiles>
__device__ __forceinline__ void weigh_step(float (&s)[kTiles][4], WarpState<kOutputs, kTiles>& state) {
  float top[kTiles][2];  // of this lane's keys
  bool grows = false;
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      top[n][e] = fmaxf(s[n][e], s[n][e + 2]);
      grows = grows || top[n][e] - kLogitLag > state.m[n][e];
    }
  }
  if (__any_sync(0xffffffffU, grows)) {
    float rescale[kTiles][2];
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float m = fmaxf(column_max(top[n][e]), state.m[n][e]);
        rescale[n][e] = m == -INFINITY ? 1.0F : exp2_approx((state.m[n][e] - m) * kLog2e);
        state.m[n][e] = m;
        state.l[n][e] *= rescale[n][e];
      }
    }
    state.scale(rescale);
  }
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float base = state.m[n][e] == -INFINITY ? 0.0F : state.m[n][e] * kLog2e;
#pragma unroll
      for (int k = e; k < 4; k += 2) {
        s[n][k] = exp2_approx(fmaf(s[n][k], kLog2e, -base));
        state.l[n][e] += s[n][k];
      }
    }
  }
}

// The first unit of a team, by its first warp.
template <int kRows>
__device__ __forceinline__ void find_first_unit(const Params& p, const DecodeGrid& grid,
                                                DecodeTeam<kRows>& team) {
  if (team_warp() != 0) return;
  const DecodeUnit first = find_unit(p, grid, kRows, team_index());
  if (lane_index() == 0) team.units[0] = first;
}

// The last warp of a team finds the rows of a unit, the first one the unit after it.
template <int kRows>
__device__ __forceinline__ void prepare_unit(const Params& p, const DecodeGrid& grid, DecodeTeam<kRows>& team,
                                             int slot, uint32_t index) {
  if (team_warp() == team_warps() - 1) find_rows(p, team.units[slot], team.rows, lane_index());
  index += team_count();
  if (team_warp() != 0 || index >= grid.units) return;
  const DecodeUnit next = find_unit(p, grid, kRows, index);
  if (lane_index() == 0) team.units[slot + 1 == kTeamUnits ? 0 : slot + 1] = next;
}

namespace detail {

template <typename Kernel>
cudaError_t start_decode(Kernel kernel, const Params& p, const DecodePlan& plan, cudaStream_t stream) {
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                 static_cast<int>(plan.shared_bytes));
  if (error != cudaSuccess) return error;
  // On Hopper its blocks may take their places while the kernel in front of it ends; they wait by themselves.
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(plan.blocks));
  config.blockDim = dim3(static_cast<unsigned>(plan.warps * 32), static_cast<unsigned>(plan.teams));
  config.dynamicSmemBytes = plan.shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = plan.overlap ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, p, plan.grid);
}

}  // namespace detail
}  // namespace attnspan::cuda
