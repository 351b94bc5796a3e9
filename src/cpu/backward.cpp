// Backward: the kernels of every instruction set, and the driver that runs chunks of query rows over threads.

#include "core/simd_targets.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/backward.cpp"
#include <hwy/foreach_target.h>
// After foreach_target.h:
#include "cpu/backward-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace attnspan::cpu {
namespace HWY_NAMESPACE {

int64_t backward_chunk(const RowBlock& chunk, KeyGradients& sums) { return BackwardChunk(chunk, sums).run(); }
int64_t sum_key_gradients(const KeyGradientSum& sum) { return store_key_gradients(sum); }

}  // namespace HWY_NAMESPACE
}  // namespace attnspan::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

#include <cmath>

#include "core/parallel.hpp"
#include "cpu/backward.hpp"
#include "cpu/plan.hpp"

namespace attnspan::cpu {

HWY_EXPORT(backward_chunk);
HWY_EXPORT(sum_key_gradients);

namespace {

struct Item {
  KeyGradientSum* sum;
  size_t chunk;
};

// Every chunk of every (sequence, KV head); those of one sum stand together, so that few are open at a time.
std::vector<Item> items_of(std::vector<KeyGradientSum>& sums) {
  std::vector<Item> items;
  for (KeyGradientSum& sum : sums) {
    // Longest first: later rows see more keys under a causal mask.
    for (size_t chunk = sum.chunks.size(); chunk-- > 0;) items.push_back({&sum, chunk});
  }
  return items;
}

// d_sinks over sequences and chunks in their order. Returns the number of non-finite values replaced.
int64_t store_d_sinks(const Problem& problem, const std::vector<KeyGradientSum>& sums) {
  if (problem.d_sinks == nullptr) return 0;
  std::vector<double> total(static_cast<size_t>(problem.heads));
  for (const KeyGradientSum& sum : sums) {
    for (const KeyGradients& part : sum.parts) {
      for (size_t i = 0; i < part.d_sinks.size(); ++i) {
        total[static_cast<size_t>(sum.kv_head * problem.group()) + i] += part.d_sinks[i];
      }
    }
  }
  int64_t replaced = 0;
  for (size_t head = 0; head < total.size(); ++head) {
    float gradient = static_cast<float>(total[head]);
    if (problem.nan_guard && !std::isfinite(gradient)) {
      gradient = 0;
      ++replaced;
    }
    problem.d_sinks[head] = gradient;
  }
  return replaced;
}

}  // namespace

int64_t backward(const Problem& problem, const Execution& execution) {
  std::vector<KeyGradientSum> sums = plan_key_gradients(problem);
  const std::vector<Item> items = items_of(sums);
  std::atomic<int64_t> replaced{0};
  parallel_for_each(execution.threads, static_cast<int64_t>(items.size()), [&](int64_t index) {
    const Item& item = items[static_cast<size_t>(index)];
    KeyGradientSum& sum = *item.sum;
    replaced += HWY_DYNAMIC_DISPATCH(backward_chunk)(sum.chunks[item.chunk], sum.parts[item.chunk]);
    if (--sum.unfinished > 0) return;
    replaced += HWY_DYNAMIC_DISPATCH(sum_key_gradients)(sum);
    for (KeyGradients& part : sum.parts) part.release();
  });
  return replaced + store_d_sinks(problem, sums);
}

}  // namespace attnspan::cpu

#endif  // HWY_ONCE
