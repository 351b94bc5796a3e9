#pragma once
// The state (m, l, o) of the online softmax and its merge (docs/math.md): prefill tiles, KV splits, shared
// prefixes and merge_states all use the same rule. An empty state has l == 0, whatever its m says: emptiness
// is a fact about the key span, never a sentinel logit.

#include <cmath>
#include <limits>

namespace attnspan {

template <typename Real>
struct SoftmaxState {
  Real m = 0;  // running maximum of the logits; meaningless while l == 0
  Real l = 0;  // sum of exp(logit - m)

  bool empty() const { return l == 0; }
  // log of the sum of exp(logit); -inf for the empty state
  Real lse() const { return empty() ? -std::numeric_limits<Real>::infinity() : m + std::log(l); }
};

// Factors by which the outputs o_a and o_b of two states are scaled in the merged one.
template <typename Real>
struct MergeWeights {
  Real a = 1;
  Real b = 1;
};

template <typename Real>
MergeWeights<Real> merge(SoftmaxState<Real>& a, const SoftmaxState<Real>& b) {
  if (b.empty()) return {1, 0};
  if (a.empty()) {
    a = b;
    return {0, 1};
  }
  const Real m = a.m > b.m ? a.m : b.m;
  const MergeWeights<Real> weights{std::exp(a.m - m), std::exp(b.m - m)};
  a = {m, a.l * weights.a + b.l * weights.b};
  return weights;
}

// The state made of one logit alone, as a sink is: m = logit, l = 1, o = 0. A sink of -inf is no sink.
template <typename Real>
SoftmaxState<Real> single_logit(Real logit) {
  if (logit == -std::numeric_limits<Real>::infinity()) return {};
  return {logit, Real{1}};
}

}  // namespace attnspan
