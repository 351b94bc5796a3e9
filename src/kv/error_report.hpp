#pragma once
// What a KV format does to given queries, keys and values: the error of the rows, of the attention over them,
// and of the attention weights.

#include <cstdint>
#include <string>
#include <vector>

#include "attnspan/attention.hpp"
#include "attnspan/kv_view.hpp"

namespace attnspan {

struct ReportedFormat {
  KvFormat key = KvFormat::f16, value = KvFormat::f16;
  EncodeMode mode = EncodeMode::quality;

  std::string name() const;  // "q8 + tbq4", "tbq4 fast"
};

// Of one query head, or of all. Normalised errors are sums of squared errors over sums of squares.
struct HeadError {
  double key = 0;  // normalised MSE of the rows of its KV head
  double value = 0;
  double output = 0;          // normalised MSE of the attention output
  double divergence = 0;      // mean over query rows of KL(exact weights || weights), in nats
  double same_top = 0;        // share of query rows whose largest weight falls on the same key
  int64_t compared_rows = 0;  // that see two keys or more: what divergence and same_top average over
};

struct FormatError {
  ReportedFormat format;
  std::vector<HeadError> heads;
  HeadError all;
};

struct ErrorReportArgs {
  Tensor query, key, value;  // as in ForwardArgs, on the host; no caches, nothing packed
  AttentionOptions options;
  int64_t max_rows = 512;  // query rows of a sequence that are looked at, evenly spread
  int threads = 0;
};

// Everything is computed in f64 from the given values and from what each format decodes to.
std::vector<FormatError> report_errors(const ErrorReportArgs& args,
                                       const std::vector<ReportedFormat>& formats);

}  // namespace attnspan
