#pragma once
// How decode deals the keys of one sequence to partial states. The boundaries depend on the sequence's own
// span, the head counts and the device, never on its batchmates: a sequence gives the same bits alone and in
// any batch.

#include "core/key_span.hpp"

namespace attnspan::cuda {

inline constexpr uint32_t kSplitGrain = 64;  // boundaries are multiples of this from the span's begin

struct SplitPlan {
  int64_t keys_per_split = 0;
  int32_t splits = 0;

  ATTNSPAN_HOST_DEVICE KeySpan keys(KeySpan span, int32_t split) const {
    const int64_t begin = span.begin + split * keys_per_split;
    const int64_t end = begin + keys_per_split;
    return {begin, end < span.end ? end : span.end};
  }
};

// target: splits of one sequence that fill the device; least: keys that are worth one (both in Params).
ATTNSPAN_HOST_DEVICE SplitPlan plan_splits(int64_t keys, int32_t target, int32_t least) {
  SplitPlan plan;
  if (keys <= 0) return plan;
  const uint32_t count = static_cast<uint32_t>(keys);  // 32-bit divisions: every unit of work does these
  uint32_t size = (count + static_cast<uint32_t>(target) - 1) / static_cast<uint32_t>(target);
  if (size < static_cast<uint32_t>(least)) size = static_cast<uint32_t>(least);
  size = (size + kSplitGrain - 1) / kSplitGrain * kSplitGrain;
  plan.keys_per_split = size;
  plan.splits = static_cast<int32_t>((count + size - 1) / size);
  return plan;
}

}  // namespace attnspan::cuda
