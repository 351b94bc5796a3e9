#pragma once
// One thing to time: a problem in a phase, its inputs, and how much work it is.

#include <memory>
#include <string>
#include <vector>

#include "attnspan/attention.hpp"
#include "bench_timing.hpp"
#include "check/case.hpp"
#include "kv/format.hpp"

namespace attnspan::cli {

enum class BenchPhase { forward, backward, decode, append };
const char* name_of(BenchPhase phase);

struct BenchCase {
  BenchPhase phase = BenchPhase::forward;
  int64_t batch = 1;
  int64_t seqlen_q = 1024, seqlen_k = 1024;
  int64_t kv_heads = 8, group = 1;  // query heads that read one KV head
  int64_t head_dim = 128;
  DType dtype = DType::f32;
  bool cache = false;  // keys and values from a cache in `format`
  KvFormat format = KvFormat::f16;
  EncodeMode mode = EncodeMode::quality;
  bool causal = true;
  int64_t window_left = -1;
  int threads = 1;

  // "causal 4096 x 4096, 8/8 heads, 128, f32": the problem without phase and threads.
  std::string problem() const;
  // Names the case in reports: phase, problem, threads.
  std::string key() const;
};

// What a call does.
struct Work {
  double flops = 0;   // 2 (head_dim + head_dim_v) for every row, head and key that it sees; backward x 2.5
  double bytes = 0;   // of keys and values, as stored; append: of the rows written
  double values = 0;  // of keys and values
  double tokens = 0;  // decode: new tokens; append: tokens appended
};

struct CaseTiming {
  Work work;
  Timing timing;
};

// The reason why the backend does not support the problem, or where a small problem of the same kind differs
// from the reference. Empty: worth timing.
struct CaseCheck {
  std::string refused;
  std::string wrong;
};
CaseCheck check_case(const BenchCase& bench, const std::string& backend);

CaseTiming time_case(const BenchCase& bench, const std::string& backend, const Effort& effort);

}  // namespace attnspan::cli
