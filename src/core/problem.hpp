#pragma once
// The one description of a call that backends see: validated, defaults filled in, tensors as base address and
// strides. make_problem() turns the public arguments into it or throws Error.

#include <cstdint>

#include "attnspan/attention.hpp"
#include "core/key_span.hpp"

namespace attnspan {

enum class Phase { forward, backward };

// A tensor indexed by (batch, head, row), last dimension contiguous. Packed tensors have batch stride 0; the
// sequence's first row is added by the caller (Sequence::q_row0, k_row0).
struct Rows {
  void* data = nullptr;      // null: not given
  int64_t byte_offset = 0;   // non-zero only where `data` is a handle (WebGPU, Metal)
  int64_t batch_stride = 0;  // in elements
  int64_t head_stride = 0;
  int64_t row_stride = 0;

  explicit operator bool() const { return data != nullptr; }
  int64_t index(int64_t batch, int64_t head, int64_t row) const {
    return batch * batch_stride + head * head_stride + row * row_stride;
  }
};

// A side input of the contract. Strides of broadcast dimensions are 0.
struct Bias {
  const float* data = nullptr;
  int64_t byte_offset = 0;
  int64_t batch_stride = 0, head_stride = 0, row_stride = 0, key_stride = 0;
};

// A contiguous int32 or f32 vector: one per batch entry (batch_stride != 0) or shared.
template <typename T>
struct SideVector {
  const T* data = nullptr;
  int64_t byte_offset = 0;
  int64_t batch_stride = 0;

  explicit operator bool() const { return data != nullptr; }
};

// Logits at or below this in the bias mask their key.
inline constexpr float kMaskingBias = -1e30F;

struct Problem {
  Phase phase = Phase::forward;
  Device device = Device::cpu;
  DType dtype = DType::f32;

  int64_t batch = 0;
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  int64_t head_dim_v = 0;
  int64_t seqlen_q = 0;  // of every sequence; packed: total_q, an upper bound
  int64_t seqlen_k = 0;  // likewise; cache: max_seqlen

  float softmax_scale = 1;
  float softcap = 0;

  Diagonal diagonal;
  int64_t window_left = kUnlimited;
  int64_t window_right = kUnlimited;  // causal is folded in: min(window_right, 0)
  SideVector<int32_t> key_start, key_end;
  const int32_t* cu_seqlens_q = nullptr;
  const int32_t* cu_seqlens_k = nullptr;
  const int32_t* seqused_k = nullptr;
  Bias bias;
  SideVector<float> alibi_slopes;
  const float* sinks = nullptr;

  // Forward reads query and key, value (or cache) and writes out, lse, probs. Backward reads all but probs.
  Rows query, key, value, out;
  const KvView* cache = nullptr;
  Rows lse;  // f32; row stride is over rows of the sequence
  struct Probs {
    float* data = nullptr;
    int64_t batch_stride = 0, head_stride = 0, row_stride = 0, key_stride = 0;
  } probs;
  Rows dout, dq, dk, dv;
  Rows dlse;
  float* d_sinks = nullptr;

  bool nan_guard = false;

  int64_t group() const { return heads / kv_heads; }  // query heads that read one KV head
  bool packed() const { return cu_seqlens_q != nullptr; }
  bool has_score_transform() const {
    return softcap != 0 || bias.data != nullptr || alibi_slopes.data != nullptr;
  }
};

// One sequence of the batch. For host memory; device kernels do the same from the same arrays.
struct Sequence {
  int64_t batch = 0;   // index into the batch (packed tensors have batch stride 0)
  int64_t q_row0 = 0;  // first row in query-side tensors
  int64_t k_row0 = 0;  // first row in key-side tensors
  int64_t seqlen_q = 0;
  int64_t seqlen_k = 0;
  SpanRule rule;  // rows are relative to q_row0, keys to k_row0
};
Sequence sequence(const Problem& problem, int64_t batch);

// offset of the diagonal for one sequence
inline int64_t diagonal_offset(const Diagonal& diagonal, int64_t seqlen_q, int64_t seqlen_k) {
  if (diagonal.kind == Diagonal::Kind::bottom_right) return seqlen_k - seqlen_q;
  return diagonal.kind == Diagonal::Kind::top_left ? 0 : diagonal.value;
}

Problem make_problem(const ForwardArgs& args);
Problem make_problem(const BackwardArgs& args);

}  // namespace attnspan
