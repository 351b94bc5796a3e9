#pragma once
// Tiles of keys or values in shared memory, decoded from any format of the cache while they are loaded.
// Dense tensors are planes in their dtype's format. Rows that do not exist and columns beyond the stored
// width become zeros, so that no kernel needs to mask a product.

#include "cuda/ptx.cuh"
#include "cuda/sequence.cuh"
#include "kv/tbq4_constants.hpp"

namespace attnspan::cuda {

// Device code can't index a constexpr std::array at run time; a test compares this with tbq4::kCentroids.
static __constant__ float kDeviceCentroids[16] = {-2.73258957F, -2.06901723F, -1.61804639F, -1.25623120F,
                                                  -0.94234046F, -0.65675912F, -0.38804830F, -0.12839503F,
                                                  0.12839503F,  0.38804830F,  0.65675912F,  0.94234046F,
                                                  1.25623120F,  1.61804639F,  2.06901723F,  2.73258957F};

__device__ __forceinline__ float f16_bits_to_float(uint16_t bits) {
  return __half2float(__ushort_as_half(bits));
}

// Values [col, col + 8) of a stored row.
__device__ inline void decode8(const KvPlane& plane, const uint8_t* codes, const uint16_t* scales, int col,
                               float (&x)[8]) {
  switch (plane.format) {
    case Format::f32:
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        x[i] = col + i < plane.dim ? reinterpret_cast<const float*>(codes)[col + i] : 0.0F;
      }
      break;
    case Format::f16:
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        x[i] = col + i < plane.dim ? __half2float(reinterpret_cast<const __half*>(codes)[col + i]) : 0.0F;
      }
      break;
    case Format::bf16:
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        x[i] = col + i < plane.dim ? __bfloat162float(reinterpret_cast<const __nv_bfloat16*>(codes)[col + i])
                                   : 0.0F;
      }
      break;
    case Format::q8: {
      const float scale = f16_bits_to_float(scales[col / 32]);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        x[i] = col + i < plane.dim
                   ? static_cast<float>(reinterpret_cast<const int8_t*>(codes)[col + i]) * scale
                   : 0.0F;
      }
      break;
    }
    case Format::tbq4: {
      const float norm = f16_bits_to_float(scales[col / plane.block]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int byte = codes[col / 2 + i];
        x[2 * i] = norm * kDeviceCentroids[byte & 15];
        x[2 * i + 1] = norm * kDeviceCentroids[byte >> 4];
      }
      break;
    }
  }
}

template <typename T>
struct FormatOf;
template <>
struct FormatOf<float> {
  static constexpr Format value = Format::f32;
};
template <>
struct FormatOf<__half> {
  static constexpr Format value = Format::f16;
};
template <>
struct FormatOf<__nv_bfloat16> {
  static constexpr Format value = Format::bf16;
};

__device__ __forceinline__ void store8(float* to, const float (&x)[8]) {
  *reinterpret_cast<float4*>(to) = make_float4(x[0], x[1], x[2], x[3]);
  *reinterpret_cast<float4*>(to + 4) = make_float4(x[4], x[5], x[6], x[7]);
}
template <typename T>
__device__ __forceinline__ void store8(T* to, const float (&x)[8]) {
  *reinterpret_cast<uint4*>(to) =
      make_uint4(pack(x[0], x[1], T{}), pack(x[2], x[3], T{}), pack(x[4], x[5], T{}), pack(x[6], x[7], T{}));
}

// tile[key - key0][0 .. width) = columns [col0, col0 + width) of keys [key0, key0 + rows); `exists` are the
// keys that may be read. width is a multiple of 8. Ends with a committed group of asynchronous copies.
template <typename T>
__device__ inline void load_tile(T* tile, int stride, const Params& p, const DeviceSequence& s,
                                 const KvPlane& plane, PlaneHead head, KeySpan exists, int64_t key0, int rows,
                                 int col0, int width) {
  const int units = width / 8;
  constexpr int kBytes = 8 * sizeof(T);  // of one unit
  const bool copies = plane.format == FormatOf<T>::value && plane.aligned && plane.dim % 8 == 0;
  for (int u = static_cast<int>(threadIdx.x); u < rows * units; u += static_cast<int>(blockDim.x)) {
    const int row = u / units;
    const int unit = u - row * units;
    const int col = col0 + unit * 8;
    T* to = tile + row * stride + unit * 8;
    const int64_t key = key0 + row;
    if (!exists.contains(key) || col >= plane.stored_dim) {
#pragma unroll
      for (int i = 0; i < kBytes / 16; ++i) reinterpret_cast<uint4*>(to)[i] = make_uint4(0, 0, 0, 0);
      continue;
    }
    const TokenPlace place = place_of(p, s, key);
    const uint8_t* codes = codes_at(plane, head, place);
    if (copies) {
#pragma unroll
      for (int i = 0; i < kBytes / 16; ++i) {
        copy_async_16(shared_address(to) + 16 * i, codes + col * sizeof(T) + 16 * i);
      }
    } else {
      float x[8];
      decode8(plane, codes, scales_at(plane, head, place), col, x);
      store8(to, x);
    }
  }
  copy_async_commit();
}

}  // namespace attnspan::cuda
