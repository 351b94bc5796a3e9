#pragma once
// Steps of a consumer warpgroup of the Hopper forward kernel, in the order of the equations: products, masks
// and score transforms, the online softmax, the weighted sum, and storing a finished tile of rows.

#include "cuda/forward_sm90_shared.cuh"
#include "cuda/score.cuh"
#include "cuda/wgmma.cuh"

namespace attnspan::cuda {

// A tile of rows as a thread of a consumer warpgroup sees it. Lengths fit 32 bits.
struct Work {
  int32_t batch = -1, head = 0;  // batch < 0: no more
  int32_t seqlen_q = 0, seqlen_k = 0;
  int32_t row = 0;                                       // of this thread; its other row is 8 further
  int32_t begin = 0, end = 0;                            // keys that some row of the tile sees
  int32_t core_begin = 0, core_end = 0;                  // keys that all rows of this warpgroup see
  int32_t span_begin[2] = {0, 0}, span_end[2] = {0, 0};  // keys that this thread's rows see
};

__device__ __forceinline__ void load_words(uint32_t from, int32_t& a, int32_t& b) {
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(a), "=r"(b) : "r"(from) : "memory");
}
__device__ __forceinline__ void load_words(uint32_t from, int32_t& a, int32_t& b, int32_t& c, int32_t& d) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(a), "=r"(b), "=r"(c), "=r"(d)
               : "r"(from)
               : "memory");
}

// A ticket as `group` needs it. Loops run to `end`: the compiler has to know that lanes agree on it.
template <typename Tile>
__device__ __forceinline__ Work read_ticket(const Params& p, const Sm90Shared<Tile>& shared, int slot,
                                            int group) {
  Work w;
  const uint32_t from = shared.ticket(slot);
  int32_t row0, first_begin, first_end, unused;
  load_words(from, w.batch, w.head, row0, w.seqlen_q);
  load_words(from + 16, w.begin, w.end, first_begin, first_end);
  load_words(from + 48, w.seqlen_k, unused);
  load_words(from + 56 + 8 * group, w.core_begin, w.core_end);
  w.batch = uniform(w.batch);
  w.head = uniform(w.head);
  w.begin = uniform(w.begin);
  w.end = uniform(w.end);
  w.core_begin = uniform(w.core_begin);
  w.core_end = uniform(w.core_end);
  const int32_t in_tile = row_in_tile(group);
  w.row = row0 + in_tile;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int32_t below = in_tile + 8 * half, row = w.row + 8 * half;
    w.span_begin[half] = max(first_begin + below, 0);
    w.span_end[half] = first_end >= w.seqlen_k - below ? w.seqlen_k : first_end + below;
    if (row >= w.seqlen_q) {
      w.span_end[half] = 0;
    } else {
      if (p.key_start.data != nullptr)
        w.span_begin[half] =
            max(w.span_begin[half], p.key_start.data[w.batch * p.key_start.batch_stride + row]);
      if (p.key_end.data != nullptr)
        w.span_end[half] = min(w.span_end[half], p.key_end.data[w.batch * p.key_end.batch_stride + row]);
    }
  }
  return w;
}

__device__ __forceinline__ int64_t diagonal_of(const Params& p, const Work& work) {
  return p.diagonal_kind == 0   ? static_cast<int64_t>(work.seqlen_k) - work.seqlen_q
         : p.diagonal_kind == 1 ? 0
                                : p.diagonal_value;
}

// The state of a thread's two rows (lane / 4 and lane / 4 + 8 of its warp). m is in units of the scores as
// they stand in registers; `unit` turns them into powers of 2.
struct RowState {
  float m[2] = {-INFINITY, -INFINITY};
  float l[2] = {0, 0};
};

// The maximum may grow by this many powers of 2 before old results are rescaled: weights stay below 256,
// exact in f32 and no less precise in 16 bits, and most tiles need no rescaling at all.
inline constexpr float kLazyRescale = 8.0F;

// s becomes weights; true where older outputs must be multiplied by `rescale` (all lanes of a warp agree).
template <int kKeys>
__device__ __forceinline__ bool softmax_scores(float (&s)[kKeys / 2], RowState& state, float unit,
                                               float (&rescale)[2]) {
  float top[2];
  bool grows = false;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    // Two chains a row: one alone would wait for itself.
    float chain[2];
#pragma unroll
    for (int t = 0; t < kKeys / 8; ++t) {
      const float pair = fmaxf(s[4 * t + 2 * half], s[4 * t + 2 * half + 1]);
      chain[t % 2] = t < 2 ? pair : fmaxf(chain[t % 2], pair);
    }
    top[half] = fmaxf(chain[0], chain[1]);
    // With m = -inf and a finite top the difference is inf; with both -inf it is NaN: not greater.
    grows = grows || (top[half] - state.m[half]) * unit > kLazyRescale;
  }
  // Lanes of a row compare what each of them holds; they meet where one has outgrown the maximum.
  grows = __any_sync(0xffffffffU, grows);
  if (grows) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      top[half] = quad_max(top[half]);
      const float m = fmaxf(top[half], state.m[half]);
      rescale[half] = m == -INFINITY ? 1.0F : exp2_approx((state.m[half] - m) * unit);
      state.m[half] = m;
      state.l[half] *= rescale[half];
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float base = state.m[half] == -INFINITY ? 0.0F : state.m[half] * unit;
    float sum[2] = {0, 0};
#pragma unroll
    for (int t = 0; t < kKeys / 8; ++t) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& x = s[4 * t + 2 * half + e];
        x = exp2_approx(fmaf(x, unit, -base));
        sum[e] += x;
      }
    }
    state.l[half] += sum[0] + sum[1];
  }
  return grows;
}

__device__ __forceinline__ float tanh_approx(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// softcap, bias and alibi on products: s becomes logits in natural units. tanh.approx is off by 2^-11 at
// most, which is f16's own rounding.
template <int kKeys>
__device__ __forceinline__ void transform_scores(const Params& p, const Work& work, float (&s)[kKeys / 2],
                                                 int32_t key0) {
  if (p.softcap != 0) {
    const float inner = p.softmax_scale / p.softcap;
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) s[i] = p.softcap * tanh_approx(s[i] * inner);
  } else {
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) s[i] *= p.softmax_scale;
  }
  const int column = 2 * (static_cast<int>(threadIdx.x) & 3);
  if (p.alibi_slopes.data != nullptr) {
    const float slope = p.alibi_slopes.data[work.batch * p.alibi_slopes.batch_stride + work.head];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float offset = static_cast<float>(work.row + 8 * half +
                                              static_cast<int32_t>(diagonal_of(p, work)) - key0 - column);
#pragma unroll
      for (int t = 0; t < kKeys / 8; ++t) {
#pragma unroll
        for (int e = 0; e < 2; ++e)
          s[4 * t + 2 * half + e] -= slope * fabsf(offset - static_cast<float>(8 * t + e));
      }
    }
  }
  if (p.bias.data == nullptr) return;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float* bias = p.bias.data + work.batch * p.bias.batch_stride + work.head * p.bias.head_stride +
                        (work.row + 8 * half) * p.bias.row_stride + (key0 + column) * p.bias.key_stride;
    const int begin = work.span_begin[half] - key0 - column, end = work.span_end[half] - key0 - column;
#pragma unroll
    for (int t = 0; t < kKeys / 8; ++t) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (8 * t + e < begin || 8 * t + e >= end) continue;
        const float b = bias[(8 * t + e) * p.bias.key_stride];
        float& x = s[4 * t + 2 * half + e];
        x = b <= kMaskingBiasValue ? -INFINITY : x + b;
      }
    }
  }
}

// Starts s = Q K^T for this warpgroup's rows.
template <typename T, typename Tile>
__device__ __forceinline__ void start_scores(float (&s)[Tile::kKeys / 2], uint32_t query, uint32_t key) {
  const WgmmaTile a(query, 16), b(key, 16);
#pragma unroll
  for (int k = 0; k < Tile::kDepth / 16; ++k) {
    constexpr int kQueryBlock = Sm90Shared<Tile>::kRows * 128, kKeyBlock = Tile::kKeys * 128;
    const int within = k % 4 * 32;
    Wgmma<Tile::kKeys>::template keys<T>(s, a.at(k / 4 * kQueryBlock + within),
                                         b.at(k / 4 * kKeyBlock + within), k != 0);
  }
}

// Starts o += weights V.
template <typename T, typename Tile>
__device__ __forceinline__ void start_weighted_sum(float (&o)[Tile::kColumns / 2],
                                                   const uint32_t (&w)[Tile::kKeys / 4], uint32_t value,
                                                   int add) {
  const WgmmaTile b(value, Tile::kKeys * 128);
#pragma unroll
  for (int k = 0; k < Tile::kKeys / 16; ++k)
    Wgmma<Tile::kColumns>::template values<T>(o, w + 4 * k, b.at(k * 2048), k == 0 ? add : 1);
}

// Where this thread's first row of a tile goes; its other row is 8 further.
struct Destination {
  int64_t out, lse;
};
template <typename Tile>
__device__ __forceinline__ Destination read_destination(const Params& p, const Sm90Shared<Tile>& shared,
                                                        int slot, int group) {
  Destination to;
  asm volatile("ld.shared.v2.b64 {%0, %1}, [%2];"
               : "=l"(to.out), "=l"(to.lse)
               : "r"(shared.ticket(slot) + 32)
               : "memory");
  to.out += row_in_tile(group) * p.out.row_stride;
  to.lse += row_in_tile(group) * p.lse.row_stride;
  return to;
}

// The factor that normalises a row's outputs, the sink counted in; writes lse.
__device__ __forceinline__ float finish_row(const Params& p, const Work& work, const RowState& state,
                                            int half, float natural, int64_t lse) {
  float l = quad_sum(state.l[half]);
  float m = state.m[half] * natural, scale = 1;
  if (p.sinks != nullptr && p.sinks[work.head] != -INFINITY) {
    const float sink = p.sinks[work.head], top = l > 0 ? fmaxf(m, sink) : sink;
    scale = l > 0 ? expf(m - top) : 0.0F;
    l = l * scale + expf(sink - top);
    m = top;
  }
  if (p.lse.data != nullptr && (threadIdx.x & 3) == 0 && work.row + 8 * half < work.seqlen_q)
    static_cast<float*>(p.lse.data)[lse] = l > 0 ? m + __logf(l) : -INFINITY;
  return l > 0 ? __fdividef(scale, l) : 0.0F;
}

// Normalises, adds the sink, and writes out (16 bytes a lane) and lse.
template <typename T, typename Tile>
__device__ __forceinline__ void store_tile(const Params& p, const Work& work, const RowState& state,
                                           const Destination& to, const float (&o)[Tile::kColumns / 2],
                                           float natural) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const bool exists = work.row + 8 * half < work.seqlen_q;
    const float factor = finish_row(p, work, state, half, natural, to.lse + 8 * half * p.lse.row_stride);
    T* out = static_cast<T*>(p.out.data) + to.out + 8 * half * p.out.row_stride + (lane & 3) * 8;
#pragma unroll
    for (int c = 0; c < Tile::kColumns / 8; c += 4) {
      uint32_t w[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        w[i] = pack(o[4 * (c + i) + 2 * half] * factor, o[4 * (c + i) + 2 * half + 1] * factor, T{});
      if (p.nan_guard && exists) guard_words<T>(p, w, c * 8, p.head_dim_v);
      transpose_quad(w);
      if (exists && (c + (lane & 3)) * 8 < p.head_dim_v)
        *reinterpret_cast<uint4*>(out + c * 8) = make_uint4(w[0], w[1], w[2], w[3]);
    }
  }
}

// One consumer warpgroup: its turn in the ring of warpgroups that start products.
template <typename Tile>
struct Turn {
  int group;
  __device__ void wait() const { named_barrier_sync(1 + group, 256); }
  __device__ void pass() const { named_barrier_arrive(1 + (group + 1) % Tile::kWarpgroups, 256); }
};

// Rows that see no key: zeros, and the sink alone in lse.
template <typename T>
__device__ inline void store_nothing(const Params& p, const Work& work, const Destination& to) {
  const int quarter = static_cast<int>(threadIdx.x) & 3;
  for (int half = 0; half < 2; ++half) {
    if (work.row + 8 * half >= work.seqlen_q) continue;
    T* out = static_cast<T*>(p.out.data) + to.out + 8 * half * p.out.row_stride;
    for (int c = 8 * quarter; c < p.head_dim_v; c += 32)
      *reinterpret_cast<uint4*>(out + c) = make_uint4(0, 0, 0, 0);
    if (quarter == 0 && p.lse.data != nullptr) {
      static_cast<float*>(p.lse.data)[to.lse + 8 * half * p.lse.row_stride] =
          p.sinks != nullptr ? p.sinks[work.head] : -INFINITY;
    }
  }
}

}  // namespace attnspan::cuda
