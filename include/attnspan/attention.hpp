#pragma once
/// Exact attention: forward, backward, merge. The contract is the same on every backend.
///
///   s[i,j] = softcap(softmax_scale * query[i] . key[j]) + bias[i,j] - slope * |i + diagonal - j|
///   p[i,j] = exp(s[i,j] - lse[i])  for the keys j in the span of row i, 0 elsewhere
///   lse[i] = log(sum_j exp(s[i,j]) + exp(sink))          natural logarithm
///   out[i] = sum_j p[i,j] value[j]
///
/// Shapes: query `[batch, seqlen_q, heads, head_dim]`, key `[batch, seqlen_k, kv_heads, head_dim]`,
/// value `[batch, seqlen_k, kv_heads, head_dim_v]`, out `[batch, seqlen_q, heads, head_dim_v]`,
/// lse `[batch, heads, seqlen_q]` f32. With cu_seqlens: `[total, heads, dim]` and lse `[heads, total_q]`.
/// Query head h reads KV head h / (heads / kv_heads). A row that sees no key: out = 0, lse = -inf (with a
/// sink: the sink), gradients 0. docs/math.md derives every formula; docs/glossary.md maps the names.

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "attnspan/error.hpp"
#include "attnspan/kv_view.hpp"
#include "attnspan/tensor.hpp"

namespace attnspan {

inline constexpr int64_t kMaxHeadDim = 576;

/// Where row i sits on the key axis: at key position i + offset.
struct Diagonal {
  enum class Kind : int32_t {
    bottom_right = 0,  ///< offset = seqlen_k - seqlen_q of each sequence (FlashAttention >= 2.1)
    top_left = 1,      ///< offset = 0 (PyTorch's is_causal)
    offset = 2,        ///< any integer: chunked prefill, ring chunks
  };
  Kind kind = Kind::bottom_right;
  int64_t value = 0;

  static Diagonal bottom_right() { return {}; }
  static Diagonal top_left() { return {Kind::top_left, 0}; }
  static Diagonal at(int64_t offset) { return {Kind::offset, offset}; }
};

/// What is attended to and how scores are transformed; the same for every phase.
/// Side inputs live on the device of the query and are f32, or int32 where said so.
struct AttentionOptions {
  float softmax_scale = 0.0F;  ///< 0 = the default, 1 / sqrt(head_dim)
  float softcap = 0.0F;        ///< 0 = off; s = softcap * tanh(softmax_scale * qk / softcap)
  bool causal = false;         ///< key j allowed iff j <= i + diagonal
  Diagonal diagonal;
  int64_t window_left = -1;   ///< keys from i + diagonal - window_left on, inclusive; -1 = unlimited
  int64_t window_right = -1;  ///< keys up to i + diagonal + window_right, inclusive; -1 = unlimited
  Tensor key_start;        ///< int32 `[seqlen_q]` or `[batch, seqlen_q]`, non-decreasing along the sequence
  Tensor key_end;          ///< likewise: row i sees only keys in [key_start, key_end)
  Tensor cu_seqlens_q;     ///< int32 `[batch + 1]`: packed queries; together with cu_seqlens_k
  Tensor cu_seqlens_k;     ///< int32 `[batch + 1]`: packed keys and values
  Tensor seqused_k;        ///< int32 `[batch]`: only the first seqused_k[b] keys of sequence b exist
  Tensor bias;             ///< f32, broadcastable to `[batch, heads, seqlen_q, seqlen_k]`; <= -1e30 masks
  Tensor alibi_slopes;     ///< f32 `[heads]` or `[batch, heads]`
  Tensor sinks;            ///< f32 `[heads]`: one extra logit in the denominator
  bool nan_guard = false;  ///< replace non-finite values of out and gradients by 0 and count them
};

struct ForwardArgs {
  Tensor query;
  Tensor key;  ///< or, instead of key and value:
  Tensor value;
  const KvView* cache = nullptr;  ///< keys and values of a KV cache, dense or paged, in any KV format
  Tensor out;
  Tensor lse;    ///< optional
  Tensor probs;  ///< optional, f32 `[batch, heads, seqlen_q, seqlen_k]`: backends that keep N x N only
  AttentionOptions options;
};

/// Gradients are overwritten, not accumulated into, and bitwise the same from run to run.
/// `dlse` (f32, like lse) is the gradient of lse, needed when lse feeds a merge.
struct BackwardArgs {
  Tensor query, key, value;
  Tensor out, lse, dout;
  Tensor dlse;  ///< optional
  Tensor dq, dk, dv;
  Tensor d_sinks;  ///< optional, f32 `[heads]`; needs options.sinks
  AttentionOptions options;
};

/// Joins two attention results over disjoint sets of keys of the same queries:
///   lse = log(exp(lse_a) + exp(lse_b)),  out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b
/// Merging two empty states gives the empty state. Make partial states without sinks. out and lse may alias a
/// or b.
struct MergeArgs {
  Tensor out_a, lse_a, out_b, lse_b;
  Tensor out, lse;
};

/// How and where to run.
struct Execution {
  std::string backend = "auto";  ///< a name from list_backends(), or "auto": ATTNSPAN_BACKEND, else the first
                                 ///< that supports the problem
  int threads = 0;               ///< CPU threads; 0 = all
  void* stream = nullptr;        ///< cudaStream_t of the caller; device tensors only
  void* workspace =
      nullptr;  ///< device scratch of at least workspace_bytes(...) bytes; null = allocated inside
  size_t workspace_bytes = 0;
};

struct Result {
  std::string backend;             ///< the backend that ran
  int64_t nonfinite_replaced = 0;  ///< with nan_guard
};

/// Yes, or no with the reason in words.
struct Support {
  bool ok = true;
  std::string reason;

  explicit operator bool() const { return ok; }
  static Support yes() { return {}; }
  static Support no(std::string why) { return {false, std::move(why)}; }
};

/// Computes out, and lse and probs where given. Throws Error; on an error nothing was written.
Result forward(const ForwardArgs& args, const Execution& execution = {});
/// Computes dq, dk, dv, and d_sinks where given.
Result backward(const BackwardArgs& args, const Execution& execution = {});
Result merge_states(const MergeArgs& args, const Execution& execution = {});

inline constexpr int64_t kMaxDecodeRows = 16;

/// One decoding step: forward() for the newest 0..kMaxDecodeRows positions of each sequence over a KV cache
/// that already holds their keys. query `[batch, rows, heads, head_dim]`, out `[batch, rows, heads,
/// head_dim_v]`, lse f32 `[batch, heads, rows]` or not given. The default diagonal (bottom-right) makes the
/// last row the newest position; with more than one row set options.causal, or a tree mask as options.bias.
/// More rows are a chunk of a prefill: call forward() with args.cache.
Result decode(const Tensor& query, const KvView& cache, const Tensor& out, const Tensor& lse = {},
              const AttentionOptions& options = {}, const Execution& execution = {});

/// The answer for exactly these arguments on the named backend. Invalid arguments throw Error.
Support supports(const ForwardArgs& args, const std::string& backend);
Support supports(const BackwardArgs& args, const std::string& backend);

/// What this machine and build offer, in the order in which "auto" tries them.
struct BackendInfo {
  std::string name;
  bool available = false;
  Device device = Device::cpu;  ///< where its tensors live
  std::string description;      ///< device and instruction set; why not, if it is not available
};
std::vector<BackendInfo> list_backends();

/// Scratch bytes that a call needs on its device (0 on the CPU).
size_t workspace_bytes(const ForwardArgs& args, const Execution& execution = {});
size_t workspace_bytes(const BackwardArgs& args, const Execution& execution = {});

}  // namespace attnspan
