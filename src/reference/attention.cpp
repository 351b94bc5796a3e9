#include "reference/attention.hpp"

#include <cmath>
#include <limits>

#include "core/dtype.hpp"
#include "core/softmax_state.hpp"
#include "reference/key_value_reader.hpp"

namespace attnspan::reference {
namespace {

// Writes results in the problem's dtype; with nan_guard, non-finite ones as 0.
class Writer {
 public:
  explicit Writer(const Problem& problem) : dtype_(problem.dtype), guard_(problem.nan_guard) {}

  void store(const Rows& rows, int64_t index, double value) {
    store_f32(rows.data, index, dtype_, static_cast<float>(value));
    if (guard_ && !std::isfinite(load_f32(rows.data, index, dtype_))) {
      store_f32(rows.data, index, dtype_, 0);
      ++replaced_;
    }
  }
  void store(float* address, double value) {
    *address = static_cast<float>(value);
    if (guard_ && !std::isfinite(*address)) {
      *address = 0;
      ++replaced_;
    }
  }
  int64_t replaced() const { return replaced_; }

 private:
  DType dtype_;
  bool guard_;
  int64_t replaced_ = 0;
};

double dot(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0;
  for (size_t d = 0; d < a.size(); ++d) sum += a[d] * b[d];
  return sum;
}

// s[i,j] = softcap(softmax_scale * q.k) + bias - slope * |i + diagonal - j|, and what its derivative needs.
struct Logit {
  bool masked = true;
  double value = 0;
  double d_softcap = 1;  // d capped / d (softmax_scale * qk)
};

Logit logit(const Problem& p, const Sequence& s, int64_t head, int64_t row, int64_t key, double qk) {
  Logit result;
  double x = p.softmax_scale * qk;
  if (p.softcap != 0) {
    const double t = std::tanh(x / p.softcap);
    x = p.softcap * t;
    result.d_softcap = 1 - t * t;
  }
  if (p.bias.data != nullptr) {
    const float bias = p.bias.data[s.batch * p.bias.batch_stride + head * p.bias.head_stride +
                                   row * p.bias.row_stride + key * p.bias.key_stride];
    if (bias <= kMaskingBias) return result;
    x += bias;
  }
  if (p.alibi_slopes) {
    const double slope = p.alibi_slopes.data[s.batch * p.alibi_slopes.batch_stride + head];
    x -= slope * std::abs(static_cast<double>(row + s.rule.diagonal - key));
  }
  result.masked = false;
  result.value = x;
  return result;
}

// All logits of one row; keys outside its span stay masked.
std::vector<Logit> logits_of_row(const Problem& p, const Sequence& s, int64_t head, int64_t row,
                                 const std::vector<double>& query, const KeyValue& kv) {
  std::vector<Logit> logits(static_cast<size_t>(s.seqlen_k));
  const KeySpan span = s.rule.span(row);
  for (int64_t j = span.begin; j < span.end; ++j) {
    logits[j] = logit(p, s, head, row, j, dot(query, kv.key[j]));
  }
  return logits;
}

double lse_of_row(const Problem& p, int64_t head, const std::vector<Logit>& logits) {
  SoftmaxState<double> state;
  for (const Logit& x : logits) {
    if (!x.masked) merge(state, single_logit(x.value));
  }
  if (p.sinks != nullptr) merge(state, single_logit(static_cast<double>(p.sinks[head])));
  return state.lse();
}

double probability(const Logit& x, double lse) { return x.masked ? 0 : std::exp(x.value - lse); }

void forward_row(const Problem& p, const Sequence& s, int64_t head, int64_t row, const KeyValue& kv,
                 Writer& writer) {
  const int64_t i = s.q_row0 + row;
  const std::vector<double> query = read_row(p.query, p.query.index(s.batch, head, i), p.head_dim, p.dtype);
  const std::vector<Logit> logits = logits_of_row(p, s, head, row, query, kv);
  const double lse = lse_of_row(p, head, logits);
  std::vector<double> out(static_cast<size_t>(p.head_dim_v));
  for (int64_t j = 0; j < s.seqlen_k; ++j) {
    if (logits[j].masked) continue;
    const double probability_j = probability(logits[j], lse);
    for (int64_t d = 0; d < p.head_dim_v; ++d) out[d] += probability_j * kv.value[j][d];
  }
  for (int64_t d = 0; d < p.head_dim_v; ++d) writer.store(p.out, p.out.index(s.batch, head, i) + d, out[d]);
  if (p.lse) static_cast<float*>(p.lse.data)[p.lse.index(s.batch, head, i)] = static_cast<float>(lse);
  for (int64_t j = 0; p.probs.data != nullptr && j < p.seqlen_k; ++j) {
    p.probs.data[s.batch * p.probs.batch_stride + head * p.probs.head_stride + row * p.probs.row_stride +
                 j * p.probs.key_stride] =
        j < s.seqlen_k ? static_cast<float>(probability(logits[j], lse)) : 0.0F;
  }
}

// delta = rowsum(dout * out) - dlse
double delta_of_row(const Problem& p, const Sequence& s, int64_t head, int64_t i,
                    const std::vector<double>& dout) {
  const std::vector<double> out = read_row(p.out, p.out.index(s.batch, head, i), p.head_dim_v, p.dtype);
  double delta = dot(dout, out);
  if (p.dlse) delta -= static_cast<const float*>(p.dlse.data)[p.dlse.index(s.batch, head, i)];
  return delta;
}

struct Gradients {
  std::vector<std::vector<double>> dk, dv;  // of one KV head, summed over its query heads
};

// p = exp(s - lse), ds = p (dout.v - delta), dq += scale ds k, dk += scale ds q, dv += p dout
void backward_row(const Problem& p, const Sequence& s, int64_t head, int64_t row, const KeyValue& kv,
                  Gradients& grad, double& d_sink, Writer& writer) {
  const int64_t i = s.q_row0 + row;
  const std::vector<double> query = read_row(p.query, p.query.index(s.batch, head, i), p.head_dim, p.dtype);
  const std::vector<double> dout = read_row(p.dout, p.dout.index(s.batch, head, i), p.head_dim_v, p.dtype);
  const double lse = static_cast<const float*>(p.lse.data)[p.lse.index(s.batch, head, i)];
  const bool empty = lse == -std::numeric_limits<double>::infinity();
  std::vector<double> dq(static_cast<size_t>(p.head_dim));
  if (!empty) {
    const double delta = delta_of_row(p, s, head, i, dout);
    const std::vector<Logit> logits = logits_of_row(p, s, head, row, query, kv);
    for (int64_t j = 0; j < s.seqlen_k; ++j) {
      if (logits[j].masked) continue;
      const double probability_j = probability(logits[j], lse);
      const double ds = probability_j * (dot(dout, kv.value[j]) - delta);
      const double dx = ds * logits[j].d_softcap * p.softmax_scale;
      for (int64_t d = 0; d < p.head_dim; ++d) {
        dq[d] += dx * kv.key[j][d];
        grad.dk[j][d] += dx * query[d];
      }
      for (int64_t d = 0; d < p.head_dim_v; ++d) grad.dv[j][d] += probability_j * dout[d];
    }
    if (p.sinks != nullptr) d_sink -= std::exp(p.sinks[head] - lse) * delta;
  }
  for (int64_t d = 0; d < p.head_dim; ++d) writer.store(p.dq, p.dq.index(s.batch, head, i) + d, dq[d]);
}

void store_key_gradients(const Problem& p, const Sequence& s, int64_t kv_head, int64_t rows,
                         const Gradients& grad, Writer& writer) {
  for (int64_t j = 0; j < rows; ++j) {  // rows beyond seqused_k get zeros
    const bool exists = j < s.seqlen_k;
    for (int64_t d = 0; d < p.head_dim; ++d) {
      writer.store(p.dk, p.dk.index(s.batch, kv_head, s.k_row0 + j) + d, exists ? grad.dk[j][d] : 0);
    }
    for (int64_t d = 0; d < p.head_dim_v; ++d) {
      writer.store(p.dv, p.dv.index(s.batch, kv_head, s.k_row0 + j) + d, exists ? grad.dv[j][d] : 0);
    }
  }
}

}  // namespace

int64_t forward(const Problem& p) {
  Writer writer(p);
  for (int64_t b = 0; b < p.batch; ++b) {
    const Sequence s = sequence(p, b);
    for (int64_t kv_head = 0; kv_head < p.kv_heads; ++kv_head) {
      const KeyValue kv = read_key_value(p, s, kv_head);
      for (int64_t head = kv_head * p.group(); head < (kv_head + 1) * p.group(); ++head) {
        for (int64_t row = 0; row < s.seqlen_q; ++row) forward_row(p, s, head, row, kv, writer);
      }
    }
  }
  return writer.replaced();
}

int64_t backward(const Problem& p) {
  Writer writer(p);
  std::vector<double> d_sinks(static_cast<size_t>(p.heads));
  for (int64_t b = 0; b < p.batch; ++b) {
    const Sequence s = sequence(p, b);
    for (int64_t kv_head = 0; kv_head < p.kv_heads; ++kv_head) {
      const KeyValue kv = read_key_value(p, s, kv_head);
      Gradients grad;
      grad.dk.assign(static_cast<size_t>(s.seqlen_k), std::vector<double>(static_cast<size_t>(p.head_dim)));
      grad.dv.assign(static_cast<size_t>(s.seqlen_k), std::vector<double>(static_cast<size_t>(p.head_dim_v)));
      for (int64_t head = kv_head * p.group(); head < (kv_head + 1) * p.group(); ++head) {
        for (int64_t row = 0; row < s.seqlen_q; ++row)
          backward_row(p, s, head, row, kv, grad, d_sinks[head], writer);
      }
      store_key_gradients(p, s, kv_head, p.packed() ? s.seqlen_k : p.seqlen_k, grad, writer);
    }
  }
  for (int64_t head = 0; p.d_sinks != nullptr && head < p.heads; ++head)
    writer.store(p.d_sinks + head, d_sinks[head]);
  return writer.replaced();
}

}  // namespace attnspan::reference
