#pragma once
// Decode over caches whose keys and values are tbq4 or q8, each its own: products in f16 on values that are
// decoded in registers; the scales stay outside (they multiply scores, and weights), so that no product can
// leave f16's range.
//
// tbq4: a byte holds two values. It is looked up as two f16 centroids in a table that every lane has to
// itself (32 KB: entry b of lane l at 128 b + 4 l), so no two lanes ever meet in a bank: one extraction, one
// address and one 4-byte load for two values, where byte permutes would take five instructions of a pipe that
// a multiprocessor has only 64 lanes of. docs/decisions has the count.
//
// The order of columns is free, as long as queries and outputs follow it: each lane reads whole words.

#include "cuda/decode_quantised_copy.cuh"

namespace attnspan::cuda {

// ---- reading shared memory

__device__ __forceinline__ uint32_t read_word(uint32_t at) {
  uint32_t x;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(at));
  return x;
}
template <int kWords>
__device__ __forceinline__ void read_words(uint32_t (&x)[kWords], uint32_t at) {
  if constexpr (kWords == 4) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(at));
  } else if constexpr (kWords == 2) {
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(x[0]), "=r"(x[1]) : "r"(at));
  } else {
    x[0] = read_word(at);
  }
}
__device__ __forceinline__ float read_scale(uint32_t at) {
  uint16_t x;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(x) : "r"(at));
  return f16_bits_to_float(x);
}

// Byte i of a word of codes as two centroids: the even value in the low half. `table` is this lane's.
__device__ __forceinline__ uint32_t look_up(uint32_t table, uint32_t word, int i) {
  return read_word(table + __byte_perm(word, 0, 0x4440 + i) * 128);
}

// Two bytes of int8 as f16: 1024 + (x + 128) is exact in f16, and so is the difference.
__device__ __forceinline__ uint32_t widen_bytes(uint32_t biased, uint32_t selector) {
  const uint32_t magic = __byte_perm(biased, 0x64646464U, selector);
  const __half2 x =
      __hsub2(*reinterpret_cast<const __half2*>(&magic), __half2half2(__ushort_as_half(0x6480)));
  return *reinterpret_cast<const uint32_t*>(&x);
}

// ---- queries

// The column of the query that slot (k, side, 2 t + e) of the products' depth stands for: lane t's words of a
// key's codes are read in order. tbq4: 16 bytes (block 64: 8) a block; q8: 4 bytes of each 16.
template <int kDim>
__device__ __forceinline__ int query_column(bool q8, int k, int t, int side, int e) {
  if (q8) return 16 * k + 4 * t + 2 * side + e;
  constexpr int kBlock = QuantisedDecode<kDim>::kTbq4Block;
  return k / (kBlock / 16) * kBlock + t * (kBlock / 4) + k % (kBlock / 16) * 4 + 2 * side + e;
}

// Query rows in f16, each divided by its largest value, which `peak` keeps; rotated where keys are tbq4.
template <int kDim, int kTiles>
__device__ inline void load_rotated_query(const Params& p, const DecodeBlock& b, float* staging,
                                          uint32_t (&q)[kDim / 16][kTiles][2], float (&peak)[kTiles][2]) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) & 31;
  const int warps = static_cast<int>(blockDim.x) / 32;
  const bool q8 = p.key.format == Format::q8;
  constexpr int kStride = kDim + 1;
  float* peaks = staging + 8 * kTiles * kStride;
  for (int r = warp; r < 8 * kTiles; r += warps) {
    float* row = staging + r * kStride;
    const int64_t first =
        r < b.rows ? p.query.index(b.s.batch, head_of_row(p, b, r), b.s.q_row0 + query_row(p, b, r)) : 0;
    for (int c = lane; c < kDim; c += 32)
      row[c] = r < b.rows ? load_element(p.query.data, first + c, p.dtype) : 0.0F;
    __syncwarp();
    if (!q8) {
      constexpr int kBlock = QuantisedDecode<kDim>::kTbq4Block;
      for (int c = 0; c < kDim; c += kBlock) rotate_block(row + c, kBlock, false);
    }
    float largest = 0;
    for (int c = lane; c < kDim; c += 32) largest = fmaxf(largest, fabsf(row[c]));
    for (int d = 1; d < 32; d *= 2) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffU, largest, d));
    if (lane == 0) peaks[r] = largest > 0 ? largest : 1.0F;
  }
  __syncthreads();
  const int t = lane & 3;
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    const int r = lane / 4 + 8 * n;
    const float inverse = 1.0F / peaks[r];
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        const float* row = staging + r * kStride;
        q[k][n][side] = pack(row[query_column<kDim>(q8, k, t, side, 0)] * inverse,
                             row[query_column<kDim>(q8, k, t, side, 1)] * inverse, __half{});
      }
    }
    peak[n][0] = peaks[row_of(n, 0)];
    peak[n][1] = peaks[row_of(n, 1)];
  }
  __syncthreads();  // the staging becomes the ring
}

// ---- scores

// s = peak * sum over blocks of scale[key][block] * (codes . query), for 16 keys.
template <int kDim, int kTiles>
__device__ __forceinline__ void group_scores_tbq4(float (&s)[kTiles][4],
                                                  const uint32_t (&q)[kDim / 16][kTiles][2], uint32_t keys,
                                                  uint32_t scales, uint32_t table) {
  constexpr int kBlock = QuantisedDecode<kDim>::kTbq4Block, kBlocks = kDim / kBlock, kRow = kDim / 2;
  constexpr int kWords = kBlock / 32;  // of a lane, of one block of one key
  const int g = (static_cast<int>(threadIdx.x) & 31) / 4, t = static_cast<int>(threadIdx.x) & 3;
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
    uint32_t low[kWords], high[kWords];
    const int at =
        kWords == 4 ? 16 * key_chunk(false, kRow, g, block * 4 + t) : block * kBlock / 2 + t * kBlock / 8;
    read_words(low, keys + g * kRow + at);
    read_words(high, keys + (g + 8) * kRow + at);  // g and g + 8 have one swizzle
    float dots[kTiles][4] = {};
#pragma unroll
    for (int k = 0; k < kBlock / 16; ++k) {
      const int i = k % 2 * 2;
      const uint32_t a[4] = {look_up(table, low[k / 2], i), look_up(table, high[k / 2], i),
                             look_up(table, low[k / 2], i + 1), look_up(table, high[k / 2], i + 1)};
      const auto& operands = q[block * (kBlock / 16) + k];
#pragma unroll
      for (int n = 0; n < kTiles; ++n) mma(dots[n], a, operands[n][0], operands[n][1], __half{});
    }
    const float scale_low = read_scale(scales + 2 * (g * kBlocks + block));
    const float scale_high = read_scale(scales + 2 * ((g + 8) * kBlocks + block));
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) s[n][e] += dots[n][e] * (e < 2 ? scale_low : scale_high);
    }
  }
}

template <int kDim, int kTiles>
__device__ __forceinline__ void group_scores_q8(float (&s)[kTiles][4],
                                                const uint32_t (&q)[kDim / 16][kTiles][2], uint32_t keys,
                                                uint32_t scales) {
  const int g = (static_cast<int>(threadIdx.x) & 31) / 4, t = static_cast<int>(threadIdx.x) & 3;
#pragma unroll
  for (int block = 0; block < kDim / 32; ++block) {
    float dots[kTiles][4] = {};
#pragma unroll
    for (int k = 2 * block; k < 2 * block + 2; ++k) {
      const uint32_t low =
          read_word(keys + g * kDim + 16 * key_chunk(true, kDim, g, k) + 4 * t) ^ 0x80808080U;
      const uint32_t high =
          read_word(keys + (g + 8) * kDim + 16 * key_chunk(true, kDim, g + 8, k) + 4 * t) ^ 0x80808080U;
      const uint32_t a[4] = {widen_bytes(low, 0x4140), widen_bytes(high, 0x4140), widen_bytes(low, 0x4342),
                             widen_bytes(high, 0x4342)};
#pragma unroll
      for (int n = 0; n < kTiles; ++n) mma(dots[n], a, q[k][n][0], q[k][n][1], __half{});
    }
    const float scale_low = read_scale(scales + 2 * (g * (kDim / 32) + block));
    const float scale_high = read_scale(scales + 2 * ((g + 8) * (kDim / 32) + block));
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) s[n][e] += dots[n][e] * (e < 2 ? scale_low : scale_high);
    }
  }
}

// ---- weighted sums

// Weights of 16 keys times the values' scales over `reference`, as operands. Keys without weight may have any
// scale: they count as 0.
template <int kTiles>
__device__ __forceinline__ void scaled_weights(uint32_t (&w)[kTiles][2], const float (&p)[kTiles][4],
                                               float scale_low, float scale_high) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    float x[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) x[e] = p[n][e] > 0 ? p[n][e] * (e < 2 ? scale_low : scale_high) : 0.0F;
    w[n][0] = transpose_matrix(pack(x[0], x[1], __half{}));
    w[n][1] = transpose_matrix(pack(x[2], x[3], __half{}));
  }
}

// o += values^T weights for 16 keys. Lane g's columns of a block are its words of the codes in order.
template <int kDim, int kTiles>
__device__ __forceinline__ void group_sum_tbq4(float (&o)[kDim / 16][kTiles][4],
                                               const float (&weights)[kTiles][4], uint32_t values,
                                               uint32_t scales, float inverse_reference, uint32_t table) {
  constexpr int kBlock = QuantisedDecode<kDim>::kTbq4Block, kBlocks = kDim / kBlock, kRow = kDim / 2;
  constexpr int kWords = kBlock / 64;  // of a lane, of one block of one key
  const int g = (static_cast<int>(threadIdx.x) & 31) / 4, t = static_cast<int>(threadIdx.x) & 3;
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
    uint32_t w[kTiles][2];
    scaled_weights<kTiles>(w, weights, read_scale(scales + 2 * (g * kBlocks + block)) * inverse_reference,
                           read_scale(scales + 2 * ((g + 8) * kBlocks + block)) * inverse_reference);
    // Codes of keys 2 t, 2 t + 1, 2 t + 8, 2 t + 9, at positions t, t + 4, t + 8, t + 12: one swizzle for
    // all.
    const int byte = block * kBlock / 2 + g * kBlock / 16;
    const int at = 16 * value_chunk(kRow, t, byte / 16) + byte % 16;
    uint32_t codes[4][kWords];
#pragma unroll
    for (int i = 0; i < 4; ++i) read_words(codes[i], values + (t + 4 * i) * kRow + at);
#pragma unroll
    for (int c = 0; c < kBlock / 16; ++c) {
      uint32_t pairs[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) pairs[i] = look_up(table, codes[i][c / 4], c % 4);
      const uint32_t a[4] = {__byte_perm(pairs[0], pairs[1], 0x5410), __byte_perm(pairs[0], pairs[1], 0x7632),
                             __byte_perm(pairs[2], pairs[3], 0x5410),
                             __byte_perm(pairs[2], pairs[3], 0x7632)};
#pragma unroll
      for (int n = 0; n < kTiles; ++n) mma(o[block * (kBlock / 16) + c][n], a, w[n][0], w[n][1], __half{});
    }
  }
}

template <int kDim, int kTiles>
__device__ __forceinline__ void group_sum_q8(float (&o)[kDim / 16][kTiles][4],
                                             const float (&weights)[kTiles][4], uint32_t values,
                                             uint32_t scales, float inverse_reference) {
  const int g = (static_cast<int>(threadIdx.x) & 31) / 4, t = static_cast<int>(threadIdx.x) & 3;
#pragma unroll
  for (int block = 0; block < kDim / 32; ++block) {
    uint32_t w[kTiles][2];
    scaled_weights<kTiles>(w, weights, read_scale(scales + 2 * (g * (kDim / 32) + block)) * inverse_reference,
                           read_scale(scales + 2 * ((g + 8) * (kDim / 32) + block)) * inverse_reference);
    const int at = 16 * value_chunk(kDim, t, 2 * block + g / 4) + g % 4 * 4;
    uint32_t codes[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) codes[i] = read_word(values + (t + 4 * i) * kDim + at) ^ 0x80808080U;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const uint32_t first = __byte_perm(codes[0], codes[1], c == 0 ? 0x5140 : 0x7362);
      const uint32_t second = __byte_perm(codes[2], codes[3], c == 0 ? 0x5140 : 0x7362);
      const uint32_t a[4] = {widen_bytes(first, 0x4140), widen_bytes(first, 0x4342),
                             widen_bytes(second, 0x4140), widen_bytes(second, 0x4342)};
#pragma unroll
      for (int n = 0; n < kTiles; ++n) mma(o[2 * block + c][n], a, w[n][0], w[n][1], __half{});
    }
  }
}

// The stored column behind tile c, lane group g and half of the accumulators.
template <int kDim>
__device__ __forceinline__ int value_column(bool q8, int c, int g, int half) {
  if (q8) return c / 2 * 32 + 4 * g + 2 * (c % 2) + half;
  constexpr int kBlock = QuantisedDecode<kDim>::kTbq4Block;
  return c / (kBlock / 16) * kBlock + g * (kBlock / 8) + c % (kBlock / 16) * 2 + half;
}

// Weights are taken times scale / reference, where reference is the largest scale of values met so far: they
// stay within 1. `largest`: of this lane's keys that have weight.
template <int kDim, int kTiles>
__device__ __forceinline__ void raise_reference(float largest, float& reference,
                                                WarpState<kDim, kTiles>& state) {
  if (!__any_sync(0xffffffffU, largest > reference)) return;  // after a few steps: always
  const float top = __uint_as_float(__reduce_max_sync(0xffffffffU, __float_as_uint(largest)));
  float factor[kTiles][2];
#pragma unroll
  for (int n = 0; n < kTiles; ++n) factor[n][0] = factor[n][1] = reference / top;
  state.scale(factor);
  reference = top;
}

// The largest scale of keys g and g + 8 of a group, where they have weight.
template <int kPerRow, int kTiles>
__device__ __forceinline__ float largest_scale(const float (&weights)[kTiles][4], uint32_t scales) {
  const int g = (static_cast<int>(threadIdx.x) & 31) / 4;
  float largest = 0;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    bool counts = false;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) counts = counts || weights[n][2 * h] > 0 || weights[n][2 * h + 1] > 0;
#pragma unroll
    for (int k = 0; k < kPerRow; ++k) {
      const float scale = read_scale(scales + 2 * ((g + 8 * h) * kPerRow + k));
      largest = counts ? fmaxf(largest, scale) : largest;
    }
  }
  return largest;
}

template <int kDim, int kTiles>
__global__ void __launch_bounds__(32 * quantised_warps(kDim, kTiles), 1)
    decode_quantised_kernel(const __grid_constant__ Params p, const StageLayout layout) {
  using D = QuantisedDecode<kDim>;
  extern __shared__ __align__(128) unsigned char shared[];
  start_dependents();
  wait_for_predecessor();
  const DecodeBlock b = find_decode_block(p, 8 * kTiles, blockIdx.x);
  if (b.keys.empty()) {
    store_empty(p, b);
    return;
  }
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) & 31;
  const int warps = static_cast<int>(blockDim.x) / 32;
  const bool key_q8 = p.key.format == Format::q8, value_q8 = p.value.format == Format::q8;
  const uint32_t table = shared_address(shared) + 4 * lane;
  if (!key_q8 || !value_q8) {
    for (int i = static_cast<int>(threadIdx.x); i < 256 * 32; i += static_cast<int>(blockDim.x)) {
      reinterpret_cast<uint32_t*>(shared)[i] =
          pack(kDeviceCentroids[(i / 32) & 15], kDeviceCentroids[i / 32 >> 4], __half{});
    }
  }
  unsigned char* behind_table = shared + (key_q8 && value_q8 ? 0 : kTableBytes);
  uint32_t q[kDim / 16][kTiles][2];
  float peak[kTiles][2];
  load_rotated_query<kDim, kTiles>(p, b, reinterpret_cast<float*>(behind_table), q, peak);

  const uint32_t ring = shared_address(behind_table) + warp * layout.stages * layout.bytes;
  const int64_t stride = static_cast<int64_t>(warps) * D::kStep;
  int64_t copied = b.start + warp * D::kStep;
  const auto copy_next = [&](int slot) {
    for (int i = 0; i < D::kGroups; ++i) {
      if (copied + 16 * i < b.keys.end)
        copy_group<kDim>(p, b, layout, ring + slot * layout.bytes, copied + 16 * i, i);
    }
    copy_async_commit();
    copied += stride;
  };
  const int ahead = layout.stages - 1;  // 1 to 3
  for (int i = 0; i < ahead; ++i) copy_next(i);

  RowScore rows[kTiles][2];
  find_rows<kTiles>(p, b, rows);
  WarpState<kDim, kTiles> state;
  float reference = 0;
  int slot = 0;
  for (int64_t key0 = b.start + warp * D::kStep; key0 < b.keys.end; key0 += stride) {
    if (ahead == 1) {
      copy_async_wait<0>();
    } else if (ahead == 2) {
      copy_async_wait<1>();
    } else {
      copy_async_wait<2>();
    }
    __syncwarp();  // this step is here, and nobody reads the slot before it any more
    copy_next(slot == 0 ? ahead : slot - 1);
    const uint32_t stage = ring + slot * layout.bytes;
    slot = slot == ahead ? 0 : slot + 1;
    float s[D::kGroups][kTiles][4] = {};
#pragma unroll
    for (int i = 0; i < D::kGroups; ++i) {
      const uint32_t keys = stage + 16 * i * layout.key_row;
      const uint32_t scales = stage + layout.scales_of_keys + 32 * i * layout.key_scales;
      if (key_q8) {
        group_scores_q8<kDim, kTiles>(s[i], q, keys, scales);
      } else {
        group_scores_tbq4<kDim, kTiles>(s[i], q, keys, scales, table);
      }
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) s[i][n][e] *= peak[n][e & 1];
      }
    }
    score_step<D::kGroups, kTiles>(p, b, rows, s, key0);
    weigh_step<D::kGroups, kDim, kTiles>(s, state);
    float largest = 0;
#pragma unroll
    for (int i = 0; i < D::kGroups; ++i) {
      const uint32_t scales = stage + layout.scales_of_values + 32 * i * layout.value_scales;
      largest = fmaxf(largest, value_q8 ? largest_scale<kDim / 32, kTiles>(s[i], scales)
                                        : largest_scale<kDim / D::kTbq4Block, kTiles>(s[i], scales));
    }
    raise_reference<kDim, kTiles>(largest, reference, state);
    const float inverse = reference > 0 ? 1.0F / reference : 0.0F;
#pragma unroll
    for (int i = 0; i < D::kGroups; ++i) {
      const uint32_t values = stage + layout.values + 16 * i * layout.value_row;
      const uint32_t scales = stage + layout.scales_of_values + 32 * i * layout.value_scales;
      if (value_q8) {
        group_sum_q8<kDim, kTiles>(state.o, s[i], values, scales, inverse);
      } else {
        group_sum_tbq4<kDim, kTiles>(state.o, s[i], values, scales, inverse, table);
      }
    }
  }
  copy_async_wait<0>();
  float factor[kTiles][2];
  for (int n = 0; n < kTiles; ++n) factor[n][0] = factor[n][1] = reference;
  state.scale(factor);
  store_split<kDim, kTiles>(
      p, b, state, reinterpret_cast<float*>(behind_table),
      [&](int tile, int g, int half) { return value_column<kDim>(value_q8, tile, g, half); });
}

}  // namespace attnspan::cuda
