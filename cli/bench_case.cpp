#include "bench_case.hpp"

#include <cmath>
#include <cstring>
#include <random>

#include "attnspan/kv_cache.hpp"
#include "bench_inputs.hpp"
#include "check/run_case.hpp"
#include "core/problem.hpp"

namespace attnspan::cli {
namespace {

std::string text(int64_t value) { return std::to_string(value); }

Execution execution_of(const BenchCase& bench, const std::string& backend) {
  Execution execution;
  execution.backend = backend;
  execution.threads = bench.threads;
  return execution;
}

// Rows times keys that they see, over the batch.
double seen_pairs(const Problem& problem) {
  double pairs = 0;
  for (int64_t b = 0; b < problem.batch; ++b) {
    const Sequence s = sequence(problem, b);
    for (int64_t row = 0; row < s.seqlen_q; ++row) pairs += static_cast<double>(s.rule.span(row).size());
  }
  return pairs;
}

double stored_row_bytes(const BenchCase& bench) {
  const KvFormat format = bench.cache                 ? bench.format
                          : bench.dtype == DType::f32 ? KvFormat::f32
                                                      : KvFormat::f16;
  const KvFormatOps& ops = ops_of(format);
  return static_cast<double>(ops.row_code_bytes(bench.head_dim) + 2 * ops.row_scales(bench.head_dim));
}

Work work_of(const BenchCase& bench, const Problem& problem) {
  Work work;
  work.flops =
      seen_pairs(problem) * static_cast<double>(problem.heads * 2 * (problem.head_dim + problem.head_dim_v));
  if (bench.phase == BenchPhase::backward) work.flops *= 2.5;
  const double rows = 2.0 * static_cast<double>(bench.batch * bench.seqlen_k * bench.kv_heads);
  work.bytes = rows * stored_row_bytes(bench);
  work.values = rows * static_cast<double>(bench.head_dim);
  work.tokens = static_cast<double>(bench.batch * bench.seqlen_q);
  return work;
}

// A small problem of the same kind for the comparison with the reference.
check::CaseSpec small_case(const BenchCase& bench) {
  check::CaseSpec spec;
  spec.name = bench.key();
  spec.batch = std::min<int64_t>(bench.batch, 2);
  spec.seqlen_q = std::min<int64_t>(bench.seqlen_q, 70);
  spec.seqlen_k = std::min<int64_t>(bench.seqlen_k, bench.phase == BenchPhase::decode ? 1100 : 150);
  spec.kv_heads = std::min<int64_t>(bench.kv_heads, 2);
  spec.heads = spec.kv_heads * bench.group;
  spec.head_dim = spec.head_dim_v = bench.head_dim;
  spec.dtype = bench.dtype;
  spec.causal = bench.causal;
  spec.window_left = bench.window_left < 0 ? -1 : std::min<int64_t>(bench.window_left, 40);
  spec.cache = bench.cache;
  spec.k_format = spec.v_format = bench.format;
  spec.page_size = 64;
  return spec;
}

// The rows that an append stored, decoded: their normalised error against the appended ones.
std::string check_append(const BenchCase& bench) {
  BenchCase few = bench;
  few.seqlen_k = 40;
  const AppendInputs inputs(few);
  std::unique_ptr<KvCache> cache = inputs.make_cache();
  inputs.append(*cache);
  const int64_t width = few.kv_heads * few.head_dim;
  std::vector<float> found(static_cast<size_t>(width));
  double error = 0, energy = 0;
  for (int64_t token = 0; token < few.seqlen_k; ++token) {
    cache->read_key(0, token, found.data());
    for (int64_t i = 0; i < width; ++i) {
      const double expected = inputs.key(token * width + i);
      error += (found[static_cast<size_t>(i)] - expected) * (found[static_cast<size_t>(i)] - expected);
      energy += expected * expected;
    }
  }
  // Twice what docs/kv-formats.md gives for each format on Gaussian values.
  const double most = bench.format == KvFormat::tbq4   ? 0.02
                      : bench.format == KvFormat::q8   ? 7e-5
                      : bench.format == KvFormat::bf16 ? 1e-5
                                                       : 1e-6;
  if (error <= most * energy) return "";
  return "normalised error of the stored keys is " + std::to_string(error / energy);
}

CaseTiming time_append(const BenchCase& bench, const Effort& effort) {
  const AppendInputs inputs(bench);
  std::unique_ptr<KvCache> cache = inputs.make_cache();
  CaseTiming result;
  result.timing = measure(
      effort, [&] { inputs.append(*cache); }, [&] { cache->trim(0, 0); });
  const double rows = 2.0 * static_cast<double>(bench.seqlen_k * bench.kv_heads);
  result.work.bytes = rows * stored_row_bytes(bench);
  result.work.values = rows * static_cast<double>(bench.head_dim);
  result.work.tokens = static_cast<double>(bench.seqlen_k);
  return result;
}

}  // namespace

const char* name_of(BenchPhase phase) {
  switch (phase) {
    case BenchPhase::forward:
      return "forward";
    case BenchPhase::backward:
      return "backward";
    case BenchPhase::decode:
      return "decode";
    case BenchPhase::append:
      return "append";
  }
  return "";
}

std::string BenchCase::problem() const {
  std::string name;
  if (phase == BenchPhase::append) {
    name = text(seqlen_k) + " tokens, " + text(kv_heads) + " KV heads, " + text(head_dim);
    name += std::string(", ") + attnspan::name_of(format);
    if (format == KvFormat::tbq4) name += mode == EncodeMode::quality ? " quality" : " fast";
    return name;
  }
  if (batch > 1) name += text(batch) + " x ";
  name += text(seqlen_q) + " x " + text(seqlen_k);
  name += ", " + text(kv_heads * group) + "/" + text(kv_heads) + " heads, " + text(head_dim);
  name += std::string(", ") + attnspan::name_of(dtype);
  if (cache) name += std::string(", cache ") + attnspan::name_of(format);
  if (phase != BenchPhase::decode) name += causal ? ", causal" : ", full";
  if (window_left >= 0) name += ", window " + text(window_left + 1);
  return name;
}

std::string BenchCase::key() const {
  return std::string(name_of(phase)) + ": " + problem() + ", threads " + text(threads);
}

CaseCheck check_case(const BenchCase& bench, const std::string& backend) {
  CaseCheck result;
  if (bench.phase == BenchPhase::append) {
    result.wrong = check_append(bench);
    return result;
  }
  const check::Case small(small_case(bench));
  const Execution execution = execution_of(bench, backend);
  const check::CaseResult found = bench.phase == BenchPhase::backward ? check::run_backward(small, execution)
                                                                      : check::run_forward(small, execution);
  if (found.verdict == check::Verdict::unsupported) result.refused = found.message;
  if (found.verdict == check::Verdict::miss) result.wrong = found.message;
  return result;
}

CaseTiming time_case(const BenchCase& bench, const std::string& backend, const Effort& effort) {
  if (bench.phase == BenchPhase::append) return time_append(bench, effort);
  const Execution execution = execution_of(bench, backend);
  const AttentionInputs inputs(bench);
  CaseTiming result;
  if (bench.phase == BenchPhase::backward) {
    forward(inputs.forward_args(), execution);  // out and lse
    const BackwardArgs args = inputs.backward_args();
    result.work = work_of(bench, make_problem(args));
    result.timing = measure(effort, [&] { backward(args, execution); });
  } else {
    const ForwardArgs args = inputs.forward_args();
    result.work = work_of(bench, make_problem(args));
    result.timing = measure(effort, [&] { forward(args, execution); });
  }
  return result;
}

}  // namespace attnspan::cli
