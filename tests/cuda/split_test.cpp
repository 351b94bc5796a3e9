// How decode deals keys to splits: every key once, nothing else but the sequence's own length counts.

#include "cuda/split.hpp"

#include <gtest/gtest.h>

namespace attnspan::cuda {
namespace {

TEST(CudaSplit, EveryKeyBelongsToOneSplit) {
  for (const int32_t target : {1, 2, 33, 132, 528}) {
    for (const int64_t keys : {1, 63, 64, 127, 128, 129, 4096, 4097, 262144, 1000003}) {
      const KeySpan span{17, 17 + keys};
      const SplitPlan plan = plan_splits(keys, target, 256);
      int64_t next = span.begin;
      for (int32_t i = 0; i < plan.splits; ++i) {
        const KeySpan part = plan.keys(span, i);
        EXPECT_EQ(part.begin, next);
        EXPECT_FALSE(part.empty());
        next = part.end;
      }
      EXPECT_EQ(next, span.end) << keys << " keys, target " << target;
      EXPECT_LE(plan.splits, target);
    }
  }
}

TEST(CudaSplit, NoKeysNoSplits) { EXPECT_EQ(plan_splits(0, 132, 256).splits, 0); }

// The host sizes the scratch by min(target, keys / least rounded up) of the longest sequence.
TEST(CudaSplit, NeverMoreThanTheHostPlansFor) {
  for (const int32_t target : {1, 5, 66}) {
    for (const int32_t least : {256, 512}) {
      for (int64_t keys = 1; keys < 20000; keys += 37)
        EXPECT_LE(plan_splits(keys, target, least).splits, (keys + least - 1) / least);
    }
  }
}

}  // namespace
}  // namespace attnspan::cuda
