// Encoding on the device: the same bytes as src/kv writes, for every format. One warp a row. No product is
// contracted into a sum, and every sum is the halving tree of docs/kv-formats.md.

#include "cuda/append.hpp"

#include "cuda/kv_loader.cuh"
#include "cuda/rotation.cuh"
#include "kv/tbq4_constants.hpp"

namespace attnspan::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kMaxRow = 576;
constexpr float kLargestF16 = 65504.0F;

static __constant__ float kDeviceThresholds[15] = {
    tbq4::kThresholds[0],  tbq4::kThresholds[1],  tbq4::kThresholds[2],  tbq4::kThresholds[3],
    tbq4::kThresholds[4],  tbq4::kThresholds[5],  tbq4::kThresholds[6],  tbq4::kThresholds[7],
    tbq4::kThresholds[8],  tbq4::kThresholds[9],  tbq4::kThresholds[10], tbq4::kThresholds[11],
    tbq4::kThresholds[12], tbq4::kThresholds[13], tbq4::kThresholds[14]};
static __constant__ float kDevicePreScales[9] = {
    tbq4::kPreScales[0], tbq4::kPreScales[1], tbq4::kPreScales[2], tbq4::kPreScales[3], tbq4::kPreScales[4],
    tbq4::kPreScales[5], tbq4::kPreScales[6], tbq4::kPreScales[7], tbq4::kPreScales[8]};

__device__ __forceinline__ int lane_id() { return static_cast<int>(threadIdx.x) & 31; }

// A scale in f16; what is no number in [0, 65504] is stored as 65504 and counted.
__device__ inline uint16_t scale_bits(float scale, int& saturated) {
  if (0 <= scale && scale <= kLargestF16) return __half_as_ushort(__float2half_rn(scale));
  ++saturated;
  return __half_as_ushort(__float2half_rn(kLargestF16));
}

__device__ inline int encode_q8(const float* x, int dim, uint8_t* codes, uint16_t* scales) {
  int saturated = 0;
  for (int block = 0; block < (dim + 31) / 32; ++block) {
    const int i = block * 32 + lane_id();
    const float value = i < dim ? x[i] : 0.0F;
    float largest = fabsf(value);
    if (!(largest >= 0)) largest = 0;  // the host's std::max passes over NaN
    for (int d = 1; d < 32; d *= 2) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffU, largest, d));
    int over = 0;
    const uint16_t bits = scale_bits(__fdiv_rn(largest, 127.0F), over);
    saturated += over;
    const float scale = f16_bits_to_float(bits);
    int8_t code = 0;
    if (scale != 0 && i < dim) {
      const float quotient = __fdiv_rn(value, scale);
      code = static_cast<int8_t>(rintf(quotient > -127.0F ? fminf(quotient, 127.0F) : -127.0F));
    }
    reinterpret_cast<int8_t*>(codes)[i] = code;
    if (lane_id() == 0) scales[block] = bits;
  }
  return saturated;
}

// terms[i] += terms[i + n / 2] and so on; lane l holds i = l + 32 k in term[k]. Lane 0's sum, for all.
template <int kPerLane>
__device__ inline float tree_sum(float (&term)[kPerLane]) {
#pragma unroll
  for (int half = kPerLane / 2; half > 0; half /= 2) {
#pragma unroll
    for (int k = 0; k < half; ++k) term[k] = __fadd_rn(term[k], term[k + half]);
  }
  float sum = term[0];
  for (int d = 16; d > 0; d /= 2) sum = __fadd_rn(sum, __shfl_down_sync(0xffffffffU, sum, d));
  return __shfl_sync(0xffffffffU, sum, 0);
}

template <int kPerLane>
__device__ inline float tree_dot(const float (&a)[kPerLane], const float (&b)[kPerLane]) {
  float term[kPerLane];
#pragma unroll
  for (int k = 0; k < kPerLane; ++k) term[k] = __fmul_rn(a[k], b[k]);
  return tree_sum(term);
}

template <int kPerLane>
struct Rounded {
  int codes[kPerLane];
  float dot, squares;
};

template <int kPerLane>
__device__ inline Rounded<kPerLane> round_block(const float (&y)[kPerLane], float rms, float pre_scale) {
  Rounded<kPerLane> r;
  const float inverse = __fdiv_rn(1.0F, __fmul_rn(pre_scale, rms));
  float centroids[kPerLane];
#pragma unroll
  for (int k = 0; k < kPerLane; ++k) {
    const float v = __fmul_rn(y[k], inverse);
    int code = 0;
    for (int i = 0; i < 15; ++i) code += kDeviceThresholds[i] <= v ? 1 : 0;
    r.codes[k] = code;
    centroids[k] = kDeviceCentroids[code];
  }
  r.dot = tree_dot(y, centroids);
  r.squares = tree_dot(centroids, centroids);
  return r;
}

// One rotated block of 32 * kPerLane values.
template <int kPerLane>
__device__ inline int encode_block(const float* rotated, bool quality, uint8_t* codes, uint16_t* norm) {
  constexpr int kBlock = 32 * kPerLane;
  float y[kPerLane];
  for (int k = 0; k < kPerLane; ++k) y[k] = rotated[lane_id() + 32 * k];
  const float energy = tree_dot(y, y);
  const float rms = __fsqrt_rn(__fdiv_rn(energy, static_cast<float>(kBlock)));
  int saturated = 0;
  uint16_t bits = 0;
  Rounded<kPerLane> best{};
  if (rms != 0) {
    if (quality) {
      float best_score = 0;
      for (int i = 0; i < 9; ++i) {
        const Rounded<kPerLane> candidate = round_block(y, rms, kDevicePreScales[i]);
        const float score =
            __fdiv_rn(__fmul_rn(candidate.dot, candidate.dot), __fmul_rn(candidate.squares, energy));
        if (i == 0 || score > best_score) {
          best = candidate;
          best_score = score;
        }
      }
      bits = scale_bits(__fdiv_rn(energy, best.dot), saturated);
    } else {
      best = round_block(y, rms, 1.0F);
      bits = scale_bits(__fdiv_rn(__fsqrt_rn(energy), __fsqrt_rn(best.squares)), saturated);
    }
  }
#pragma unroll
  for (int k = 0; k < kPerLane; ++k) {
    const int code = bits == 0 ? 0 : best.codes[k];
    const int next = __shfl_down_sync(0xffffffffU, code, 1);
    if (lane_id() % 2 == 0) codes[(lane_id() + 32 * k) / 2] = static_cast<uint8_t>(code | next << 4);
  }
  if (lane_id() == 0) *norm = bits;
  return saturated;
}

__device__ inline int encode_tbq4(float* x, int dim, int block, bool quality, uint8_t* codes,
                                  uint16_t* norms) {
  int saturated = 0;
  for (int first = 0; first < dim; first += block) {
    rotate_block(x + first, block, false);
    const int at = first / block;
    saturated += block == 128 ? encode_block<4>(x + first, quality, codes + first / 2, norms + at)
                              : encode_block<2>(x + first, quality, codes + first / 2, norms + at);
  }
  return saturated;
}

__device__ inline int encode_row(const KvPlane& plane, float* x, bool quality, uint8_t* codes,
                                 uint16_t* scales) {
  if (plane.format == Format::q8) return encode_q8(x, plane.dim, codes, scales);
  if (plane.format == Format::tbq4) return encode_tbq4(x, plane.dim, plane.block, quality, codes, scales);
  for (int i = lane_id(); i < plane.dim; i += 32)
    store_element(codes, i, static_cast<int32_t>(plane.format), x[i]);
  return 0;
}

// One warp a (sequence, token, KV head, side).
__global__ void __launch_bounds__(kWarps * 32) append_kernel(const __grid_constant__ AppendParams a) {
  __shared__ float rows[kWarps][kMaxRow];
  int64_t index = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  const int sides = a.value.data != nullptr ? 2 : 1;
  const bool is_key = index % sides == 0;
  index /= sides;
  const int32_t head = static_cast<int32_t>(index % a.cache.kv_heads);
  index /= a.cache.kv_heads;
  const int64_t token = index % a.tokens, batch = index / a.tokens;
  if (batch >= a.cache.batch) return;
  const KvPlane& plane = is_key ? a.cache.key : a.cache.value;
  const DeviceRows& from = is_key ? a.key : a.value;
  float* x = rows[threadIdx.x / 32];
  const int64_t first = from.index(batch, head, token);
  for (int i = lane_id(); i < plane.stored_dim; i += 32) {
    x[i] = i < plane.dim ? load_element(from.data, first + i, a.dtype) : 0.0F;
  }
  __syncwarp();
  DeviceSequence s;
  s.batch = static_cast<int32_t>(batch);
  if (a.cache.first_position != nullptr)
    s.rule.key_begin = a.cache.first_position[batch * a.cache.first_position_stride];
  const TokenPlace place = place_of(a.cache, s, a.start[batch * a.start_stride] + token);
  const PlaneHead to = head_of(plane, head);
  const int saturated = encode_row(plane, x, a.quality, const_cast<uint8_t*>(codes_at(plane, to, place)),
                                   const_cast<uint16_t*>(scales_at(plane, to, place)));
  if (saturated > 0 && lane_id() == 0 && a.saturated != nullptr) atomicAdd(a.saturated, saturated);
}

}  // namespace

cudaError_t launch_append(const AppendParams& a, cudaStream_t stream) {
  const int64_t warps =
      static_cast<int64_t>(a.cache.batch) * a.tokens * a.cache.kv_heads * (a.value.data != nullptr ? 2 : 1);
  if (warps == 0) return cudaSuccess;
  append_kernel<<<static_cast<unsigned>((warps + kWarps - 1) / kWarps), kWarps * 32, 0, stream>>>(a);
  return cudaGetLastError();
}

}  // namespace attnspan::cuda
