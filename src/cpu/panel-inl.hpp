// A panel: up to kPanelRows stacked query rows, one per lane, and what a tile of keys does to their scores
// between QK^T and the softmax: transform, then mask.

#if defined(ATTNSPAN_CPU_PANEL_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef ATTNSPAN_CPU_PANEL_INL_HPP
#undef ATTNSPAN_CPU_PANEL_INL_HPP
#else
#define ATTNSPAN_CPU_PANEL_INL_HPP
#endif

#include <algorithm>

#include "cpu/kv_source.hpp"
#include "cpu/row_block.hpp"
#include "cpu/tiles-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace attnspan::cpu {
namespace HWY_NAMESPACE {

struct Panel {
  int64_t begin = 0;  // stacked rows [begin, end)
  int64_t end = 0;
  size_t vectors = 0;      // of lanes in use; the lanes beyond the last row hold zeros and are never stored
  KeySpan hull;            // keys that some row sees
  KeySpan core;            // keys that every row sees
  float* query = nullptr;  // [head_dim][width]

  Panel() = default;
  // Stacked rows [from, to) of a block, no memory yet.
  Panel(const RowBlock& block, int64_t from, int64_t to)
      : begin(from),
        end(to),
        vectors((rows() + kLanes - 1) / kLanes),
        hull(block.hull(from, to)),
        core(block.core(from, to)) {}

  size_t width() const { return vectors * kLanes; }
  size_t rows() const { return static_cast<size_t>(end - begin); }
};

// A panel and the state of its online softmax.
struct ForwardPanel : Panel {
  using Panel::Panel;
  float* out = nullptr;      // [head_dim_v][width], not yet divided by row_sum
  float* row_max = nullptr;  // [width], -inf while the row has met no key
  float* row_sum = nullptr;  // [width]
};

// Scores of one panel, stored by key: lane l of key k is data[k * stride + l].
struct Scores {
  float* HWY_RESTRICT data;
  size_t stride;

  float* at(size_t key, size_t vector) const { return data + key * stride + vector * kLanes; }
};

inline constexpr float kInfinity = std::numeric_limits<float>::infinity();

// In place; n is a whole number of vectors.
HWY_INLINE void negate(float* values, size_t n) {
  const F32 d;
  for (size_t i = 0; i < n; i += kLanes) hn::Store(hn::Neg(hn::Load(d, values + i)), d, values + i);
}

// Rows that are transposed together. Their scratch is one row of a tile each (tile_row).
inline constexpr size_t kRowsAtOnce = 4;

// The panel's rows of a tensor, transposed: to[d][lane] = row[d], zeros in lanes beyond the last row. `rows`
// is scratch of kRowsAtOnce rows of `stride` floats.
inline HWY_NOINLINE void load_transposed(const RowBlock& block, const Rows& from, size_t dim,
                                         const Panel& panel, float* HWY_RESTRICT rows, size_t stride,
                                         float* HWY_RESTRICT to) {
  const size_t width = panel.width();
  const DType dtype = block.problem->dtype;
  for (size_t first = 0; first < width; first += kRowsAtOnce) {
    const size_t count = std::min(kRowsAtOnce, width - first);
    for (size_t i = 0; i < count; ++i) {
      float* row = rows + i * stride;
      if (first + i < panel.rows()) {
        row_to_f32(block.address(from, panel.begin + static_cast<int64_t>(first + i)), dtype, dim, row);
      } else {
        std::fill_n(row, dim, 0.0F);
      }
    }
    transpose(rows, stride, count, dim, to + first, width);
  }
}

// The panel's queries, transposed, in the domain in which `keys` are stored: each row is rotated once, in
// f32. A negative softmax_scale negates them. Scratch as above; `rotated` holds one row.
HWY_INLINE void load_queries(const RowBlock& block, const KvSource& keys, const Panel& panel,
                             float* HWY_RESTRICT rows, size_t stride, float* HWY_RESTRICT rotated) {
  load_transposed(block, block.problem->query, keys.dim(), panel, rows, stride, panel.query);
  const size_t width = panel.width();
  for (size_t lane = 0; keys.rotated() && lane < panel.rows(); ++lane) {
    for (size_t i = 0; i < keys.dim(); ++i) rows[i] = panel.query[i * width + lane];
    keys.enter_domain(rows, rotated);
    for (size_t i = 0; i < keys.stored_dim(); ++i) panel.query[i * width + lane] = rotated[i];
  }
  if (keys.rotated() && panel.rows() < width) {  // the padding of a rotated row
    for (size_t i = keys.dim(); i < keys.stored_dim(); ++i) {
      std::fill(panel.query + i * width + panel.rows(), panel.query + (i + 1) * width, 0.0F);
    }
  }
  if (query_sign(*block.problem) < 0) negate(panel.query, keys.stored_dim() * width);
}

// Which keys of [key_begin, key_end) each lane sees, as lane indices relative to key_begin.
struct LaneSpans {
  HWY_ALIGN int32_t begin[kPanelRows];
  HWY_ALIGN int32_t end[kPanelRows];
};

HWY_INLINE void lane_spans(const RowBlock& block, const Panel& panel, int64_t key_begin, int64_t key_end,
                           LaneSpans& spans) {
  for (size_t lane = 0; lane < panel.width(); ++lane) {
    KeySpan span;  // empty in lanes beyond the last row
    if (lane < panel.rows()) span = block.span(panel.begin + static_cast<int64_t>(lane));
    spans.begin[lane] = static_cast<int32_t>(std::clamp(span.begin, key_begin, key_end) - key_begin);
    spans.end[lane] = static_cast<int32_t>(std::clamp(span.end, key_begin, key_end) - key_begin);
  }
}

// Scores of keys that a lane does not see become -inf: keys [from, to) of the tile, relative to its first
// key.
template <size_t kVectors>
HWY_INLINE void mask_keys(const LaneSpans& spans, int64_t from, int64_t to, Scores scores) {
  const F32 d;
  const I32 di;
  for (int64_t key = from; key < to; ++key) {
    const VecI position = hn::Set(di, static_cast<int32_t>(key));
    for (size_t v = 0; v < kVectors; ++v) {
      float* score = scores.at(static_cast<size_t>(key), v);
      const auto before_end = hn::Lt(position, hn::Load(di, spans.end + v * kLanes));
      const auto before_begin = hn::Lt(position, hn::Load(di, spans.begin + v * kLanes));
      const auto seen = hn::RebindMask(d, hn::AndNot(before_begin, before_end));
      hn::Store(hn::IfThenElse(seen, hn::Load(d, score), hn::Set(d, -kInfinity)), d, score);
    }
  }
}

// Only the keys outside the core can be unseen by a lane: nothing runs for the others.
template <size_t kVectors>
HWY_INLINE void mask(const RowBlock& block, const Panel& panel, int64_t key_begin, int64_t key_end,
                     Scores scores) {
  const int64_t inside_begin = std::clamp(panel.core.begin, key_begin, key_end);
  const int64_t inside_end = std::clamp(panel.core.end, inside_begin, key_end);
  if (inside_begin == key_begin && inside_end == key_end) return;
  LaneSpans spans;
  lane_spans(block, panel, key_begin, key_end, spans);
  mask_keys<kVectors>(spans, 0, inside_begin - key_begin, scores);
  mask_keys<kVectors>(spans, inside_end - key_begin, key_end - key_begin, scores);
}

// score = cap * tanh(scale / cap * score), or scale * score without a cap: natural logits from here on.
template <size_t kVectors>
HWY_INLINE void scale_and_cap(const Problem& problem, size_t keys, Scores scores) {
  const F32 d;
  const float scale = query_sign(problem) * problem.softmax_scale;
  const bool capped = problem.softcap != 0;
  const VecF cap = hn::Set(d, problem.softcap);
  const VecF factor = hn::Set(d, capped ? scale / problem.softcap : scale);
  for (size_t key = 0; key < keys; ++key) {
    for (size_t v = 0; v < kVectors; ++v) {
      float* score = scores.at(key, v);
      const VecF x = hn::Mul(factor, hn::Load(d, score));
      hn::Store(capped ? hn::Mul(cap, tanh(x)) : x, d, score);
    }
  }
}

// score += bias, or -inf where the bias masks.
HWY_INLINE void add_bias(const RowBlock& block, const Panel& panel, int64_t key_begin, int64_t key_end,
                         Scores scores) {
  const Bias& bias = block.problem->bias;
  for (size_t lane = 0; lane < panel.rows(); ++lane) {
    const int64_t stacked = panel.begin + static_cast<int64_t>(lane);
    const float* row = bias.data + block.sequence.batch * bias.batch_stride +
                       block.head(stacked) * bias.head_stride + block.query_row(stacked) * bias.row_stride +
                       key_begin * bias.key_stride;
    float* score = scores.data + lane;
    for (int64_t key = 0; key < key_end - key_begin; ++key, score += scores.stride) {
      const float added = row[key * bias.key_stride];
      *score = added <= kMaskingBias ? -kInfinity : *score + added;
    }
  }
}

// score -= slope * |row + diagonal - key|
template <size_t kVectors>
HWY_INLINE void add_alibi(const RowBlock& block, const Panel& panel, int64_t key_begin, int64_t key_end,
                          Scores scores) {
  const F32 d;
  const SideVector<float>& slopes = block.problem->alibi_slopes;
  HWY_ALIGN float slope[kVectors * kLanes] = {};
  HWY_ALIGN float distance[kVectors * kLanes] = {};  // from the first key of the tile
  for (size_t lane = 0; lane < panel.rows(); ++lane) {
    const int64_t stacked = panel.begin + static_cast<int64_t>(lane);
    slope[lane] = slopes.data[block.sequence.batch * slopes.batch_stride + block.head(stacked)];
    distance[lane] = static_cast<float>(block.query_row(stacked) + block.sequence.rule.diagonal - key_begin);
  }
  for (int64_t key = 0; key < key_end - key_begin; ++key) {
    const VecF position = hn::Set(d, static_cast<float>(key));
    for (size_t v = 0; v < kVectors; ++v) {
      float* score = scores.at(static_cast<size_t>(key), v);
      const VecF gap = hn::Abs(hn::Sub(hn::Load(d, distance + v * kLanes), position));
      hn::Store(hn::NegMulAdd(hn::Load(d, slope + v * kLanes), gap, hn::Load(d, score)), d, score);
    }
  }
}

// What is added to a capped score.
template <size_t kVectors>
HWY_INLINE void add_biases(const RowBlock& block, const Panel& panel, int64_t key_begin, int64_t key_end,
                           Scores scores) {
  const Problem& problem = *block.problem;
  if (problem.bias.data != nullptr) add_bias(block, panel, key_begin, key_end, scores);
  if (problem.alibi_slopes) add_alibi<kVectors>(block, panel, key_begin, key_end, scores);
}

}  // namespace HWY_NAMESPACE
}  // namespace attnspan::cpu
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
