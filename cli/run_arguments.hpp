#pragma once
// What `attnspan run` is asked for.

#include <CLI/CLI.hpp>
#include <optional>
#include <string>
#include <vector>

#include "attnspan/attention.hpp"
#include "io/tensor_file.hpp"

namespace attnspan::cli {

// A tensor flag: how the library calls the argument, how the command does, and what was given.
struct TensorFlag {
  const char* argument;  // "key"
  const char* flag;      // "--k"
  const char* description;
  std::optional<io::TensorAddress> address = {};

  explicit operator bool() const { return address.has_value(); }
  std::string text() const;  // "--k model.safetensors:key", for messages
};

struct RunArguments {
  // inputs
  TensorFlag query{"query", "--q", "query [batch, seqlen_q, heads, head_dim]"};
  TensorFlag key{"key", "--k", "key [batch, seqlen_k, kv_heads, head_dim]"};
  TensorFlag value{"value", "--v", "value [batch, seqlen_k, kv_heads, head_dim_v]"};
  TensorFlag cu_seqlens_q{"cu_seqlens_q", "--cu-seqlens-q",
                          "int32 [batch + 1]: queries are packed, [total, heads, dim]"};
  TensorFlag cu_seqlens_k{"cu_seqlens_k", "--cu-seqlens-k", "the same for keys and values"};
  TensorFlag seqused_k{"seqused_k", "--seqused-k", "int32 [batch]: only so many keys of each sequence exist"};
  TensorFlag key_start{"key_start", "--key-start",
                       "int32 [seqlen_q] or [batch, seqlen_q]: first key that a row sees"};
  TensorFlag key_end{"key_end", "--key-end", "likewise: one past the last key that a row sees"};
  TensorFlag bias{"bias", "--bias",
                  "f32, broadcastable to [batch, heads, seqlen_q, seqlen_k]; -1e30 or less masks"};
  TensorFlag alibi{"alibi_slopes", "--alibi", "f32 [heads] or [batch, heads]: slopes"};
  TensorFlag sinks{"sinks", "--sinks", "f32 [heads]: one extra logit in the denominator"};
  TensorFlag dout{"dout", "--dout", "gradient of out: computes gradients too"};
  TensorFlag dlse{"dlse", "--dlse", "gradient of lse, f32"};
  // outputs
  TensorFlag out{"out", "--out", "attention, like query with head_dim_v"};
  TensorFlag lse{"lse", "--lse", "natural log of the softmax denominator, f32 [batch, heads, seqlen_q]"};
  TensorFlag probs{"probs", "--probs",
                   "probabilities, f32 [batch, heads, seqlen_q, seqlen_k] (reference backend)"};
  TensorFlag dq{"dq", "--dq", "gradient of query"};
  TensorFlag dk{"dk", "--dk", "gradient of key"};
  TensorFlag dv{"dv", "--dv", "gradient of value"};
  TensorFlag d_sinks{"d_sinks", "--d-sinks", "gradient of sinks, f32 [heads]"};

  std::string layout = "bshd";
  AttentionOptions options;        // without its tensors
  std::string k_format, v_format;  // a cache in these formats instead of the tensors; empty: none
  std::string backend = "auto";
  int64_t threads = 0;
  bool json = false;

  bool backward() const { return static_cast<bool>(dout); }
  bool cached() const { return !k_format.empty() || !v_format.empty(); }
  std::vector<TensorFlag*> inputs();
  std::vector<TensorFlag*> outputs();
  std::vector<TensorFlag*> flags();
};

// --causal, --diagonal and --window; --softcap and --scale. `options` must live as long as `app` parses.
void declare_mask(CLI::App& app, AttentionOptions& options);
void declare_scores(CLI::App& app, AttentionOptions& options);
// Declares the flags on `app`; `arguments` must live as long.
void declare(CLI::App& app, RunArguments& arguments);
// What cannot be said flag by flag: combinations. Throws Error.
void check_combinations(RunArguments& arguments);

}  // namespace attnspan::cli
