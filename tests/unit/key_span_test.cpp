#include "core/key_span.hpp"

#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace attnspan {
namespace {

SpanRule plain_rule(int64_t seqlen_k) {
  SpanRule rule;
  rule.key_limit = seqlen_k;
  return rule;
}

TEST(SpanRule, UnlimitedSeesEveryKey) {
  const KeySpan span = plain_rule(10).span(3);
  EXPECT_EQ(span.begin, 0);
  EXPECT_EQ(span.end, 10);
}

TEST(SpanRule, CausalEndsAtTheDiagonal) {
  SpanRule rule = plain_rule(10);
  rule.window_right = 0;
  rule.diagonal = 4;
  EXPECT_EQ(rule.span(0).end, 5);
  EXPECT_EQ(rule.span(5).end, 10);
  rule.diagonal = -3;
  EXPECT_TRUE(rule.span(2).empty());
  EXPECT_EQ(rule.span(3).size(), 1);
}

TEST(SpanRule, WindowIsInclusiveOnBothSides) {
  SpanRule rule = plain_rule(100);
  rule.window_left = 2;
  rule.window_right = 1;
  const KeySpan span = rule.span(10);
  EXPECT_EQ(span.begin, 8);
  EXPECT_EQ(span.end, 12);
}

// Against the mask written out key by key, over random rules.
TEST(SpanRule, EqualsTheExplicitMaskAndNeverGoesBack) {
  std::mt19937 random(7);
  const auto below = [&](int n) { return static_cast<int64_t>(random() % static_cast<unsigned>(n)); };
  for (int trial = 0; trial < 500; ++trial) {
    const int64_t rows = 1 + below(30), keys = below(40);
    SpanRule rule = plain_rule(keys);
    rule.diagonal = below(60) - 30;
    if (below(2) == 0) rule.window_left = below(20);
    if (below(2) == 0) rule.window_right = below(20);
    rule.key_begin = below(3) == 0 ? below(static_cast<int>(keys) + 1) : 0;
    std::vector<int32_t> start, end;
    for (int64_t i = 0, s = 0, e = 0; i < rows; ++i) {
      start.push_back(static_cast<int32_t>(s += below(3)));
      end.push_back(static_cast<int32_t>(e += below(4)));
    }
    if (below(2) == 0) rule.key_start = start.data();
    if (below(2) == 0) rule.key_end = end.data();
    KeySpan before;
    for (int64_t i = 0; i < rows; ++i) {
      const KeySpan span = rule.span(i);
      for (int64_t j = 0; j < keys; ++j) {
        const int64_t position = i + rule.diagonal;
        bool allowed =
            j >= rule.key_begin && j >= position - rule.window_left && j <= position + rule.window_right;
        if (rule.key_start != nullptr) allowed = allowed && j >= start[i];
        if (rule.key_end != nullptr) allowed = allowed && j < end[i];
        ASSERT_EQ(span.contains(j), allowed) << "row " << i << " key " << j;
      }
      if (i > 0) {
        EXPECT_GE(span.begin, before.begin);
        EXPECT_GE(span.end, before.end);
      }
      before = span;
    }
  }
}

TEST(Classify, OutsideEdgeInsideMatchTheRows) {
  std::mt19937 random(11);
  const auto below = [&](int n) { return static_cast<int64_t>(random() % static_cast<unsigned>(n)); };
  for (int trial = 0; trial < 2000; ++trial) {
    SpanRule rule = plain_rule(50);
    rule.window_left = below(30);
    rule.window_right = below(10);
    rule.diagonal = below(40) - 20;
    const int64_t row = below(20), rows = 1 + below(8), key = below(50), keys = 1 + below(8);
    int64_t visible = 0;
    for (int64_t i = row; i < row + rows; ++i) {
      for (int64_t j = key; j < key + keys; ++j) visible += rule.span(i).contains(j) ? 1 : 0;
    }
    const TileClass tile = classify(rule.hull(row, row + rows), rule.core(row, row + rows), key, key + keys);
    if (visible == rows * keys) {
      EXPECT_EQ(tile, TileClass::inside);
    } else {
      EXPECT_NE(tile, TileClass::inside);
    }
    if (tile == TileClass::outside) {
      EXPECT_EQ(visible, 0);
    }
  }
}

}  // namespace
}  // namespace attnspan
