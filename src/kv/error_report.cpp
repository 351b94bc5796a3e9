#include "kv/error_report.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>

#include "core/dtype.hpp"
#include "core/parallel.hpp"
#include "core/problem.hpp"
#include "core/softmax_state.hpp"
#include "core/validation.hpp"
#include "kv/format.hpp"

namespace attnspan {
namespace {

// Rows of one head of one sequence, [count][dim].
struct RowSet {
  int64_t dim = 0;
  std::vector<float> values;

  int64_t count() const { return static_cast<int64_t>(values.size()) / dim; }
  const float* row(int64_t i) const { return values.data() + i * dim; }
};

RowSet read_rows(const Rows& rows, int64_t batch, int64_t head, int64_t count, int64_t dim, DType dtype) {
  RowSet set{dim, {}};
  set.values.reserve(static_cast<size_t>(count * dim));
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t d = 0; d < dim; ++d) {
      set.values.push_back(load_f32(rows.data, rows.index(batch, head, i) + d, dtype));
    }
  }
  return set;
}

RowSet through_format(const RowSet& rows, KvFormat format, EncodeMode mode) {
  const KvFormatOps& ops = ops_of(format);
  std::vector<uint8_t> codes(static_cast<size_t>(ops.row_code_bytes(rows.dim)));
  std::vector<uint16_t> scales(static_cast<size_t>(ops.row_scales(rows.dim)));
  RowSet decoded{rows.dim, std::vector<float>(rows.values.size())};
  for (int64_t i = 0; i < rows.count(); ++i) {
    ops.encode_row(rows.row(i), rows.dim, mode, codes.data(), scales.data());
    decode_row(ops, codes.data(), scales.data(), rows.dim, decoded.values.data() + i * rows.dim);
  }
  return decoded;
}

// Sums that become a normalised MSE.
struct Squares {
  double error = 0, energy = 0;

  void add(double exact, double found) {
    error += (found - exact) * (found - exact);
    energy += exact * exact;
  }
  void add(const RowSet& exact, const RowSet& found) {
    for (size_t i = 0; i < exact.values.size(); ++i) add(exact.values[i], found.values[i]);
  }
  void add(const Squares& other) {
    error += other.error;
    energy += other.energy;
  }
  double normalised() const { return energy > 0 ? error / energy : 0; }
};

struct HeadSums {
  Squares key, value, output;
  double divergence = 0;
  int64_t same_top = 0, compared_rows = 0;

  void add(const HeadSums& other) {
    key.add(other.key);
    value.add(other.value);
    output.add(other.output);
    divergence += other.divergence;
    same_top += other.same_top;
    compared_rows += other.compared_rows;
  }
  HeadError error() const {
    const double rows = compared_rows > 0 ? static_cast<double>(compared_rows) : 1;
    return {key.normalised(),
            value.normalised(),
            output.normalised(),
            divergence / rows,
            static_cast<double>(same_top) / rows,
            compared_rows};
  }
};

// Eight sums side by side, which compilers turn into vectors.
double dot(const float* a, const float* b, int64_t dim) {
  constexpr int64_t kLanes = 8;
  std::array<double, kLanes> sums{};
  int64_t d = 0;
  for (; d + kLanes <= dim; d += kLanes) {
    for (int64_t i = 0; i < kLanes; ++i) sums[i] += static_cast<double>(a[d + i]) * b[d + i];
  }
  for (; d < dim; ++d) sums[0] += static_cast<double>(a[d]) * b[d];
  return std::accumulate(sums.begin(), sums.end(), 0.0);
}

// Attention of one query row over its span.
struct RowResult {
  std::vector<double> logits;  // one per key of the span
  double lse = 0;
  int64_t top = 0;  // index in the span of the largest logit
  std::vector<double> output;
};

RowResult attend(const Problem& p, const float* query, const RowSet& key, const RowSet& value, KeySpan span) {
  RowResult result;
  result.output.assign(static_cast<size_t>(value.dim), 0);
  SoftmaxState<double> state;
  for (int64_t j = span.begin; j < span.end; ++j) {
    double logit = p.softmax_scale * dot(query, key.row(j), key.dim);
    if (p.softcap != 0) logit = p.softcap * std::tanh(logit / p.softcap);
    result.logits.push_back(logit);
    if (logit > result.logits[static_cast<size_t>(result.top)]) result.top = j - span.begin;
    merge(state, single_logit(logit));
  }
  result.lse = state.lse();
  for (int64_t j = span.begin; j < span.end; ++j) {
    const double weight = std::exp(result.logits[static_cast<size_t>(j - span.begin)] - result.lse);
    for (int64_t d = 0; d < value.dim; ++d) result.output[static_cast<size_t>(d)] += weight * value.row(j)[d];
  }
  return result;
}

double divergence(const RowResult& exact, const RowResult& found) {
  double sum = 0;
  for (size_t j = 0; j < exact.logits.size(); ++j) {
    const double log_weight = exact.logits[j] - exact.lse;
    const double weight = std::exp(log_weight);
    if (weight > 0) sum += weight * (log_weight - (found.logits[j] - found.lse));
  }
  return std::max(0.0, sum);
}

// All formats against one KV head of one sequence, for every query head that reads it: sums[format][head].
class KvHeadReport {
 public:
  KvHeadReport(const Problem& p, const ErrorReportArgs& args, const std::vector<ReportedFormat>& formats,
               int64_t batch, int64_t kv_head)
      : p_(p), sequence_(sequence(p, batch)), kv_head_(kv_head), max_rows_(args.max_rows) {
    key_ = read_rows(p.key, batch, kv_head, sequence_.seqlen_k, p.head_dim, p.dtype);
    value_ = read_rows(p.value, batch, kv_head, sequence_.seqlen_k, p.head_dim_v, p.dtype);
    for (const ReportedFormat& format : formats) {
      keys_.push_back(through_format(key_, format.key, format.mode));
      values_.push_back(through_format(value_, format.value, format.mode));
    }
  }

  void add_to(std::vector<std::vector<HeadSums>>& sums) const {
    for (int64_t g = 0; g < p_.group(); ++g) {
      const int64_t head = kv_head_ * p_.group() + g;
      for (size_t f = 0; f < keys_.size(); ++f) {
        sums[f][head].key.add(key_, keys_[f]);
        sums[f][head].value.add(value_, values_[f]);
      }
      const RowSet query =
          read_rows(p_.query, sequence_.batch, head, sequence_.seqlen_q, p_.head_dim, p_.dtype);
      const int64_t rows = std::min(query.count(), max_rows_);
      // Evenly spread, the last row (which sees the most keys) always among them.
      for (int64_t i = 1; i <= rows; ++i) add_row(query, i * query.count() / rows - 1, head, sums);
    }
  }

 private:
  void add_row(const RowSet& query, int64_t row, int64_t head,
               std::vector<std::vector<HeadSums>>& sums) const {
    const KeySpan span = sequence_.rule.span(row);
    if (span.empty()) return;
    const RowResult exact = attend(p_, query.row(row), key_, value_, span);
    for (size_t f = 0; f < keys_.size(); ++f) {
      const RowResult found = attend(p_, query.row(row), keys_[f], values_[f], span);
      HeadSums& sum = sums[f][head];
      for (size_t d = 0; d < exact.output.size(); ++d) sum.output.add(exact.output[d], found.output[d]);
      if (span.size() < 2) continue;
      sum.divergence += divergence(exact, found);
      sum.same_top += exact.top == found.top ? 1 : 0;
      ++sum.compared_rows;
    }
  }

  const Problem& p_;
  Sequence sequence_;
  int64_t kv_head_;
  int64_t max_rows_;
  RowSet key_, value_;
  std::vector<RowSet> keys_, values_;  // by format
};

Problem checked_problem(const ErrorReportArgs& args, std::vector<float>& out_memory) {
  ForwardArgs forward;
  forward.query = args.query;
  forward.key = args.key;
  forward.value = args.value;
  forward.options = args.options;
  for (const auto& [tensor, name] :
       {std::pair{args.query, "query"}, {args.key, "key"}, {args.value, "value"}}) {
    require_rank(tensor, name, 4, "batch, seqlen, heads, dim");
    require_device(tensor, name, Device::cpu);
  }
  const bool plain = !args.options.bias && !args.options.alibi_slopes && !args.options.sinks;
  require(plain, "options", "a bias, slopes or sinks", "none of them in an error report");
  require(args.max_rows >= 1, "max_rows", std::to_string(args.max_rows), "1 or more");
  // Nothing is written to it: only its shape is looked at.
  const Tensor& q = args.query;
  out_memory.resize(static_cast<size_t>(q.shape[0] * q.shape[1] * q.shape[2] * args.value.shape[3]));
  forward.out =
      contiguous(out_memory.data(), q.dtype, {q.shape[0], q.shape[1], q.shape[2], args.value.shape[3]});
  return make_problem(forward);
}

}  // namespace

std::string ReportedFormat::name() const {
  const std::string fast = mode == EncodeMode::fast ? " fast" : "";
  return name_of(key) + (key == value ? "" : std::string(" + ") + name_of(value)) + fast;
}

std::vector<FormatError> report_errors(const ErrorReportArgs& args,
                                       const std::vector<ReportedFormat>& formats) {
  std::vector<float> out_memory;
  const Problem p = checked_problem(args, out_memory);
  std::vector<std::vector<HeadSums>> sums(formats.size(),
                                          std::vector<HeadSums>(static_cast<size_t>(p.heads)));
  for (int64_t b = 0; b < p.batch; ++b) {
    // Each item owns the sums of its own query heads.
    parallel_for_each(args.threads, p.kv_heads,
                      [&](int64_t kv_head) { KvHeadReport(p, args, formats, b, kv_head).add_to(sums); });
  }
  std::vector<FormatError> report;
  for (size_t f = 0; f < formats.size(); ++f) {
    FormatError& error = report.emplace_back();
    error.format = formats[f];
    HeadSums all;
    for (const HeadSums& head : sums[f]) {
      error.heads.push_back(head.error());
      all.add(head);
    }
    error.all = all.error();
  }
  return report;
}

}  // namespace attnspan
