#pragma once
// Asynchronous copies of tbq4 and q8 rows for the quantised decode kernel: what lies where in a stage of a
// warp's ring, with chunks moved so that the lanes that read together find different banks.

#include "cuda/decode.cuh"

namespace attnspan::cuda {

inline constexpr int kTableBytes = 256 * 32 * 4;

template <int kDim>
struct QuantisedDecode {
  static constexpr int kStep = kQuantisedStep;
  static constexpr int kGroups = kStep / 16;
  static constexpr int kTbq4Block = kDim < 128 ? kDim : 128;
};

// Where the parts of one stage of a warp lie, from the start of the stage.
struct StageLayout {
  int key_row, value_row;        // bytes of codes
  int key_scales, value_scales;  // f16 scales of a row
  int values, scales_of_keys, scales_of_values, bytes;
  int stages;
};

__device__ __host__ inline StageLayout stage_layout(int key_row, int value_row, int key_scales,
                                                    int value_scales, int step, int stages) {
  StageLayout s{key_row, value_row, key_scales, value_scales, 0, 0, 0, 0, stages};
  s.values = key_row * step;
  s.scales_of_keys = s.values + value_row * step;
  s.scales_of_values = s.scales_of_keys + 2 * key_scales * step;
  s.bytes = (s.scales_of_values + 2 * value_scales * step + 127) / 128 * 128;
  return s;
}

// Chunks of 16 bytes are moved so that the lanes that read together find different banks.
__device__ __forceinline__ int key_chunk(bool q8, int row_bytes, int row, int chunk) {
  if (q8) return row_bytes >= 128 ? chunk ^ (row & 7) : chunk ^ ((row >> 1) & 3);
  return row_bytes >= 128 ? chunk ^ (4 * (row & 1)) : chunk;
}
// Values are read by four lanes at four neighbouring positions: key 2 t + e + 8 h of 16 lies at t + 4 e + 8
// h.
__device__ __forceinline__ int value_position(int key) {
  return (key & ~7) | ((key & 1) << 2) | ((key >> 1) & 3);
}
__device__ __forceinline__ int value_chunk(int row_bytes, int position, int chunk) {
  return row_bytes >= 128 ? chunk ^ (2 * (position & 3)) : row_bytes == 64 ? chunk ^ (position & 2) : chunk;
}

// Rows [first, last) of 16 keys: which of them exist in this split.
struct GroupRows {
  int first, last;
  __device__ __forceinline__ bool contains(int row) const { return row >= first && row < last; }
};

// Starts the copies of the codes of 16 keys in 16-byte chunks. place(row, chunk): where, from `to` on.
template <int kRow, typename Place>
__device__ __forceinline__ void copy_codes(const uint8_t* from, int64_t token_stride, uint32_t to,
                                           GroupRows rows, Place place) {
  constexpr int kChunks = kRow / 16;
  const int lane = static_cast<int>(threadIdx.x) & 31, chunk = lane % kChunks;
#pragma unroll
  for (int i = 0; i < kChunks / 2; ++i) {
    const int row = lane / kChunks + i * (32 / kChunks);
    if (rows.contains(row)) copy_async_16(to + place(row, chunk), from + row * token_stride + 16 * chunk);
  }
}

template <int kRow>
__device__ __forceinline__ void copy_keys(const uint8_t* from, int64_t token_stride, uint32_t to,
                                          GroupRows rows, bool q8) {
  copy_codes<kRow>(from, token_stride, to, rows,
                   [=](int row, int chunk) { return row * kRow + 16 * key_chunk(q8, kRow, row, chunk); });
}
template <int kRow>
__device__ __forceinline__ void copy_values(const uint8_t* from, int64_t token_stride, uint32_t to,
                                            GroupRows rows) {
  copy_codes<kRow>(from, token_stride, to, rows, [](int row, int chunk) {
    const int position = value_position(row);
    return position * kRow + 16 * value_chunk(kRow, position, chunk);
  });
}

// The scales of 16 keys lie one after the other: words of two. A word is copied where one of its keys exists.
template <int kPerRow>
__device__ __forceinline__ void copy_scales(const uint16_t* from, uint32_t to, GroupRows rows) {
  constexpr int kWords = 8 * kPerRow;
#pragma unroll
  for (int first = 0; first < kWords; first += 32) {
    const int word = first + (static_cast<int>(threadIdx.x) & 31);
    if (word >= kWords || !(rows.contains(2 * word / kPerRow) || rows.contains((2 * word + 1) / kPerRow)))
      continue;
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to + 4 * word), "l"(from + 2 * word)
                 : "memory");
  }
}

// Starts all copies of 16 keys of a step.
template <int kDim>
__device__ __forceinline__ void copy_group(const Params& p, const DecodeBlock& b, const StageLayout& layout,
                                           uint32_t stage, int64_t key0, int group) {
  constexpr int kTbq4Scales = kDim / QuantisedDecode<kDim>::kTbq4Block, kQ8Scales = kDim / 32;
  const int64_t before = b.keys.begin - key0, behind = b.keys.end - key0;
  const GroupRows rows{before > 0 ? static_cast<int>(before) : 0,
                       behind < 16 ? static_cast<int>(behind) : 16};
  // Without a table the rows of a sequence lie in one line.
  TokenPlace place{b.s.batch, key0 - b.s.rule.key_begin};
  if (p.block_table != nullptr) place = place_of(p, b.s, key0);
  const uint8_t* keys = codes_at(p.key, b.key_head, place);
  const uint8_t* values = codes_at(p.value, b.value_head, place);
  const uint32_t to_keys = stage + 16 * group * layout.key_row;
  const uint32_t to_values = stage + layout.values + 16 * group * layout.value_row;
  const uint16_t* key_scales = scales_at(p.key, b.key_head, place);
  const uint16_t* value_scales = scales_at(p.value, b.value_head, place);
  const uint32_t to_key_scales = stage + layout.scales_of_keys + 32 * group * layout.key_scales;
  const uint32_t to_value_scales = stage + layout.scales_of_values + 32 * group * layout.value_scales;
  if (p.key.format == Format::q8) {
    copy_keys<kDim>(keys, p.key.token_stride, to_keys, rows, true);
    copy_scales<kQ8Scales>(key_scales, to_key_scales, rows);
  } else {
    copy_keys<kDim / 2>(keys, p.key.token_stride, to_keys, rows, false);
    copy_scales<kTbq4Scales>(key_scales, to_key_scales, rows);
  }
  if (p.value.format == Format::q8) {
    copy_values<kDim>(values, p.value.token_stride, to_values, rows);
    copy_scales<kQ8Scales>(value_scales, to_value_scales, rows);
  } else {
    copy_values<kDim / 2>(values, p.value.token_stride, to_values, rows);
    copy_scales<kTbq4Scales>(value_scales, to_value_scales, rows);
  }
}

}  // namespace attnspan::cuda
