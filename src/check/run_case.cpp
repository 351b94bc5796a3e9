#include "check/run_case.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>

#include "check/compare.hpp"
#include "check/plain.hpp"
#include "core/dtype.hpp"
#include "core/problem.hpp"

namespace attnspan::check {
namespace {

const Execution kReference{.backend = "reference"};

// Stated accuracy of decode over quantised caches: the CPU takes tbq4 in int16 (docs/decisions/0011), CUDA
// takes queries and weights of q8 and tbq4 in 16-bit floats, as its matrix products do (0010).
double slack_of(const CaseSpec& spec, const std::string& backend) {
  const auto is = [&](KvFormat format) { return spec.k_format == format || spec.v_format == format; };
  const bool inexact = (backend == "cpu" && is(KvFormat::tbq4)) ||
                       (backend == "cuda" && (is(KvFormat::tbq4) || is(KvFormat::q8)));
  return spec.cache && inexact ? 1e-3 : 0;
}

double largest(const Tensor& t) {
  double value = 0;
  if (t.numel() == 0) return value;
  for (int64_t i = 0; i < t.numel(); ++i) {
    int64_t offset = 0, rest = i;
    for (int dim = t.rank - 1; dim >= 0; --dim) {
      offset += rest % t.shape[dim] * t.stride[dim];
      rest /= t.shape[dim];
    }
    const double x = std::abs(load_f32(static_cast<const char*>(t.data) + t.byte_offset, offset, t.dtype));
    if (std::isfinite(x)) value = std::max(value, x);
  }
  return value;
}

// ds = p (dp - delta): where one key holds all of a row's probability both are the same sum of head_dim_v
// products and cancel; f32 sums in two orders leave a few units of their random walk. Relative to a key or
// query of size 1.
double cancellation_noise(const BackwardArgs& args, const Problem& p) {
  const double sum = std::sqrt(static_cast<double>(p.head_dim_v)) * largest(args.dout) * largest(args.value);
  return 4 * 0x1p-24 * sum * p.softmax_scale;
}

template <typename Call>
double timed(Call call) {
  const auto start = std::chrono::steady_clock::now();
  call();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

void take_worst(CaseResult& result, const Comparison& c) {
  if (!c.ok && result.verdict == Verdict::pass) {
    result.verdict = Verdict::miss;
    result.message = c.message;
  }
  const double relative = c.tolerance > 0 ? c.error / c.tolerance : 0;
  if (relative >= result.error) {
    result.error = relative;
    result.plain_error = c.plain;
  }
}

void check_gaps(CaseResult& result, const char* name, const Buffer& buffer) {
  const int64_t damaged = buffer.damaged_gaps();
  if (damaged == 0 || result.verdict != Verdict::pass) return;
  result.verdict = Verdict::miss;
  result.message =
      std::string(name) + ": " + std::to_string(damaged) + " elements outside the view were written";
}

}  // namespace

CaseResult run_forward(const Case& c, const Execution& execution) {
  const Case::ForwardOutputs expected = c.forward_outputs(), plain = c.forward_outputs(),
                             found = c.forward_outputs();
  const ForwardArgs args = c.forward_args(found);
  CaseResult result;
  if (const Support support = supports(args, execution.backend); !support) {
    return {Verdict::unsupported, support.reason};
  }
  forward(c.forward_args(expected), kReference);
  plain_forward(make_problem(c.forward_args(plain)));
  result.seconds = timed([&] { forward(args, execution); });
  take_worst(result, compare("out", found.out, expected.out, plain.out, c.spec().dtype,
                             slack_of(c.spec(), execution.backend)));
  take_worst(result, compare("lse", found.lse, expected.lse, plain.lse, DType::f32,
                             slack_of(c.spec(), execution.backend)));
  check_gaps(result, "out", found.out);
  check_gaps(result, "lse", found.lse);
  return result;
}

CaseResult run_backward(const Case& c, const Execution& execution) {
  const Case::ForwardOutputs kept = c.forward_outputs();
  forward(c.forward_args(kept), kReference);
  const Case::BackwardOutputs expected = c.backward_outputs(), plain = c.backward_outputs(),
                              found = c.backward_outputs();
  const BackwardArgs args = c.backward_args(kept, found);
  CaseResult result;
  if (const Support support = supports(args, execution.backend); !support) {
    return {Verdict::unsupported, support.reason};
  }
  backward(c.backward_args(kept, expected), kReference);
  plain_backward(make_problem(c.backward_args(kept, plain)));
  result.seconds = timed([&] { backward(args, execution); });
  const DType dtype = c.spec().dtype;
  const Problem problem = make_problem(args);
  const double noise = cancellation_noise(args, problem);
  const double rows =
      std::sqrt(static_cast<double>(std::max<int64_t>(1, problem.seqlen_q * problem.group())));
  take_worst(result, compare("dq", found.dq, expected.dq, plain.dq, dtype, 0, noise * largest(args.key)));
  take_worst(result,
             compare("dk", found.dk, expected.dk, plain.dk, dtype, 0, noise * rows * largest(args.query)));
  take_worst(result, compare("dv", found.dv, expected.dv, plain.dv, dtype));
  if (c.spec().sinks) {
    take_worst(result, compare("d_sinks", found.d_sinks, expected.d_sinks, plain.d_sinks, DType::f32));
  }
  check_gaps(result, "dq", found.dq);
  check_gaps(result, "dk", found.dk);
  check_gaps(result, "dv", found.dv);
  return result;
}

}  // namespace attnspan::check
