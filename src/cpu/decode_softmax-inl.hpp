// What a tile of keys does to the scores of one query row in decode, keys along lanes: transform, mask,
// online softmax.

#if defined(ATTNSPAN_CPU_DECODE_SOFTMAX_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef ATTNSPAN_CPU_DECODE_SOFTMAX_INL_HPP
#undef ATTNSPAN_CPU_DECODE_SOFTMAX_INL_HPP
#else
#define ATTNSPAN_CPU_DECODE_SOFTMAX_INL_HPP
#endif

#include <algorithm>

#include "cpu/key_tile.hpp"
#include "cpu/row_block.hpp"
#include "cpu/simd-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace attnspan::cpu {
namespace HWY_NAMESPACE {

// Keys [begin, begin + count) of one row's scores; scores has room for kTileKeys.
struct ScoreRow {
  const RowBlock& block;
  int64_t row;  // stacked
  int64_t begin;
  size_t count;
  float* scores;
};

// score = cap * tanh(scale / cap * score), or scale * score without a cap: natural logits from here on.
HWY_INLINE void scale_and_cap_row(const ScoreRow& s) {
  const F32 d;
  const Problem& problem = *s.block.problem;
  const float scale = query_sign(problem) * problem.softmax_scale;
  const VecF cap = hn::Set(d, problem.softcap);
  const VecF factor = hn::Set(d, problem.softcap == 0 ? scale : scale / problem.softcap);
  for (size_t key = 0; key < s.count; key += kLanes) {
    const VecF scaled = hn::Mul(factor, hn::Load(d, s.scores + key));
    hn::Store(problem.softcap == 0 ? scaled : hn::Mul(cap, tanh(scaled)), d, s.scores + key);
  }
}

// score += bias, or -inf where the bias masks.
HWY_INLINE void add_bias_row(const ScoreRow& s) {
  const Bias& bias = s.block.problem->bias;
  const float* row = bias.data + s.block.sequence.batch * bias.batch_stride +
                     s.block.head(s.row) * bias.head_stride + s.block.query_row(s.row) * bias.row_stride +
                     s.begin * bias.key_stride;
  for (size_t key = 0; key < s.count; ++key) {
    const float added = row[static_cast<int64_t>(key) * bias.key_stride];
    s.scores[key] = added <= kMaskingBias ? -std::numeric_limits<float>::infinity() : s.scores[key] + added;
  }
}

// score -= slope * |row + diagonal - key|
HWY_INLINE void add_alibi_row(const ScoreRow& s) {
  const F32 d;
  const SideVector<float>& slopes = s.block.problem->alibi_slopes;
  const VecF slope =
      hn::Set(d, slopes.data[s.block.sequence.batch * slopes.batch_stride + s.block.head(s.row)]);
  const int64_t distance = s.block.query_row(s.row) + s.block.sequence.rule.diagonal - s.begin;
  for (size_t key = 0; key < s.count; key += kLanes) {
    const VecF gap =
        hn::Abs(hn::Sub(hn::Set(d, static_cast<float>(distance)), hn::Iota(d, static_cast<float>(key))));
    hn::Store(hn::NegMulAdd(slope, gap, hn::Load(d, s.scores + key)), d, s.scores + key);
  }
}

HWY_INLINE void transform_row(const ScoreRow& s) {
  const Problem& problem = *s.block.problem;
  if (!problem.has_score_transform()) return;
  scale_and_cap_row(s);
  if (problem.bias.data != nullptr) add_bias_row(s);
  if (problem.alibi_slopes) add_alibi_row(s);
}

// Keys outside the row's span become -inf, and so do the lanes beyond the last key.
HWY_INLINE void mask_row(const ScoreRow& s) {
  constexpr float kMasked = -std::numeric_limits<float>::infinity();
  const KeySpan span = s.block.span(s.row);
  const int64_t count = static_cast<int64_t>(s.count);
  const int64_t from = std::clamp<int64_t>(span.begin - s.begin, 0, count);
  const int64_t to = std::clamp<int64_t>(span.end - s.begin, from, count);
  const int64_t padded = (count + static_cast<int64_t>(kLanes) - 1) / static_cast<int64_t>(kLanes) *
                         static_cast<int64_t>(kLanes);
  std::fill(s.scores, s.scores + from, kMasked);
  std::fill(s.scores + to, s.scores + padded, kMasked);
}

// scores become p = exp(score - row_max), 0 in masked lanes; row_max and row_sum move to the new maximum.
// Returns the factor by which the row's sums move.
HWY_INLINE float online_softmax_row(const ScoreRow& s, float& row_max, float& row_sum) {
  const F32 d;
  const float unit = score_unit(*s.block.problem) * kLog2E;
  const VecF scale = hn::Set(d, unit), floor = hn::Set(d, -126.0F / unit);
  VecF largest = hn::Set(d, row_max);
  for (size_t key = 0; key < s.count; key += kLanes) {
    largest = hn::Max(largest, hn::Load(d, s.scores + key));
  }
  const float maximum = hn::GetLane(hn::MaxOfLanes(d, largest));
  // A row that has met no key has only scores of -inf: against 0 they all become p = 0.
  const VecF base = hn::Set(d, maximum == -std::numeric_limits<float>::infinity() ? 0.0F : maximum);
  VecF sum = hn::Zero(d);
  for (size_t key = 0; key < s.count; key += kLanes) {
    const VecF p = exp2_scaled(hn::Sub(hn::Load(d, s.scores + key), base), scale, floor);
    hn::Store(p, d, s.scores + key);
    sum = hn::Add(sum, p);
  }
  const float factor = hn::GetLane(exp2_scaled(hn::Sub(hn::Set(d, row_max), base), scale, floor));
  row_sum = row_sum * factor + hn::GetLane(hn::SumOfLanes(d, sum));
  row_max = maximum;
  return factor;
}

}  // namespace HWY_NAMESPACE
}  // namespace attnspan::cpu
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
