// New rows of keys or values into a cache, in its format (docs/kv-formats.md): one simdgroup per row. KEY_FORMAT,
// KEY_BLOCK and KEY_WIDTH stand for the side that is written, HEAD_DIM for the width of its rows.

#include "rotate.h"
#include "span.h"

// Factors of the RMS that the quality encoder tries.
constant float kPreScales[9] = {0.84f, 0.88f, 0.92f, 0.96f, 1.00f, 1.04f, 1.08f, 1.12f, 1.16f};

// How many thresholds, midpoints of neighbouring centroids, are <= value.
inline int code_of(float value) {
  int code = 0;
  for (int i = 0; i < 15; ++i) code += 0.5f * (kCentroids[i] + kCentroids[i + 1]) <= value ? 1 : 0;
  return code;
}

// A scale as f16; one beyond its range, or no number, is stored as 65504 and counted.
inline float scale_to_f16(float scale, device half* to, device atomic_uint* saturated, int lane) {
  const bool in_range = is_finite(scale) && scale >= 0.0f && scale < 65520.0f;
  const half stored = half(in_range ? scale : 65504.0f);
  if (lane == 0) {
    to[0] = stored;
    if (!in_range) atomic_fetch_add_explicit(saturated, 1u, memory_order_relaxed);
  }
  return float(stored);
}

// x[i] += x[i + n / 2] over all values of a block, then over its first half, and so on: the order of sums that the
// format prescribes. A lane holds values lane, lane + 32, ...
inline float halving_sum(thread float* values, int count) {
  for (int step = count / 2; step > 0; step /= 2) {
    for (int i = 0; i < step; ++i) values[i] += values[i + step];
  }
  float sum = values[0];
  for (int mask = 16; mask > 0; mask /= 2) sum += simd_shuffle_xor(sum, ushort(mask));
  return sum;
}

// One rounding of a block: its sums, with the codes left in `codes`.
struct Rounding {
  float dot, squares;
};
inline Rounding round_block(thread const float* y, thread int* codes, int count, float inverse) {
  float products[4];
  float squares[4];
  for (int i = 0; i < count; ++i) {
    codes[i] = code_of(y[i] * inverse);
    const float centroid = kCentroids[codes[i]];
    products[i] = y[i] * centroid;
    squares[i] = centroid * centroid;
  }
  Rounding rounding;
  rounding.dot = halving_sum(products, count);
  rounding.squares = halving_sum(squares, count);
  return rounding;
}

// y: one rotated block in threadgroup memory, which then takes the codes on their way to pairs.
inline void encode_tbq4_block(threadgroup float* y, device uchar* codes, device half* norm,
                              device atomic_uint* saturated, int lane) {
  const int count = KEY_BLOCK / 32;
  float mine[4];
  float squared[4];
  for (int i = 0; i < count; ++i) {
    mine[i] = y[lane + 32 * i];
    squared[i] = mine[i] * mine[i];
  }
  const float energy = halving_sum(squared, count);
  const float rms = precise::sqrt(energy / float(KEY_BLOCK));
  int best_codes[4] = {0, 0, 0, 0};
  float scale = 0.0f;
  if (rms != 0.0f && ENCODE_FAST) {
    const Rounding rounding = round_block(mine, best_codes, count, 1.0f / rms);
    scale = precise::sqrt(energy) / precise::sqrt(rounding.squares);
  } else if (rms != 0.0f) {
    float best = 0.0f;
    for (int k = 0; k < 9; ++k) {
      int candidate[4];
      const Rounding rounding = round_block(mine, candidate, count, 1.0f / (kPreScales[k] * rms));
      const float judged = (rounding.dot * rounding.dot) / (rounding.squares * energy);
      if (k == 0 || judged > best) {
        best = judged;
        scale = energy / rounding.dot;
        for (int i = 0; i < count; ++i) best_codes[i] = candidate[i];
      }
    }
  }
  const bool is_zero = scale_to_f16(scale, norm, saturated, lane) == 0.0f;
  for (int i = 0; i < count; ++i) y[lane + 32 * i] = is_zero ? 0.0f : float(best_codes[i]);
  simdgroup_barrier(mem_flags::mem_threadgroup);
  for (int j = lane; j < KEY_BLOCK / 2; j += 32) {
    const int low = int(float(y[2 * j]));
    const int high = int(float(y[2 * j + 1]));
    codes[j] = uchar(low | (high << 4));
  }
}

// 32 values, one per lane.
inline void encode_q8_block(float value, device int8_t* codes, device half* to, device atomic_uint* saturated,
                            int lane) {
  const float scale = scale_to_f16(simd_max(fabs(value)) / 127.0f, to, saturated, lane);
  const float code = scale == 0.0f ? 0.0f : rint(clamp(value / scale, -127.0f, 127.0f));
  codes[lane] = int8_t(code);
}

kernel void cache_append(constant AppendTensors& t [[buffer(0)]],
                         constant AppendParams& p [[buffer(1)]],
                         threadgroup float* shared [[threadgroup(0)]],
                         uint3 group [[threadgroup_position_in_grid]],
                         uint lane [[thread_index_in_simdgroup]],
                         uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  const int row = int(group.x) * ATTNSPAN_SIMDGROUPS + int(simdgroup);
  const int kv_head = group.y;
  const int batch = group.z;
  if (row >= p.seqlen_new) return;
  int token = t.positions[batch * p.positions_stride] + row;
  if (HAS_FIRST_POSITION) token -= t.append_first[batch * p.first_stride];
  long page = batch;
  if (HAS_BLOCK_TABLE) {
    page = t.append_block_table[batch * p.block_table_batch + token / p.page_size * p.block_table_page];
    token = token % p.page_size;
  }
  device uchar* codes = t.codes + (page * p.plane.page + kv_head * p.plane.head + token * p.plane.token);
  device half* scales =
      t.scales + (page * p.plane.scale_page + kv_head * p.plane.scale_head + token * p.plane.scale_token);
  const long from = index_of(p.rows, batch, kv_head, row);
  if (KEY_FORMAT == kQ8) {
    for (int block = 0; block * 32 < HEAD_DIM; ++block) {
      const int d = block * 32 + int(lane);
      const float value = d < HEAD_DIM ? load_element(t.rows, from + d) : 0.0f;
      encode_q8_block(value, (device int8_t*)(codes + block * 32), scales + block, t.saturated, lane);
    }
    return;
  }
  if (KEY_FORMAT != kTbq4) {
    for (int d = lane; d < HEAD_DIM; d += 32) {
      const float value = load_element(t.rows, from + d);
      if (KEY_FORMAT == kF32) ((device float*)(codes))[d] = value;
      if (KEY_FORMAT == kF16) ((device half*)(codes))[d] = half(value);
      if (KEY_FORMAT == kBf16) ((device bfloat*)(codes))[d] = bfloat(value);
    }
    return;
  }
  threadgroup float* y = shared + int(simdgroup) * KEY_WIDTH;
  for (int d = lane; d < KEY_WIDTH; d += 32) y[d] = d < HEAD_DIM ? load_element(t.rows, from + d) : 0.0f;
  rotate_row(y, KEY_WIDTH, KEY_BLOCK, lane);
  for (int block = 0; block * KEY_BLOCK < KEY_WIDTH; ++block) {
    encode_tbq4_block(y + block * KEY_BLOCK, codes + block * KEY_BLOCK / 2, scales + block, t.saturated, lane);
  }
}
ATTNSPAN_KERNEL(cache_append)
