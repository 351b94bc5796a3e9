#pragma once
// Decode over keys and values in the query's own 16-bit dtype. Copies of 16 bytes go straight to shared
// memory (rows of 128-byte multiples, chunk c of row r at c ^ (r % 8)), products through mma.sync: at 4 query
// heads a KV head a multiprocessor receives 19 bytes a clock and needs 2 of its 16 tensor-core clocks for
// them.

#include "cuda/decode.cuh"

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
__device__ __forceinline__ uint32_t chunk_at(uint32_t plane, int row, int chunk) {
  return plane + row * DenseDecode<kDim>::kRowBytes + (chunk ^ (row & 7)) * 16;
}

// Starts the copies of keys [key0, key0 + 16); rows that do not exist become zeros.
template <int kDim>
__device__ __forceinline__ void copy_step(const Params& p, const DecodeBlock& b, uint32_t stage,
                                          int64_t key0) {
  using D = DenseDecode<kDim>;
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const int chunk = lane % D::kChunks;
  // Without a table the rows of a sequence lie in one line.
  TokenPlace place{b.s.batch, key0 - b.s.rule.key_begin + b.s.k_row0};
  if (p.block_table != nullptr) place = place_of(p, b.s, key0);
  const uint8_t* key = codes_at(p.key, b.key_head, place) + chunk * 16;
  const uint8_t* value = codes_at(p.value, b.value_head, place) + chunk * 16;
  const int64_t before = b.keys.begin - key0, behind = b.keys.end - key0;
  const int first = before > 0 ? static_cast<int>(before) : 0,
            last = behind < D::kStep ? static_cast<int>(behind) : D::kStep;
  const bool key_column = chunk * 8 < p.head_dim, value_column = chunk * 8 < p.head_dim_v;
#pragma unroll
  for (int i = 0; i < D::kStep / D::kRowsAtOnce; ++i) {
    const int row = lane / D::kChunks + i * D::kRowsAtOnce;
    const bool exists = row >= first && row < last;
    const uint32_t to = chunk_at<kDim>(stage, row, chunk);
    copy_async_16(to, exists ? key + row * p.key.token_stride : p.key.codes, exists && key_column);
    copy_async_16(to + D::kPlaneBytes, exists ? value + row * p.value.token_stride : p.value.codes,
                  exists && value_column);
  }
}

// Query rows as the second operand: 8 rows a tile, missing ones and missing columns zero.
template <typename T, int kDim, int kTiles>
__device__ inline void load_query_operands(const Params& p, const DecodeBlock& b,
                                           uint32_t (&q)[kDim / 16][kTiles][2]) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    const int r = lane / 4 + 8 * n;
    const bool exists = r < b.rows;
    const T* row =
        static_cast<const T*>(p.query.data) +
        (exists ? p.query.index(b.s.batch, head_of_row(p, b, r), b.s.q_row0 + query_row(p, b, r)) : 0);
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        const int column = k * 16 + side * 8 + 2 * (lane & 3);
        const bool there = exists && column < p.head_dim;  // head_dim is a multiple of 8
        const uint16_t* values = reinterpret_cast<const uint16_t*>(row) + column;
        q[k][n][side] = there ? values[0] | static_cast<uint32_t>(values[1]) << 16 : 0U;
      }
    }
  }
}

template <typename T, int kDim, int kTiles>
__device__ __forceinline__ void step_scores(float (&s)[1][kTiles][4],
                                            const uint32_t (&q)[kDim / 16][kTiles][2], uint32_t keys) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
#pragma unroll
  for (int k = 0; k < kDim / 16; ++k) {
    uint32_t a[4];
    ldmatrix(a, chunk_at<kDim>(keys, lane & 15, 2 * k + (lane >> 4)));
#pragma unroll
    for (int n = 0; n < kTiles; ++n) mma(s[0][n], a, q[k][n][0], q[k][n][1], T{});
  }
}

template <typename T, int kDim, int kTiles>
__device__ __forceinline__ void step_weighted_sum(float (&o)[kDim / 16][kTiles][4],
                                                  const float (&w)[1][kTiles][4], uint32_t values) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  uint32_t weights[kTiles][2];
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    weights[n][0] = transpose_matrix(pack(w[0][n][0], w[0][n][1], T{}));
    weights[n][1] = transpose_matrix(pack(w[0][n][2], w[0][n][3], T{}));
  }
#pragma unroll
  for (int c = 0; c < kDim / 16; ++c) {
    uint32_t a[4];
    ldmatrix_transposed(a, chunk_at<kDim>(values, (lane >> 4) * 8 + (lane & 7), 2 * c + ((lane >> 3) & 1)));
#pragma unroll
    for (int n = 0; n < kTiles; ++n) mma(o[c][n], a, weights[n][0], weights[n][1], T{});
  }
}

// Blocks stay for several items. The copies run ahead of the products across items, so that the memory never
// waits for one to be finished; what a block keeps of an item for its copies is `source`.
template <typename T, int kDim, int kTiles>
__global__ void __launch_bounds__(128) decode_dense_kernel(const __grid_constant__ Params p, uint32_t items) {
  using D = DenseDecode<kDim>;
  extern __shared__ __align__(128) unsigned char shared[];
  start_dependents();
  wait_for_predecessor();
  const int warp = static_cast<int>(threadIdx.x) / 32, warps = static_cast<int>(blockDim.x) / 32;
  const uint32_t ring = shared_address(shared) + warp * D::kStages * D::kStageBytes;
  float* merged = reinterpret_cast<float*>(shared + warps * D::kStages * D::kStageBytes);
  const int stride = warps * D::kStep;

  uint32_t source_item = blockIdx.x;
  DecodeBlock source = find_decode_block(p, 8 * kTiles, source_item);
  int64_t copied = source.start + warp * D::kStep;  // the next step to copy
  const auto copy_next = [&](int slot) {
    while (source_item < items && copied >= source.keys.end) {
      source_item += gridDim.x;
      if (source_item >= items) break;
      source = find_decode_block(p, 8 * kTiles, source_item);
      copied = source.start + warp * D::kStep;
    }
    if (source_item < items) copy_step<kDim>(p, source, ring + slot * D::kStageBytes, copied);
    copy_async_commit();
    copied += stride;
  };
#pragma unroll
  for (int i = 0; i < D::kStages - 1; ++i) copy_next(i);

  int slot = 0;
  DecodeBlock b = source;  // of the item whose products are taken
  if (source_item != blockIdx.x) b = find_decode_block(p, 8 * kTiles, blockIdx.x);
  uint32_t q[kDim / 16][kTiles][2];
  load_query_operands<T, kDim, kTiles>(p, b, q);
  for (uint32_t item = blockIdx.x; item < items;) {
    RowScore rows[kTiles][2];
    find_rows<kTiles>(p, b, rows);
    WarpState<kDim, kTiles> state;
    for (int64_t key0 = b.start + warp * D::kStep; key0 < b.keys.end; key0 += stride) {
      copy_async_wait<D::kStages - 2>();
      __syncwarp();  // this step is here, and nobody reads the slot before it any more
      copy_next(slot == 0 ? D::kStages - 1 : slot - 1);
      const uint32_t stage = ring + slot * D::kStageBytes;
      slot = slot + 1 == D::kStages ? 0 : slot + 1;
      float s[1][kTiles][4] = {};
      step_scores<T, kDim, kTiles>(s, q, stage);
      score_step<1, kTiles>(p, b, rows, s, key0);
      weigh_step<1, kDim, kTiles>(s, state);
      step_weighted_sum<T, kDim, kTiles>(state.o, s, stage + D::kPlaneBytes);
    }
    // The next item's queries travel while this one is stored. Its place is known if copies have reached it.
    const DecodeBlock done = b;
    item += gridDim.x;
    if (item < items) {
      b = source;
      if (source_item != item) b = find_decode_block(p, 8 * kTiles, item);
      load_query_operands<T, kDim, kTiles>(p, b, q);
    }
    if (done.keys.empty()) {
      store_empty(p, done);
    } else {
      store_split<kDim, kTiles>(p, done, state, merged,
                                [](int tile, int g, int half) { return tile * 16 + g + 8 * half; });
    }
  }
  copy_async_wait<0>();
}

namespace detail {

template <typename T, int kDim>
cudaError_t launch_decode_dense_dim(const Params& p, const DecodePlan& plan, cudaStream_t stream) {
  const int64_t items = decode_items(p, plan);
  const int64_t blocks = items < plan.resident_blocks ? items : plan.resident_blocks;
  const auto count = static_cast<uint32_t>(items);
  return plan.tile_rows == 8 ? start_decode(decode_dense_kernel<T, kDim, 1>, p, plan, blocks, stream, count)
                             : start_decode(decode_dense_kernel<T, kDim, 2>, p, plan, blocks, stream, count);
}

template <typename T>
cudaError_t launch_decode_dense(const Params& p, const DecodePlan& plan, cudaStream_t stream) {
  if (plan.bucket == 0) return launch_decode_dense_dim<T, 64>(p, plan, stream);
  if (plan.bucket == 1) return launch_decode_dense_dim<T, 128>(p, plan, stream);
  return launch_decode_dense_dim<T, 256>(p, plan, stream);
}

}  // namespace detail
}  // namespace attnspan::cuda
