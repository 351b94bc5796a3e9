#pragma once
// Values as they lie in memory: the dtypes of tensors and the formats of a KV cache. Formats are function
// constants, so each pipeline keeps one branch.

#include "constants.h"

// The Lloyd-Max codebook of tbq4 (docs/kv-formats.md).
constant float kCentroids[16] = {-2.73258957f, -2.06901723f, -1.61804639f, -1.25623120f, -0.94234046f, -0.65675912f,
                                 -0.38804830f, -0.12839503f, 0.12839503f,  0.38804830f,  0.65675912f,  0.94234046f,
                                 1.25623120f,  1.61804639f,  2.06901723f,  2.73258957f};

// Value `column` of a stored row: row-major codes, and scales where the format has them.
inline float decode(int format, int block, device const uchar* codes, device const half* scales, int column) {
  if (format == kF32) return ((device const float*)(codes))[column];
  if (format == kF16) return float(((device const half*)(codes))[column]);
  if (format == kBf16) return float(((device const bfloat*)(codes))[column]);
  if (format == kQ8) return float(((device const int8_t*)(codes))[column]) * float(scales[column / 32]);
  const int pair = codes[column / 2];
  return kCentroids[column % 2 == 0 ? pair & 15 : pair >> 4] * float(scales[column / block]);
}

// Element `index` of a tensor of the problem's dtype.
inline float load_element(device const uchar* tensor, long index) {
  if (DTYPE == kF32) return ((device const float*)(tensor))[index];
  if (DTYPE == kF16) return float(((device const half*)(tensor))[index]);
  return float(((device const bfloat*)(tensor))[index]);
}

inline bool is_finite(float value) { return (as_type<uint>(value) & 0x7f800000u) != 0x7f800000u; }

// The value as the dtype keeps it: what nan_guard has to judge.
inline float rounded_to_dtype(float value) {
  if (DTYPE == kF16) return float(half(value));
  if (DTYPE == kBf16) return float(bfloat(value));
  return value;
}

inline void store_element(device uchar* tensor, long index, float value, device atomic_uint* nonfinite) {
  if (NAN_GUARD && !is_finite(rounded_to_dtype(value))) {
    value = 0.0f;
    atomic_fetch_add_explicit(nonfinite, 1u, memory_order_relaxed);  // a count: the order of additions is no matter
  }
  if (DTYPE == kF32) ((device float*)(tensor))[index] = value;
  if (DTYPE == kF16) ((device half*)(tensor))[index] = half(value);
  if (DTYPE == kBf16) ((device bfloat*)(tensor))[index] = bfloat(value);
}

inline float negative_infinity() { return as_type<float>(0xff800000u); }
