#pragma once
// One sequence of the batch, from the arrays on the device: what core/problem.cpp's sequence() does on hosts.

#include "cuda/params.hpp"

namespace attnspan::cuda {

struct DeviceSequence {
  int32_t batch = 0;
  int64_t q_row0 = 0, k_row0 = 0;
  int32_t seqlen_q = 0, seqlen_k = 0;
  SpanRule rule;  // rows are relative to q_row0, keys to k_row0
};

__device__ __forceinline__ int32_t length_q(const Params& p, int32_t batch) {
  return p.cu_seqlens_q == nullptr ? p.seqlen_q : p.cu_seqlens_q[batch + 1] - p.cu_seqlens_q[batch];
}

__device__ inline DeviceSequence sequence_of(const Params& p, int32_t batch) {
  DeviceSequence s;
  s.batch = batch;
  s.seqlen_q = p.seqlen_q;
  s.seqlen_k = p.seqlen_k;
  if (p.cu_seqlens_q != nullptr) {
    s.q_row0 = p.cu_seqlens_q[batch];
    s.k_row0 = p.cu_seqlens_k[batch];
    s.seqlen_q = static_cast<int32_t>(p.cu_seqlens_q[batch + 1] - s.q_row0);
    s.seqlen_k = static_cast<int32_t>(p.cu_seqlens_k[batch + 1] - s.k_row0);
  }
  if (p.seqused_k != nullptr) s.seqlen_k = p.seqused_k[batch * p.seqused_k_stride];
  if (p.cache_seqlens != nullptr) {
    s.seqlen_k = p.cache_seqlens[batch * p.cache_seqlens_stride];
    if (p.first_position != nullptr) s.rule.key_begin = p.first_position[batch * p.first_position_stride];
  }
  s.rule.key_limit = s.seqlen_k;
  s.rule.diagonal = p.diagonal_kind == 0   ? static_cast<int64_t>(s.seqlen_k) - s.seqlen_q
                    : p.diagonal_kind == 1 ? 0
                                           : p.diagonal_value;
  s.rule.window_left = p.window_left;
  s.rule.window_right = p.window_right;
  if (p.key_start.data != nullptr) s.rule.key_start = p.key_start.data + batch * p.key_start.batch_stride;
  if (p.key_end.data != nullptr) s.rule.key_end = p.key_end.data + batch * p.key_end.batch_stride;
  return s;
}

// Which tile of rows a linear index means. Sequences of one length: index = tile * batch + b, so that tiles
// are dealt in order of their position; packed ones lie one after the other.
struct RowTile {
  int32_t batch = -1;  // -1: past the end
  int32_t tile = 0;
};

// All 32 lanes of a warp call it together and get the same answer. packing: rows that one query row becomes.
__device__ inline RowTile locate_tile(const Params& p, int32_t rows_per_tile, int32_t packing,
                                      int64_t index) {
  RowTile found;
  if (p.cu_seqlens_q == nullptr) {
    found.batch = static_cast<int32_t>(index % p.batch);
    found.tile = static_cast<int32_t>(index / p.batch);
    return found;
  }
  const int lane = static_cast<int>(threadIdx.x) & 31;
  int64_t before = 0;
  for (int32_t first = 0; first < p.batch; first += 32) {
    const int32_t b = first + lane;
    const int32_t tiles = b < p.batch ? (length_q(p, b) * packing + rows_per_tile - 1) / rows_per_tile : 0;
    int64_t upto = tiles;
    for (int d = 1; d < 32; d *= 2) {
      const int64_t other = __shfl_up_sync(0xffffffffU, upto, d);
      if (lane >= d) upto += other;
    }
    const uint32_t holds = __ballot_sync(0xffffffffU, index < before + upto);
    if (holds != 0) {
      const int owner = __ffs(static_cast<int>(holds)) - 1;
      const int64_t start = __shfl_sync(0xffffffffU, before + upto - tiles, owner);
      found.batch = first + owner;
      found.tile = static_cast<int32_t>(index - start);
      return found;
    }
    before += __shfl_sync(0xffffffffU, upto, 31);
  }
  return found;
}

// ---- rows of keys and values

// One KV head of one sequence in a plane.
struct PlaneHead {
  const uint8_t* codes = nullptr;
  const uint16_t* scales = nullptr;
};

__device__ __forceinline__ PlaneHead head_of(const KvPlane& plane, int32_t kv_head) {
  return {plane.codes + kv_head * plane.head_stride,
          plane.scales == nullptr ? nullptr : plane.scales + kv_head * plane.scale_head_stride};
}

struct TokenPlace {
  int64_t page = 0;
  int64_t token = 0;
};

// Where key position `position` of a sequence lies.
__device__ __forceinline__ TokenPlace place_of(const Params& p, const DeviceSequence& s, int64_t position) {
  if (!p.has_pages) return {s.batch, s.k_row0 + position};
  const int32_t offset = static_cast<int32_t>(position - s.rule.key_begin);
  const int32_t index = p.page_shift >= 0 ? offset >> p.page_shift : offset / p.page_size;
  const int64_t token = offset - static_cast<int64_t>(index) * p.page_size;
  if (p.block_table == nullptr) return {s.batch, token};
  return {p.block_table[s.batch * p.block_table_stride + index * p.block_table_page_stride], token};
}

__device__ __forceinline__ const uint8_t* codes_at(const KvPlane& plane, PlaneHead head, TokenPlace place) {
  return head.codes + place.page * plane.page_stride + place.token * plane.token_stride;
}

__device__ __forceinline__ const uint16_t* scales_at(const KvPlane& plane, PlaneHead head, TokenPlace place) {
  if (head.scales == nullptr) return nullptr;
  return head.scales + place.page * plane.scale_page_stride + place.token * plane.scale_token_stride;
}

}  // namespace attnspan::cuda
