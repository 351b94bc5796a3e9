#pragma once
// A random problem from a short description, with everything it needs in memory.

#include <memory>
#include <string>
#include <vector>

#include "attnspan/attention.hpp"
#include "check/buffer.hpp"
#include "check/cache_builder.hpp"

namespace attnspan::check {

// Which keys the rows of a sequence may see through key_start / key_end.
enum class Documents {
  none,
  starts,        // packed documents: key_start only (with causal)
  starts_ends,   // packed documents, both ends
  left_padded,   // per batch entry: a constant key_start
  right_padded,  // per batch entry: a constant key_end
};

enum class Values {
  normal,
  extreme,  // exact logits near +-2^20
};

struct CaseSpec {
  std::string name;
  int64_t batch = 2, seqlen_q = 33, seqlen_k = 33;
  int64_t heads = 4, kv_heads = 2, head_dim = 64, head_dim_v = 64;
  DType dtype = DType::f32;
  Layout layout = Layout::bshd;
  std::vector<int64_t> packed_q, packed_k;  // lengths; not empty: packed sequences
  float softmax_scale = 0, softcap = 0;
  bool causal = false;
  Diagonal diagonal;
  int64_t window_left = -1, window_right = -1;
  Documents documents = Documents::none;
  bool bias = false, masking_bias = false, alibi = false, sinks = false, seqused_k = false, dlse = false;
  Values values = Values::normal;
  // A cache instead of dense keys and values: formats and page size; page_size 0 = a dense cache
  bool cache = false;
  KvFormat k_format = KvFormat::f16, v_format = KvFormat::f16;
  int64_t page_size = 16;
  uint64_t seed = 1;
};

// The tensors of a case. Outputs are poisoned; so is every key that no row may read.
class Case {
 public:
  explicit Case(const CaseSpec& spec);
  Case(const Case&) = delete;
  Case& operator=(const Case&) = delete;

  const CaseSpec& spec() const { return spec_; }

  struct ForwardOutputs {
    Buffer out, lse;
  };
  struct BackwardOutputs {
    Buffer dq, dk, dv, d_sinks;
  };
  ForwardOutputs forward_outputs() const;
  BackwardOutputs backward_outputs() const;

  ForwardArgs forward_args(const ForwardOutputs& outputs) const;
  // `forward` are the results that backward reads.
  BackwardArgs backward_args(const ForwardOutputs& forward, const BackwardOutputs& outputs) const;

 private:
  void make_options(Random& random);
  void make_documents(Random& random);
  void make_extreme(Random& random);
  void poison_unused_keys();
  bool packed() const { return !spec_.packed_q.empty(); }
  std::vector<int64_t> rows_shape(int64_t rows, int64_t heads, int64_t dim) const;
  std::vector<int64_t> lse_shape() const;

  CaseSpec spec_;
  Buffer query_, key_, value_, dout_, dlse_;
  Buffer key_start_, key_end_, cu_seqlens_q_, cu_seqlens_k_, seqused_k_, bias_, alibi_, sinks_;
  AttentionOptions options_;
  std::unique_ptr<BuiltCache> cache_;
};

}  // namespace attnspan::check
