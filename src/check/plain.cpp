#include "check/plain.hpp"

#include <cmath>
#include <limits>
#include <vector>

#include "core/dtype.hpp"
#include "kv/format.hpp"

namespace attnspan::check {
namespace {

struct Matrix {
  int64_t rows = 0, columns = 0;
  std::vector<float> values;

  Matrix(int64_t r, int64_t c) : rows(r), columns(c), values(static_cast<size_t>(r * c)) {}
  float* row(int64_t r) { return values.data() + r * columns; }
  const float* row(int64_t r) const { return values.data() + r * columns; }
};

// Scores beyond f16 stay in f32, as a careful user would keep them: the yardstick must be finite.
float rounded(float value, DType dtype) {
  if (dtype == DType::f32 || (dtype == DType::f16 && std::abs(value) > 65504)) return value;
  return dtype == DType::f16 ? f32_from_f16(f16_from_f32(value)) : f32_from_bf16(bf16_from_f32(value));
}

float dot(const float* a, const float* b, int64_t n) {
  float sum = 0;
  for (int64_t d = 0; d < n; ++d) sum += a[d] * b[d];
  return sum;
}

Matrix load(const Rows& rows, int64_t batch, int64_t head, int64_t row0, int64_t count, int64_t dim,
            DType dtype) {
  Matrix m(count, dim);
  for (int64_t r = 0; r < count; ++r) {
    for (int64_t d = 0; d < dim; ++d)
      m.row(r)[d] = load_f32(rows.data, rows.index(batch, head, row0 + r) + d, dtype);
  }
  return m;
}

Matrix load_keys(const Problem& p, const Sequence& s, int64_t kv_head, KvSide side) {
  const int64_t dim = side == KvSide::key ? p.head_dim : p.head_dim_v;
  if (p.cache == nullptr) {
    return load(side == KvSide::key ? p.key : p.value, s.batch, kv_head, s.k_row0, s.seqlen_k, dim, p.dtype);
  }
  Matrix m(s.seqlen_k, dim);
  for (int64_t j = s.rule.key_begin; j < s.seqlen_k; ++j)
    read_row(*p.cache, side, s.batch, kv_head, j, m.row(j));
  return m;
}

// One (sequence, head): the matrices that eager attention makes.
struct Head {
  const Problem& p;
  const Sequence& s;
  int64_t head;
  Matrix query, key, value;
  Matrix capped;  // tanh of the capped score, for its derivative
  Matrix probs;
  std::vector<float> lse;

  Head(const Problem& problem, const Sequence& seq, int64_t h)
      : p(problem),
        s(seq),
        head(h),
        query(load(p.query, s.batch, h, s.q_row0, s.seqlen_q, p.head_dim, p.dtype)),
        key(load_keys(p, s, h / p.group(), KvSide::key)),
        value(load_keys(p, s, h / p.group(), KvSide::value)),
        capped(s.seqlen_q, s.seqlen_k),
        probs(s.seqlen_q, s.seqlen_k),
        lse(static_cast<size_t>(s.seqlen_q)) {}

  bool masked(int64_t i, int64_t j) const {
    return !s.rule.span(i).contains(j) || (p.bias.data != nullptr && bias(i, j) <= kMaskingBias);
  }
  float bias(int64_t i, int64_t j) const {
    return p.bias.data[s.batch * p.bias.batch_stride + head * p.bias.head_stride + i * p.bias.row_stride +
                       j * p.bias.key_stride];
  }
  float score(int64_t i, int64_t j) {
    float x = rounded(p.softmax_scale * rounded(dot(query.row(i), key.row(j), p.head_dim), p.dtype), p.dtype);
    if (p.softcap != 0) {
      capped.row(i)[j] = rounded(std::tanh(rounded(x / p.softcap, p.dtype)), p.dtype);
      x = rounded(p.softcap * capped.row(i)[j], p.dtype);
    }
    if (p.bias.data != nullptr) x += bias(i, j);
    if (p.alibi_slopes) {
      x -= p.alibi_slopes.data[s.batch * p.alibi_slopes.batch_stride + head] *
           std::abs(static_cast<float>(i + s.rule.diagonal - j));
    }
    return rounded(x, p.dtype);
  }

  // Softmax in f32 over the scores, rounded. With `given` the lse is taken, not computed.
  void compute_probs(const float* given) {
    for (int64_t i = 0; i < s.seqlen_q; ++i) {
      std::vector<float> scores(static_cast<size_t>(s.seqlen_k));
      float m = p.sinks != nullptr ? p.sinks[head] : -std::numeric_limits<float>::infinity();
      for (int64_t j = 0; j < s.seqlen_k; ++j) {
        if (!masked(i, j)) m = std::max(m, scores[j] = score(i, j));
      }
      float sum = p.sinks != nullptr ? std::exp(p.sinks[head] - m) : 0;
      for (int64_t j = 0; j < s.seqlen_k; ++j) sum += masked(i, j) ? 0 : std::exp(scores[j] - m);
      lse[i] = sum > 0 ? m + std::log(sum) : -std::numeric_limits<float>::infinity();
      const float base = given != nullptr ? given[i] : lse[i];
      for (int64_t j = 0; j < s.seqlen_k; ++j) {
        probs.row(i)[j] = masked(i, j) ? 0 : rounded(std::exp(scores[j] - base), p.dtype);
      }
    }
  }
};

void forward_head(const Problem& p, const Sequence& s, int64_t h) {
  Head head(p, s, h);
  head.compute_probs(nullptr);
  for (int64_t i = 0; i < s.seqlen_q; ++i) {
    for (int64_t d = 0; d < p.head_dim_v; ++d) {
      float sum = 0;
      for (int64_t j = 0; j < s.seqlen_k; ++j) {
        if (!head.masked(i, j)) sum += head.probs.row(i)[j] * head.value.row(j)[d];
      }
      store_f32(p.out.data, p.out.index(s.batch, h, s.q_row0 + i) + d, p.dtype, sum);
    }
    if (p.lse) static_cast<float*>(p.lse.data)[p.lse.index(s.batch, h, s.q_row0 + i)] = head.lse[i];
  }
}

void backward_head(const Problem& p, const Sequence& s, int64_t h, Matrix& dk, Matrix& dv) {
  Head head(p, s, h);
  const Matrix out = load(p.out, s.batch, h, s.q_row0, s.seqlen_q, p.head_dim_v, p.dtype);
  const Matrix dout = load(p.dout, s.batch, h, s.q_row0, s.seqlen_q, p.head_dim_v, p.dtype);
  std::vector<float> lse;
  for (int64_t i = 0; i < s.seqlen_q; ++i) {
    lse.push_back(static_cast<const float*>(p.lse.data)[p.lse.index(s.batch, h, s.q_row0 + i)]);
  }
  head.compute_probs(lse.data());
  for (int64_t i = 0; i < s.seqlen_q; ++i) {
    float delta = dot(dout.row(i), out.row(i), p.head_dim_v);
    if (p.dlse) delta -= static_cast<const float*>(p.dlse.data)[p.dlse.index(s.batch, h, s.q_row0 + i)];
    std::vector<float> dq(static_cast<size_t>(p.head_dim));
    for (int64_t j = 0; j < s.seqlen_k; ++j) {
      if (head.masked(i, j)) continue;
      const float probability = head.probs.row(i)[j];
      const float dp = rounded(dot(dout.row(i), head.value.row(j), p.head_dim_v), p.dtype);
      float ds = rounded(probability * (dp - delta), p.dtype);
      if (p.softcap != 0) ds = rounded(ds * (1 - head.capped.row(i)[j] * head.capped.row(i)[j]), p.dtype);
      ds = rounded(ds * p.softmax_scale, p.dtype);
      for (int64_t d = 0; d < p.head_dim; ++d) {
        dq[d] += ds * head.key.row(j)[d];
        dk.row(j)[d] += ds * head.query.row(i)[d];
      }
      for (int64_t d = 0; d < p.head_dim_v; ++d) dv.row(j)[d] += probability * dout.row(i)[d];
    }
    for (int64_t d = 0; d < p.head_dim; ++d) {
      store_f32(p.dq.data, p.dq.index(s.batch, h, s.q_row0 + i) + d, p.dtype, dq[d]);
    }
    if (p.d_sinks != nullptr && delta != 0) p.d_sinks[h] -= std::exp(p.sinks[h] - lse[i]) * delta;
  }
}

void store_rows(const Rows& rows, const Sequence& s, int64_t kv_head, const Matrix& values, DType dtype) {
  for (int64_t j = 0; j < values.rows; ++j) {
    for (int64_t d = 0; d < values.columns; ++d) {
      store_f32(rows.data, rows.index(s.batch, kv_head, s.k_row0 + j) + d, dtype, values.row(j)[d]);
    }
  }
}

}  // namespace

void plain_forward(const Problem& p) {
  for (int64_t b = 0; b < p.batch; ++b) {
    const Sequence s = sequence(p, b);
    for (int64_t h = 0; h < p.heads; ++h) forward_head(p, s, h);
  }
}

void plain_backward(const Problem& p) {
  for (int64_t h = 0; p.d_sinks != nullptr && h < p.heads; ++h) p.d_sinks[h] = 0;
  for (int64_t b = 0; b < p.batch; ++b) {
    const Sequence s = sequence(p, b);
    for (int64_t kv_head = 0; kv_head < p.kv_heads; ++kv_head) {
      const int64_t rows = p.packed() ? s.seqlen_k : p.seqlen_k;  // zeros beyond seqused_k
      Matrix dk(rows, p.head_dim), dv(rows, p.head_dim_v);
      for (int64_t h = kv_head * p.group(); h < (kv_head + 1) * p.group(); ++h)
        backward_head(p, s, h, dk, dv);
      store_rows(p.dk, s, kv_head, dk, p.dtype);
      store_rows(p.dv, s, kv_head, dv, p.dtype);
    }
  }
}

}  // namespace attnspan::check
