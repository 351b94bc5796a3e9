#pragma once
// How decode deals the keys of one sequence to partial states. The boundaries depend on the sequence's own
// span, the head counts and the device, never on its batchmates: a sequence gives the same bits alone and in
// any batch.

#include "core/key_span.hpp"

namespace attnspan::cuda {

// Fewer keys than this are not worth a partial state of their own: a block takes two microseconds to start
// and to drain, in which a multiprocessor would read 128 bf16 keys and values.
inline constexpr int64_t kMinSplitKeys = 256;
inline constexpr int64_t kSplitGrain = 64;  // boundaries are multiples of this from the span's begin

struct SplitPlan {
  int64_t keys_per_split = 0;
  int32_t splits = 0;

  ATTNSPAN_HOST_DEVICE KeySpan keys(KeySpan span, int32_t split) const {
    const int64_t begin = span.begin + split * keys_per_split;
    const int64_t end = begin + keys_per_split;
    return {begin, end < span.end ? end : span.end};
  }
};

// target: splits of one sequence that fill the device (Params::split_target).
ATTNSPAN_HOST_DEVICE SplitPlan plan_splits(int64_t keys, int32_t target) {
  SplitPlan plan;
  if (keys <= 0) return plan;
  int64_t size = (keys + target - 1) / target;
  if (size < kMinSplitKeys) size = kMinSplitKeys;
  size = (size + kSplitGrain - 1) / kSplitGrain * kSplitGrain;
  plan.keys_per_split = size;
  plan.splits = static_cast<int32_t>((keys + size - 1) / size);
  return plan;
}

}  // namespace attnspan::cuda
