#pragma once
// The two sweeps of backward on Hopper. A block keeps 128 keys (or query rows), 64 a warpgroup, and a
// producer warp passes the other side by in steps:
//
//   dk, dv of keys:  s = key query^T,  dp = value dout^T,  dv += p dout,  dk += ds query   (p, ds transposed)
//   dq of rows:      s = query key^T,  dp = dout value^T,  dq += ds key
//
//   p = exp(softmax_scale s - lse),  ds = p (dp - delta),  softmax_scale once, at the end
//
// Accumulators of s and dp are the operands of the sums as they lie in registers; nothing but the tiles that
// TMA loads passes through shared memory.

#include "cuda/backward_sm90_shared.cuh"
#include "cuda/score.cuh"
#include "cuda/wgmma.cuh"

namespace attnspan::cuda {

// Starts d = a b^T: 64 rows of an own tile times all rows of a step.
template <typename T, typename Tile>
__device__ __forceinline__ void start_products(float (&d)[Tile::kStep / 2], uint32_t own, uint32_t step) {
  const WgmmaTile a(own, 16), b(step, 16);
#pragma unroll
  for (int k = 0; k < Tile::kDim / 16; ++k) {
    const int within = k % 4 * 32;
    Wgmma<Tile::kStep>::template keys<T>(d, a.at(k / 4 * (kSm90OwnRows * 128) + within),
                                         b.at(k / 4 * (Tile::kStep * 128) + within), k != 0);
  }
}

// Starts sum += w b over the rows of a step.
template <typename T, typename Tile>
__device__ __forceinline__ void start_sum(float (&sum)[Tile::kDim / 2], const uint32_t (&w)[Tile::kStep / 4],
                                          uint32_t step) {
  const WgmmaTile b(step, Tile::kStep * 128);
#pragma unroll
  for (int k = 0; k < Tile::kStep / 16; ++k)
    Wgmma<Tile::kDim>::template values<T>(sum, w + 4 * k, b.at(k * 2048), 1);
}

// Two statistics of neighbouring rows of a step: lse, delta, lse, delta.
__device__ __forceinline__ float4 load_two_stats(uint32_t from) {
  float4 x;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(from)
               : "memory");
  return x;
}

// tanh by one exponential and one reciprocal: off by 2^-22 at most.
__device__ __forceinline__ float tanh_fast(float x) {
  return 1 - __fdividef(2.0F, 1 + exp2_approx(x * (2 * kLog2e)));
}

// One consumer warpgroup.
template <typename T, typename Tile, bool kTransformed>
struct BackwardConsumer {
  static constexpr int kStep = Tile::kStep;

  const BackwardParams& b;
  const BackwardShared<Tile>& shared;
  const BackwardWork& w;
  const int group;
  Ring<Tile::kStages> ring;
  int32_t own = 0;                               // of this thread; its other one is 8 further
  int32_t span_begin[2] = {}, span_end[2] = {};  // of steps that its own rows see, or are seen by
  int32_t hull_begin = 0, hull_end = 0;          // that some row of this warpgroup does
  int32_t core_begin = 0, core_end = 0;          // that all of them do
  RowStat own_stats[2] = {};                     // dq: of this thread's rows
  float s[kStep / 2], dp[kStep / 2];
  uint32_t packed[kStep / 4];
  float sum[Tile::kDim / 2] = {};                              // dq or dk
  float value_sum[Tile::kOwnsKeys ? Tile::kDim / 2 : 2] = {};  // dv

  __device__ __forceinline__ BackwardConsumer(const BackwardParams& params,
                                              const BackwardShared<Tile>& memory, const BackwardWork& work,
                                              int index)
      : b(params), shared(memory), w(work), group(index), own(work.own0 + row_in_tile(index)) {
    const int32_t first = w.own0 + 64 * group, last = min(first + 64, w.own_limit);
    if (first < last) {
      const KeySpan top = span_of<Tile::kOwnsKeys>(w.s, first),
                    bottom = span_of<Tile::kOwnsKeys>(w.s, last - 1);
      hull_begin = uniform(narrow(top.begin));
      hull_end = uniform(narrow(bottom.end));
      core_begin = uniform(narrow(bottom.begin));
      core_end = uniform(narrow(top.end));
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (own + 8 * half >= w.own_limit) continue;
      const KeySpan span = span_of<Tile::kOwnsKeys>(w.s, own + 8 * half);
      span_begin[half] = narrow(span.begin);
      span_end[half] = narrow(span.end);
      if constexpr (!Tile::kOwnsKeys)
        own_stats[half] = b.stats[w.head * b.stat_rows + stat_row0(b.forward, w.s) + own + 8 * half];
    }
  }

  // Calls f(i, lse, delta, half, column) for the elements of s and dp in this thread.
  template <typename F>
  __device__ __forceinline__ void for_each(F f) const {
    const int column = 2 * (static_cast<int>(threadIdx.x) & 3);
    const uint32_t stats = shared.stats(ring.slot) + column * static_cast<uint32_t>(sizeof(RowStat));
#pragma unroll
    for (int t = 0; t < kStep / 8; ++t) {
      RowStat of_step[2] = {};
      if constexpr (Tile::kOwnsKeys) {
        const float4 x = load_two_stats(stats + t * 8 * static_cast<uint32_t>(sizeof(RowStat)));
        of_step[0] = {x.x, x.y};
        of_step[1] = {x.z, x.w};
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int e = 0; e < 2; ++e)
          f(4 * t + 2 * half + e, Tile::kOwnsKeys ? of_step[e] : own_stats[half], half, 8 * t + column + e);
      }
    }
  }

  // s becomes p.
  __device__ __forceinline__ void weigh(int32_t step0) {
    const float scale = b.forward.softmax_scale;
    if (step0 < core_begin || step0 + kStep > core_end) mask_scores<kStep>(s, span_begin, span_end, step0);
    for_each([&](int i, RowStat stat, int, int) {
      s[i] =
          exp2_approx(fmaf(s[i], scale, -stat.lse) * kLog2e);  // exact near lse: logits of 1e6 lose nothing
    });
  }
  // dp becomes ds.
  __device__ __forceinline__ void differentiate() {
    for_each([&](int i, RowStat stat, int, int) { dp[i] = s[i] * (dp[i] - stat.delta); });
  }
  // The same with softcap, bias and alibi, once both products are there: s becomes logits and dp - delta its
  // part of ds first.
  __device__ __forceinline__ void differentiate_transformed(int32_t head, int32_t step0) {
    const Params& p = b.forward;
    if (p.softcap != 0) {
      const float inner = p.softmax_scale / p.softcap;
      for_each([&](int i, RowStat stat, int, int) {
        const float t = tanh_fast(s[i] * inner);
        s[i] = p.softcap * t;
        dp[i] = (dp[i] - stat.delta) * (1 - t * t);
      });
    } else {
      for_each([&](int i, RowStat stat, int, int) {
        s[i] *= p.softmax_scale;
        dp[i] -= stat.delta;
      });
    }
    if (p.alibi_slopes.data != nullptr) add_alibi(head, step0);
    if (p.bias.data != nullptr) add_bias(head, step0);
    if (step0 < core_begin || step0 + kStep > core_end) mask_scores<kStep>(s, span_begin, span_end, step0);
    for_each([&](int i, RowStat stat, int, int) {
      s[i] = exp2_approx((s[i] - stat.lse) * kLog2e);
      dp[i] *= s[i];
    });
  }
  __device__ __forceinline__ void add_alibi(int32_t head, int32_t step0) {
    const DeviceVector<float>& slopes = b.forward.alibi_slopes;
    const float slope = slopes.data[w.s.batch * slopes.batch_stride + head];
    const int64_t distance = w.s.rule.diagonal + (Tile::kOwnsKeys ? step0 - own : own - step0);
    for_each([&](int i, RowStat, int half, int column) {
      const int further = Tile::kOwnsKeys ? column - 8 * half : 8 * half - column;
      s[i] -= slope * fabsf(static_cast<float>(distance) + static_cast<float>(further));
    });
  }
  __device__ __forceinline__ void add_bias(int32_t head, int32_t step0) {
    const DeviceBias& bias = b.forward.bias;
    const float* of_head = bias.data + w.s.batch * bias.batch_stride + head * bias.head_stride;
    for_each([&](int i, RowStat, int half, int column) {
      const int32_t mine = own + 8 * half, other = step0 + column;
      if (other < span_begin[half] || other >= span_end[half]) return;
      const float added = of_head[(Tile::kOwnsKeys ? other : mine) * bias.row_stride +
                                  (Tile::kOwnsKeys ? mine : other) * bias.key_stride];
      s[i] = added <= kMaskingBiasValue ? -INFINITY : s[i] + added;
    });
  }

  // One step of one query head.
  __device__ __forceinline__ void step(int32_t head, int32_t step0) {
    const uint32_t first = shared.step(ring.slot, 0), second = shared.step(ring.slot, 1);
    keep(s);
    wgmma_fence();
    start_products<T, Tile>(s, shared.own(0) + group * 64 * 128, first);
    wgmma_commit();
    keep(dp);
    start_products<T, Tile>(dp, shared.own(1) + group * 64 * 128, second);
    wgmma_commit();
    if constexpr (kTransformed) {
      wgmma_wait<0>();
      keep(s);
      keep(dp);
      differentiate_transformed(head, step0);
    } else {
      wgmma_wait<1>();
      keep(s);
      weigh(step0);
      wgmma_wait<0>();
      keep(dp);
      differentiate();
    }
    if constexpr (Tile::kOwnsKeys) {
      uint32_t weights[kStep / 4];
      pack_weights<T, kStep>(weights, s);
      keep(weights);
      keep(value_sum);
      wgmma_fence();
      start_sum<T, Tile>(value_sum, weights, second);
      wgmma_commit();
    }
    pack_weights<T, kStep>(packed, dp);
    keep(packed);
    keep(sum);
    wgmma_fence();
    start_sum<T, Tile>(sum, packed, first);
    wgmma_commit();
    wgmma_wait<0>();
    keep(sum);
    if constexpr (Tile::kOwnsKeys) keep(value_sum);
  }

  // Writes this warpgroup's rows of a gradient, 16 bytes a lane.
  __device__ __forceinline__ void store(const DeviceRows& to, int dim, const float (&x)[Tile::kDim / 2],
                                        float factor) const {
    const Params& p = b.forward;
    const int lane = static_cast<int>(threadIdx.x) & 31;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t row = own + 8 * half;
      const bool exists = row < w.own0 + w.own_rows, zero = row >= w.own_limit;
      T* out = static_cast<T*>(to.data) +
               to.index(w.s.batch, w.head, (Tile::kOwnsKeys ? w.s.k_row0 : w.s.q_row0) + row) +
               (lane & 3) * 8;
#pragma unroll
      for (int c = 0; c < Tile::kDim / 8; c += 4) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float* pair = x + 4 * (c + i) + 2 * half;
          words[i] = zero ? 0U : pack(pair[0] * factor, pair[1] * factor, T{});
        }
        if (p.nan_guard && exists) guard_words<T>(p, words, c * 8, dim);
        transpose_quad(words);
        if (exists && (c + (lane & 3)) * 8 < dim)
          *reinterpret_cast<uint4*>(out + c * 8) = make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
  }

  // All steps of all query heads.
  __device__ __forceinline__ void sweep() {
    const int32_t head0 = Tile::kOwnsKeys ? w.head * b.forward.group : w.head;
    const int32_t heads = Tile::kOwnsKeys ? b.forward.group : 1, begin = uniform(w.begin),
                  end = uniform(w.end);
    for (int32_t head = head0; head < head0 + heads; ++head) {
      for (int32_t step0 = begin; step0 < end; step0 += kStep) {
        barrier_wait(shared.full(ring.slot), ring.phase);
        if (step0 < hull_end && step0 + kStep > hull_begin) step(head, step0);
        if ((threadIdx.x & 31) == 0) barrier_arrive(shared.empty(ring.slot));
        ring.advance();
      }
    }
  }

  __device__ __forceinline__ void run() {
    const Params& p = b.forward;
    if (w.begin < w.end) barrier_wait(shared.own_full(), 0);
    sweep();
    store(Tile::kOwnsKeys ? b.dk : b.dq, p.head_dim, sum, p.softmax_scale);
    if constexpr (Tile::kOwnsKeys) store(b.dv, p.head_dim_v, value_sum, 1);
  }
};

// kTransformed: with softcap, bias or alibi. A kernel of its own: beside that code the plain loop lost an
// eighth of its speed at head dim 64.
template <typename T, typename Tile, bool kTransformed>
__global__ void __launch_bounds__(kSm90OwnRows * 2 + 128, 1)
    backward_sm90_kernel(const __grid_constant__ detail::Sm90BackwardArgs args) {
  extern __shared__ unsigned char dynamic[];
  const BackwardWork work = find_work<Tile>(args);
  // Launches overlap. The first sweep waits here for the statistics; the second one, which therefore finds
  // them, fills multiprocessors that the first leaves idle, and ends behind it.
  if constexpr (Tile::kOwnsKeys) {
    wait_for_predecessor();
    start_dependents();
  }
  if (work.own_rows > 0) {
    const BackwardShared<Tile> shared{
        static_cast<uint32_t>(uniform((shared_address(dynamic) + 1023) / 1024 * 1024))};
    if (threadIdx.x == 0) init_barriers(shared);
    __syncthreads();
    const int group = uniform(static_cast<int32_t>(threadIdx.x) / 128);
    if (group == kSm90OwnRows / 64) {
      registers_give<24>();
      if (threadIdx.x % 128 < 32) {
        BackwardProducer<Tile> producer{args, shared, work,
                                        args.b.forward.cu_seqlens_q != nullptr ? 0 : work.s.batch};
        producer.run();
      }
    } else {
      registers_take<240>();
      BackwardConsumer<T, Tile, kTransformed> consumer(args.b, shared, work, group);
      consumer.run();
    }
  }
  if constexpr (!Tile::kOwnsKeys) wait_for_predecessor();
}

namespace detail {

template <typename T, typename Tile>
cudaError_t launch_sweep(const Sm90BackwardArgs& args, cudaStream_t stream) {
  const bool transformed = is_transformed(args.b.forward) || args.b.forward.softmax_scale <= 0;
  const auto kernel =
      transformed ? backward_sm90_kernel<T, Tile, true> : backward_sm90_kernel<T, Tile, false>;
  constexpr int kBytes = BackwardShared<Tile>::kBytes;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(args.blocks));
  config.blockDim = dim3(kSm90OwnRows * 2 + 128);
  config.dynamicSmemBytes = kBytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, args);
}

template <typename T, int kDim>
cudaError_t launch_sweeps(const Sm90BackwardArgs& keys, const Sm90BackwardArgs& queries,
                          cudaStream_t stream) {
  const cudaError_t error = launch_sweep<T, Sm90KeyTile<kDim>>(keys, stream);
  return error != cudaSuccess ? error : launch_sweep<T, Sm90QueryTile<kDim>>(queries, stream);
}

template <typename T>
cudaError_t launch_backward_sm90_as(const Sm90BackwardArgs& keys, const Sm90BackwardArgs& queries, int dim,
                                    cudaStream_t stream) {
  return dim <= 64 ? launch_sweeps<T, 64>(keys, queries, stream)
                   : launch_sweeps<T, 128>(keys, queries, stream);
}

}  // namespace detail
}  // namespace attnspan::cuda
