#pragma once
// Decode over caches whose keys and values are tbq4 or q8, each its own: products in f16 on values that are
// decoded in registers; the scales stay outside (they multiply scores, and weights), so that no product can
// leave f16's range.
//
// Each warp has a ring of steps in shared memory (decode_codes.cuh), filled by asynchronous copies.

#include <cfloat>
#include <utility>

#include "cuda/decode_query.cuh"

namespace attnspan::cuda {

// ---- how 8 or 16 query rows lie in the products: scores have 8 columns; so have weighted sums, for the even
// columns of pairs and for the odd ones

template <int kRows>
inline constexpr int kRowTiles = kRows / 8;
template <int kDim, int kRows>
using QuantisedSums = WarpState<kDim / 16, kRowTiles<kRows>>;

// From immediates: constant memory, which nobody has read yet, would have to be fetched first.
template <int kCode>
inline constexpr float kCentroid = tbq4::kCentroids[kCode];
template <int... kCodes>
__device__ __forceinline__ float centroid_of(int code, std::integer_sequence<int, kCodes...>) {
  float value = 0;
  ((value = code == kCodes ? kCentroid<kCodes> : value), ...);
  return value;
}

// 4 entries a warp at once: 8 lanes store the 128 bytes of one.
__device__ inline void fill_table(unsigned char* table) {
  const int lane = lane_index(), warps = static_cast<int>(blockDim.y) * team_warps();
  const float value = centroid_of(lane & 15, std::make_integer_sequence<int, 16>());
  const uint32_t centroid = __half_as_ushort(__float2half_rn(value));
#pragma unroll 4
  for (int first = 4 * (static_cast<int>(threadIdx.y) * team_warps() + team_warp()); first < 256;
       first += 4 * warps) {
    const int byte = first + lane / 8;
    const uint32_t low = __shfl_sync(0xffffffffU, centroid, byte & 15);
    const uint32_t pair = low | __shfl_sync(0xffffffffU, centroid, byte >> 4) << 16;
    *reinterpret_cast<uint4*>(table + 256 * byte + lane % 8 * 16) = make_uint4(pair, pair, pair, pair);
  }
}

// ---- scores

// s = sum over blocks of scale[key][block] * (codes . query), for 16 keys.
template <typename Codes, int kDim, int kTiles>
__device__ __forceinline__ void group_scores(float (&s)[kTiles][4], const uint32_t (&q)[kDim / 16][kTiles][2],
                                             uint32_t codes, uint32_t offset, uint32_t scales,
                                             uint32_t column) {
  constexpr int kSteps = Codes::kBlock / 16, kPairs = Codes::kPairs;
  const RowPart<Codes, 4> keys[2] = {{codes, offset}, {codes + 8 * Codes::kRow, offset}};
#pragma unroll
  for (int block = 0; block < Codes::kBlocks; ++block) {
    const auto& low = keys[0].words[block];
    const auto& high = keys[1].words[block];
    float dots[kTiles][4] = {};
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      const int word = 2 * k / kPairs, i = 2 * k % kPairs;
      const uint32_t a[4] = {Codes::pair(low[word], i, column), Codes::pair(high[word], i, column),
                             Codes::pair(low[word], i + 1, column), Codes::pair(high[word], i + 1, column)};
      const auto& operands = q[block * kSteps + k];
#pragma unroll
      for (int n = 0; n < kTiles; ++n) mma(dots[n], a, operands[n][0], operands[n][1], __half{});
    }
    const float scale[2] = {read_scale(scales + 2 * block),
                            read_scale(scales + 2 * (8 * Codes::kBlocks + block))};
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) s[n][e] = fmaf(dots[n][e], scale[e / 2], s[n][e]);
    }
  }
}

// ---- softmax

// Maxima are kept in base 2, and lag: the older outputs are rescaled only where a score exceeds its row's by
// more than kLag. Likewise weights are taken times scale / reference, where reference is a power of two that
// no value's scale exceeds more than kScaleLag times: a product stays below 2^11.
inline constexpr float kLag = 6;
inline constexpr float kScaleLag = 16;

template <int kDim, int kRows>
struct QuantisedState {
  static constexpr int kTiles = kRowTiles<kRows>;
  QuantisedSums<kDim, kRows> sums;  // its m is not used before the end
  float top[kTiles][2];             // a row that has met no key: the lowest float, from which any score grows
  float reference = 0, inverse = 0;

  __device__ QuantisedState() {
    for (int n = 0; n < kTiles; ++n) top[n][0] = top[n][1] = -FLT_MAX;
  }
  // `highest`: of the new scores of each row, `largest`: of the scales of values with weight; both of this
  // lane's keys.
  __device__ __forceinline__ void raise(const float (&highest)[kTiles][2], float largest) {
    const float scale = __uint_as_float(__reduce_max_sync(0xffffffffU, __float_as_uint(largest)));
    const float next = fmaxf(reference, __uint_as_float(__float_as_uint(scale) & 0x7f800000U));
    inverse = next > 0 ? __uint_as_float(0x7f000000U - __float_as_uint(next)) : 0.0F;
    const float shrink = reference * inverse;
    reference = next;
    float factor[kTiles][2];
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float m = fmaxf(column_max(highest[n][e]), top[n][e]);
        factor[n][e] = exp2_approx(top[n][e] - m);
        top[n][e] = m;
        sums.l[n][e] *= factor[n][e];
        factor[n][e] *= shrink;
      }
    }
    sums.scale(factor);
  }
  __device__ __forceinline__ void finish() {
    float factor[kTiles][2];
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        factor[n][e] = reference;
        sums.m[n][e] = top[n][e] == -FLT_MAX ? -INFINITY : top[n][e] * (1 / kLog2e);
      }
    }
    sums.scale(factor);
  }
};

// Products become logits in base 2, masked and transformed; scales of values that no row of this lane sees
// become 0.
template <int kRows, int kTiles, int kGroups, int kBlocks>
__device__ __forceinline__ void transform_step(const Params& p, const DecodeTeam<kRows>& team,
                                               const SplitSteps& split, int32_t base, int32_t at,
                                               const float (&unit)[kTiles][2], float (&s)[kGroups][kTiles][4],
                                               float (&scales)[kGroups][2][kBlocks]) {
  const bool transformed = is_transformed(p);
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int32_t key = at + 16 * i + 8 * h + lane_index() / 4;
      const bool exists = key >= split.begin && key < split.end;
      bool counts = false;
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const RowScore& r = team.rows[row_of(n, e)];
          const bool visible = exists && r.span.contains(base + key);
          float x = s[i][n][2 * h + e] * unit[n][e];
          if (transformed) x = transform(p, r, x * (1 / kLog2e), base + key, visible) * kLog2e;
          s[i][n][2 * h + e] = visible ? x : -INFINITY;
          counts = counts || (visible && x > -INFINITY);
        }
      }
#pragma unroll
      for (float& scale : scales[i][h]) scale = counts ? scale : 0.0F;
    }
  }
}

// Logits, in units of `unit`, become weights.
template <int kDim, int kRows, int kTiles, int kGroups, int kBlocks>
__device__ __forceinline__ void weigh(float (&s)[kGroups][kTiles][4], const float (&unit)[kTiles][2],
                                      const float (&scales)[kGroups][2][kBlocks],
                                      QuantisedState<kDim, kRows>& state) {
  float highest[kTiles][2], largest = 0;
  bool grows = false;
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (float scale : scales[i][h]) largest = fmaxf(largest, scale);
    }
  }
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      highest[n][e] = fmaxf(s[0][n][e], s[0][n][e + 2]);
#pragma unroll
      for (int i = 1; i < kGroups; ++i)
        highest[n][e] = fmaxf(highest[n][e], fmaxf(s[i][n][e], s[i][n][e + 2]));
      highest[n][e] *= unit[n][e];
      grows = grows || highest[n][e] - kLag > state.top[n][e];
    }
  }
  if (__any_sync(0xffffffffU, grows || largest > state.reference * kScaleLag)) state.raise(highest, largest);
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        s[i][n][e] = exp2_approx(fmaf(s[i][n][e], unit[n][e & 1], -state.top[n][e & 1]));
        state.sums.l[n][e & 1] += s[i][n][e];
      }
    }
  }
}

// ---- weighted sums

// Weights of 8 keys times the values' scales as second operands: beside a zero, for the even columns of pairs
// and for the odd ones.
template <int kTiles>
struct PairWeights {
  uint32_t of[kTiles][2][2];

  __device__ __forceinline__ PairWeights(const float (&p)[kTiles][4], int h, float scale) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const uint32_t x = transpose_matrix(pack(p[n][2 * h] * scale, p[n][2 * h + 1] * scale, __half{}));
      of[n][0][0] = x & 0xffffU;
      of[n][0][1] = x >> 16;
      of[n][1][0] = x << 16;
      of[n][1][1] = x & 0xffff0000U;
    }
  }
};

// o += values^T weights for 16 keys.
template <typename Codes, int kOutputs, int kTiles, typename Lane>
__device__ __forceinline__ void group_sum(float (&o)[kOutputs][kTiles][4], const float (&weights)[kTiles][4],
                                          const float (&scales)[2][Codes::kBlocks], float inverse,
                                          uint32_t codes, const Lane& lane) {
  constexpr int kPairs = Codes::kPairs, kPairTiles = Codes::kBlock / 32;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const uint32_t rows = codes + 8 * h * Codes::kRow;
    const RowPart<Codes, 8> values[2] = {{rows, lane.value[0]}, {rows, lane.value[1]}};
#pragma unroll
    for (int block = 0; block < Codes::kBlocks; ++block) {
      const PairWeights<kTiles> w(weights, h, scales[h][block] * inverse);
      const auto& first = values[0].words[block];
      const auto& second = values[1].words[block];
#pragma unroll
      for (int c = 0; c < kPairTiles; ++c) {
        const int word = 2 * c / kPairs, i = 2 * c % kPairs;
        const uint32_t a[4] = {
            Codes::pair(first[word], i, lane.column), Codes::pair(first[word], i + 1, lane.column),
            Codes::pair(second[word], i, lane.column), Codes::pair(second[word], i + 1, lane.column)};
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
#pragma unroll
          for (int odd = 0; odd < 2; ++odd) {
            const int tile = (block * kPairTiles + c) * 2 + odd;
            mma(o[tile][n], a, w.of[n][odd][0], w.of[n][odd][1], __half{});
          }
        }
      }
    }
  }
}

// ---- the kernel

// The ring of one warp: copies run stages - 1 steps ahead, across splits and units.
template <typename Keys, typename Values, int kGroups, int kRows>
struct StepRing {
  using Layout = StepLayout<Keys, Values, kGroups>;
  StepCursor<Layout::kKeys, kQuantisedAhead, kRows> cursor;
  CodeCopies<Keys> key_copies;
  CodeCopies<Values> value_copies;
  ScaleCopies<Keys, Values, kGroups> scale_copies;
  const int stages;
  const uint32_t ring;
  int slot = 0;  // of the step to use next

  __device__ __forceinline__ StepRing(const Params& p, const DecodeGrid& grid, uint32_t memory)
      : key_copies(p.key),
        value_copies(p.value),
        scale_copies(p),
        stages(grid.stages),
        ring(kept(memory + (threadIdx.y * team_warps() + team_warp()) * grid.stages * Layout::kBytes)) {}
  __device__ __forceinline__ void start(const Params& p, const DecodeGrid& grid,
                                        const DecodeTeam<kRows>& team) {
    cursor.start(p, team);
    enter(p, team);
    for (int i = 0; i < stages - 1; ++i) copy(p, grid, team, i);
  }
  __device__ __forceinline__ void enter(const Params& p, const DecodeTeam<kRows>& team) {
    const DecodeUnit& u = team.units[cursor.slot];
    key_copies.enter(p, p.key, u);
    value_copies.enter(p, p.value, u);
    scale_copies.enter(p, u);
  }
  // Starts the copies of a step and moves to the next.
  __device__ __forceinline__ void copy(const Params& p, const DecodeGrid& grid, const DecodeTeam<kRows>& team,
                                       int to) {
    const int count = cursor.end - cursor.at;
    if (count >= Layout::kKeys) {
      copy_step<true>(ring + to * Layout::kBytes, count);
    } else if (count > 0) {
      copy_step<false>(ring + to * Layout::kBytes, count);
    }
    copy_async_commit();
    if (cursor.move(p, grid, team)) enter(p, team);
  }
  template <bool kWhole>
  __device__ __forceinline__ void copy_step(uint32_t stage, int count) const {
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      key_copies.template copy<kWhole>(stage + 16 * i * Keys::kRow, cursor.page[i], cursor.token[i],
                                       count - 16 * i);
      value_copies.template copy<kWhole>(stage + Layout::kValues + 16 * i * Values::kRow, cursor.page[i],
                                         cursor.token[i], count - 16 * i);
    }
    scale_copies.copy(stage + Layout::kKeyScales, cursor.page, cursor.token, count);
  }
  __device__ __forceinline__ int free_slot() const { return slot == 0 ? stages - 1 : slot - 1; }
  // The next step, which is there, while the copies of another one start in the slot used before.
  __device__ __forceinline__ uint32_t next(const Params& p, const DecodeGrid& grid,
                                           const DecodeTeam<kRows>& team) {
    if (stages == 2) {
      copy_async_wait<0>();
    } else {
      copy_async_wait<1>();
    }
    __syncwarp();  // nobody reads the free slot any more
    copy(p, grid, team, free_slot());
    const uint32_t stage = ring + slot * Layout::kBytes;
    slot = slot + 1 == stages ? 0 : slot + 1;
    return stage;
  }
};

// Scores of a step, and the scales of its values.
template <typename Keys, typename Values, int kDim, int kGroups, int kTiles>
__device__ __forceinline__ void step_scores(uint32_t stage, const LaneOffsets<Keys, Values>& lane,
                                            const uint32_t (&q)[kDim / 16][kTiles][2],
                                            float (&s)[kGroups][kTiles][4],
                                            float (&scales)[kGroups][2][Values::kBlocks]) {
  using Layout = StepLayout<Keys, Values, kGroups>;
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
    group_scores<Keys, kDim, kTiles>(s[i], q, stage + 16 * i * Keys::kRow, lane.key,
                                     stage + Layout::kKeyScales + (16 * i * 2 + lane.scale) * Keys::kBlocks,
                                     lane.column);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int block = 0; block < Values::kBlocks; ++block)
        scales[i][h][block] = read_scale(stage + Layout::kValueScales + 2 * block +
                                         ((16 * i + 8 * h) * 2 + lane.scale) * Values::kBlocks);
    }
  }
}

template <typename Keys, typename Values, int kGroups, int kDim, int kRows>
struct QuantisedKernel {
  using Layout = StepLayout<Keys, Values, kGroups>;
  static constexpr int kTiles = kRowTiles<kRows>, kAhead = kQuantisedAhead;
  const Params& p;
  const DecodeGrid& grid;
  DecodeTeam<kRows>& team;
  __half* staging;
  unsigned char* rings;
  StepRing<Keys, Values, kGroups, kRows> ring;
  const LaneOffsets<Keys, Values> lane;
  QueryRow<kDim> query;
  uint32_t q[kDim / 16][kTiles][2];

  // The steps of a warp in one split.
  __device__ __forceinline__ QuantisedSums<kDim, kRows> walk(const DecodeUnit& u, const SplitSteps& split) {
    QuantisedState<kDim, kRows> state;
    const int32_t base = u.base;
    // Steps between these are seen whole by every row.
    const int32_t inside = max(u.core_begin, split.begin);
    const int32_t inside_end = is_transformed(p) ? 0 : min(u.core_end, split.end);
    float unit[kTiles][2];
    for (int n = 0; n < kTiles; ++n) {
      for (int e = 0; e < 2; ++e) unit[n][e] = team.peaks[row_of(n, e)] * fabsf(p.softmax_scale) * kLog2e;
    }
    int32_t at = split.start + team_warp() * Layout::kKeys;
    for (int32_t i = 0; i < split.count; ++i, at += ring.cursor.stride()) {
      const uint32_t stage = ring.next(p, grid, team);
      if (at >= split.end) continue;
      float s[kGroups][kTiles][4] = {};
      float scales[kGroups][2][Values::kBlocks];
      step_scores<Keys, Values, kDim>(stage, lane, q, s, scales);
      if (at >= inside && at + Layout::kKeys <= inside_end) {
        weigh(s, unit, scales, state);
      } else {
        float one[kTiles][2];
        for (auto& pair : one) pair[0] = pair[1] = 1.0F;
        transform_step(p, team, split, base, at, unit, s, scales);
        weigh(s, one, scales, state);
      }
#pragma unroll
      for (int g = 0; g < kGroups; ++g)
        group_sum<Values>(state.sums.o, s[g], scales[g], state.inverse,
                          stage + Layout::kValues + 16 * g * Values::kRow, lane);
    }
    state.finish();
    return state.sums;
  }
  // Queries are read while the last split is stored, rotated before a barrier, and in registers behind it.
  __device__ __forceinline__ void ask(const DecodeUnit& u) { query.load(p, u, team_warp()); }
  __device__ __forceinline__ void stage(const DecodeUnit& u) {
    stage_queries<Keys>(p, u, query, staging, team.peaks);
  }
  __device__ __forceinline__ void receive() { read_queries<Keys, kDim, kTiles>(staging, q); }

  __device__ __forceinline__ float* free_place() const {
    return reinterpret_cast<float*>(
        rings + (threadIdx.y * team_warps() + team_warp()) * ring.stages * Layout::kBytes +
        ring.free_slot() * Layout::kBytes);
  }
  __device__ __forceinline__ int place_stride() const {
    return ring.stages * Layout::kBytes / static_cast<int>(sizeof(float));
  }
  // The row and the column behind element e of a lane's output tile.
  __device__ __forceinline__ static OutputPlace output_place(int tile, int e) {
    return {row_of(0, e), value_column<Values>(tile / 2, e / 2, tile % 2)};
  }
};

// What a team has in shared memory beside its rings; the teams lie in front of the table.
template <int kDim, int kRows>
struct QuantisedTeam {
  DecodeTeam<kRows> common;
  alignas(16) __half queries[kRows * kQueryStride<kDim>];
};

template <typename Keys, typename Values, int kDim, int kRows>
__global__ void __launch_bounds__(32 * kTeamWarps *
                                      quantised_shape(kDim, kRows, is_q8<Keys>, is_q8<Values>).teams,
                                  1)
    decode_quantised_kernel(const __grid_constant__ Params p, const __grid_constant__ DecodeGrid grid) {
  constexpr QuantisedShape kShape = quantised_shape(kDim, kRows, is_q8<Keys>, is_q8<Values>);
  using Kernel = QuantisedKernel<Keys, Values, kShape.groups, kDim, kRows>;
  static_assert(Kernel::Layout::kBytes ==
                quantised_step_bytes(kDim, is_q8<Keys>, is_q8<Values>, kShape.groups));
  static_assert(1024 + kShape.teams * sizeof(QuantisedTeam<kDim, kRows>) <= quantised_table(kDim, kRows));
  constexpr bool kHasTable = !is_q8<Keys> || !is_q8<Values>;
  extern __shared__ __align__(128) unsigned char memory[];
  auto& own = reinterpret_cast<QuantisedTeam<kDim, kRows>*>(memory)[threadIdx.y];
  DecodeTeam<kRows>& team = own.common;
#if defined(__CUDA_ARCH__)
  constexpr uint32_t kBase = shared_base(__CUDA_ARCH__ / 100);
  if (shared_address(memory) != kBase) __trap();  // the table's address is a constant
#endif
  unsigned char* table = memory + (quantised_table(kDim, kRows) - shared_address(memory));
  unsigned char* rings = table + (kHasTable ? kTableBytes : 0);
  wait_for_predecessor();
  const bool works = team_index() < grid.units;
  if (works) {
    find_first_unit(p, grid, team);
    team_sync();
  }
  Kernel kernel{p, grid, team, own.queries, rings, {p, grid, shared_address(rings)}, {}, {}, {}};
  // The first steps travel while the table and the queries are made.
  if (works) {
    kernel.ask(team.units[0]);
    kernel.ring.start(p, grid, team);
  }
  if (kHasTable) fill_table(table);
  if (works) {
    prepare_unit(p, grid, team, 0, team_index());
    kernel.stage(team.units[0]);
  }
  __syncthreads();
  if (!works) return;
  kernel.receive();
  decode_units<kDim, is_q8<Values> ? 0 : Values::kBlock>(p, grid, team, kernel);
}

}  // namespace attnspan::cuda
