// Backward over one chunk of query rows. For every block of rows and every tile of keys that a row of the
// block sees, with s, p and dp stored by key and rows along lanes (gemm-inl.hpp):
//   s^T  = K Q^T            p  = exp(unit * s - lse)
//   dp^T = V dO^T           ds = p * (dp - delta) * d softcap
//   dv  += p^T dO,  dk += ds^T Q,  dq^T += K^T ds^T
// Five products. dq is complete when the block has passed its keys; dk and dv gather in the chunk's own sums.
// softmax_scale multiplies dq and dk once, where they are stored.

#if defined(ATTNSPAN_CPU_BACKWARD_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef ATTNSPAN_CPU_BACKWARD_INL_HPP
#undef ATTNSPAN_CPU_BACKWARD_INL_HPP
#else
#define ATTNSPAN_CPU_BACKWARD_INL_HPP
#endif

#include <cmath>

#include "cpu/epilogue-inl.hpp"
#include "cpu/gemm-inl.hpp"
#include "cpu/key_gradients.hpp"
#include "cpu/loader-inl.hpp"
#include "cpu/panel-inl.hpp"
#include "cpu/scratch.hpp"

HWY_BEFORE_NAMESPACE();
namespace attnspan::cpu {
namespace HWY_NAMESPACE {

// A panel of a block, with what backward needs of its rows.
struct BackwardPanel : Panel {
  using Panel::Panel;
  float* dout = nullptr;   // [head_dim_v][width]
  float* dq = nullptr;     // [head_dim][width]
  float* lse = nullptr;    // [width]; +inf where p is 0 whatever the score: rows and lanes without keys
  float* delta = nullptr;  // [width] rowsum(dout * out) - dlse
  size_t column = 0;       // of its first lane in the block's matrices
};

class BackwardChunk {
 public:
  BackwardChunk(const RowBlock& chunk, KeyGradients& sums)
      : chunk_(chunk),
        problem_(*chunk.problem),
        key_source_(KvSource::keys(problem_, chunk.sequence, chunk.kv_head)),
        value_source_(KvSource::values(problem_, chunk.sequence, chunk.kv_head)),
        head_dim_(key_source_.dim()),
        head_dim_v_(value_source_.dim()),
        key_row_(tile_row(head_dim_)),
        value_row_(tile_row(head_dim_v_)),
        row_stride_(std::max(key_row_, value_row_)),
        sums_(sums) {}

  // Returns the number of non-finite values replaced in dq.
  int64_t run() {
    allocate();
    int64_t replaced = 0;
    for (int64_t begin = chunk_.begin; begin < chunk_.end; begin += kBackwardRows) {
      RowBlock block = chunk_;
      block.begin = begin;
      block.end = std::min(begin + static_cast<int64_t>(kBackwardRows), chunk_.end);
      replaced += run_block(block);
    }
    return replaced;
  }

 private:
  static constexpr size_t kPanels = kBackwardRows / kPanelRows;

  void allocate() {
    const KeySpan hull = chunk_.begin < chunk_.end ? chunk_.hull(chunk_.begin, chunk_.end) : KeySpan{};
    sums_.allocate(hull.empty() ? KeySpan{} : hull, key_row_, value_row_);
    sums_.d_sinks.assign(static_cast<size_t>(problem_.group()), 0.0);
    const size_t score = kBackwardKeys * kBackwardRows;
    const bool capped = problem_.softcap != 0;
    Scratch& scratch = Scratch::of_thread();
    scratch.begin(kBackwardKeys * (key_row_ + value_row_) + (capped ? 3 : 2) * score +
                  kBackwardRows * (key_row_ + value_row_ + 2 * head_dim_ + head_dim_v_ + 2) +
                  kPanelRows * head_dim_v_ + kRowsAtOnce * row_stride_ + 16 * 14);
    keys_ = scratch.take(kBackwardKeys * key_row_);
    values_ = scratch.take(kBackwardKeys * value_row_);
    p_ = scratch.take(score);
    ds_ = scratch.take(score);
    if (capped) d_softcap_ = scratch.take(score);
    query_ = scratch.take(kBackwardRows * key_row_);
    dout_ = scratch.take(kBackwardRows * value_row_);
    query_columns_ = scratch.take(kBackwardRows * head_dim_);
    dout_columns_ = scratch.take(kBackwardRows * head_dim_v_);
    dq_columns_ = scratch.take(kBackwardRows * head_dim_);
    out_columns_ = scratch.take(kPanelRows * head_dim_v_);
    lse_ = scratch.take(kBackwardRows);
    delta_ = scratch.take(kBackwardRows);
    rows_ = scratch.take(kRowsAtOnce * row_stride_);
  }

  int64_t run_block(const RowBlock& block) {
    load_block(block);
    const KeySpan hull = block.hull(block.begin, block.end);
    if (!hull.empty()) {
      constexpr int64_t kKeys = kBackwardKeys;
      for (int64_t key = hull.begin / kKeys * kKeys; key < hull.end; key += kKeys) {
        visit(block, std::max(key, hull.begin), std::min(key + kKeys, hull.end));
      }
    }
    return store_dq(block);
  }

  // Rows of query and dout as they are, for dk and dv, and transposed by panel, for s and dp.
  void load_block(const RowBlock& block) {
    panel_count_ = 0;
    for (int64_t begin = block.begin; begin < block.end; begin += kPanelRows) {
      const int64_t end = std::min(begin + static_cast<int64_t>(kPanelRows), block.end);
      const size_t column = static_cast<size_t>(begin - block.begin);
      BackwardPanel& panel = panels_[panel_count_++] = BackwardPanel(block, begin, end);
      panel.column = column;
      panel.query = query_columns_ + column * head_dim_;
      panel.dout = dout_columns_ + column * head_dim_v_;
      panel.dq = dq_columns_ + column * head_dim_;
      panel.lse = lse_ + column;
      panel.delta = delta_ + column;
      std::fill(panel.dq, panel.dq + head_dim_ * panel.width(), 0.0F);
      load_both(block, panel, problem_.query, head_dim_, query_ + column * key_row_, key_row_, panel.query);
      load_both(block, panel, problem_.dout, head_dim_v_, dout_ + column * value_row_, value_row_,
                panel.dout);
      if (query_sign(problem_) < 0) negate(panel.query, head_dim_ * panel.width());
      load_states(block, panel);
    }
  }

  // The panel's rows of a tensor to `rows`, and transposed to `columns`; zeros in lanes beyond the last row.
  void load_both(const RowBlock& block, const Panel& panel, const Rows& from, size_t dim,
                 float* HWY_RESTRICT rows, size_t stride, float* HWY_RESTRICT columns) {
    const size_t width = panel.width();
    for (size_t lane = 0; lane < width; ++lane) {
      float* row = rows + lane * stride;
      if (lane < panel.rows()) {
        row_to_f32(block.address(from, panel.begin + static_cast<int64_t>(lane)), problem_.dtype, dim, row);
      } else {
        std::fill_n(row, dim, 0.0F);
      }
    }
    transpose(rows, stride, width, dim, columns, width);
  }

  // delta = rowsum(dout * out) - dlse, summed in the order in which dp is: a row that sees one key has ds = 0
  // exactly.
  void load_delta(const RowBlock& block, const BackwardPanel& panel) {
    const F32 d;
    load_transposed(block, problem_.out, head_dim_v_, panel, rows_, row_stride_, out_columns_);
    for (size_t v = 0; v < panel.vectors; ++v) {
      VecF delta = hn::Zero(d);
      for (size_t i = 0; i < head_dim_v_; ++i) {
        const size_t at = i * panel.width() + v * kLanes;
        delta = hn::MulAdd(hn::Load(d, out_columns_ + at), hn::Load(d, panel.dout + at), delta);
      }
      hn::Store(delta, d, panel.delta + v * kLanes);
    }
    if (!problem_.dlse) return;
    for (size_t lane = 0; lane < panel.rows(); ++lane) {
      const int64_t stacked = panel.begin + static_cast<int64_t>(lane);
      panel.delta[lane] -= static_cast<const float*>(problem_.dlse.data)[block.index(problem_.dlse, stacked)];
    }
  }

  // lse and delta of each row, and the row's share of the gradient of its head's sink.
  void load_states(const RowBlock& block, const BackwardPanel& panel) {
    load_delta(block, panel);
    for (size_t lane = 0; lane < panel.width(); ++lane) {
      const int64_t stacked = panel.begin + static_cast<int64_t>(lane);
      const bool exists = lane < panel.rows();
      const float lse = exists
                            ? static_cast<const float*>(problem_.lse.data)[block.index(problem_.lse, stacked)]
                            : -kInfinity;
      if (lse == -kInfinity) {  // the row sees no key: no gradient
        panel.lse[lane] = kInfinity;
        panel.delta[lane] = 0;
        continue;
      }
      panel.lse[lane] = lse;
      if (problem_.sinks != nullptr) {
        const double p = std::exp(static_cast<double>(problem_.sinks[block.head(stacked)]) - lse);
        sums_.d_sinks[static_cast<size_t>(stacked % problem_.group())] -= p * panel.delta[lane];
      }
    }
  }

  // One block against keys [key_begin, key_end).
  void visit(const RowBlock& block, int64_t key_begin, int64_t key_end) {
    load_tile(key_source_, key_begin, key_end, keys_, key_row_);
    load_tile(value_source_, key_begin, key_end, values_, value_row_);
    for (size_t i = 0; i < panel_count_; ++i) {
      const BackwardPanel& panel = panels_[i];
      const int64_t begin = std::clamp(panel.hull.begin, key_begin, key_end);
      const int64_t end = std::clamp(panel.hull.end, begin, key_end);
      const size_t first = static_cast<size_t>(begin - key_begin);
      const size_t last = static_cast<size_t>(end - key_begin);
      clear(panel, 0, first);
      clear(panel, last, static_cast<size_t>(key_end - key_begin));
      if (begin < end) step_of<kPanelVectors>(block, panel, begin, end, first);
    }
    add_key_gradients(key_begin, key_end);
  }

  // p = ds = 0 for keys [from, to) of the tile.
  void clear(const BackwardPanel& panel, size_t from, size_t to) {
    for (size_t key = from; key < to; ++key) {
      const size_t at = key * kBackwardRows + panel.column;
      std::fill(p_ + at, p_ + at + panel.width(), 0.0F);
      std::fill(ds_ + at, ds_ + at + panel.width(), 0.0F);
    }
  }

  template <size_t kVectors>
  void step_of(const RowBlock& block, const BackwardPanel& panel, int64_t begin, int64_t end, size_t first) {
    if constexpr (kVectors > 1) {
      if (panel.vectors < kVectors) return step_of<kVectors - 1>(block, panel, begin, end, first);
    }
    step<kVectors>(block, panel, begin, end, first);
  }

  // s, p, dp, ds and dq of one panel against keys [begin, end), which start at row `first` of the tile.
  template <size_t kVectors>
  HWY_NOINLINE void step(const RowBlock& block, const BackwardPanel& panel, int64_t begin, int64_t end,
                         size_t first) {
    const size_t keys = static_cast<size_t>(end - begin);
    const size_t width = kVectors * kLanes, at = first * kBackwardRows + panel.column;
    const Scores p{p_ + at, kBackwardRows}, ds{ds_ + at, kBackwardRows};
    const Operand key{keys_ + first * key_row_, key_row_}, value{values_ + first * value_row_, value_row_};
    multiply<kVectors, Order::by_row>(keys, head_dim_, key, {panel.query, width}, p.data, p.stride, false);
    multiply<kVectors, Order::by_row>(keys, head_dim_v_, value, {panel.dout, width}, ds.data, ds.stride,
                                      false);
    if (problem_.has_score_transform()) {
      scale_and_cap<kVectors>(problem_, keys, p);
      if (problem_.softcap != 0) differentiate_cap<kVectors>(keys, p, ds);
      add_biases<kVectors>(block, panel, begin, end, p);
    }
    mask<kVectors>(block, panel, begin, end, p);
    differentiate_softmax<kVectors>(panel, keys, p, ds);
    multiply<kVectors, Order::by_column>(head_dim_, keys, key, {ds.data, ds.stride}, panel.dq, width, true);
  }

  // d_softcap = 1 - (s / cap)^2: 1 - tanh^2.
  template <size_t kVectors>
  HWY_INLINE void differentiate_cap(size_t keys, Scores capped, Scores ds) {
    const F32 d;
    const VecF inverse = hn::Set(d, 1.0F / problem_.softcap);
    float* to = d_softcap_ + (ds.data - ds_);
    for (size_t key = 0; key < keys; ++key) {
      for (size_t v = 0; v < kVectors; ++v) {
        const VecF t = hn::Mul(inverse, hn::Load(d, capped.at(key, v)));
        hn::Store(hn::NegMulAdd(t, t, hn::Set(d, 1.0F)), d, to + key * kBackwardRows + v * kLanes);
      }
    }
  }

  // scores become p = exp(unit * score - lse), dp becomes ds = p * (dp - delta) * d_softcap.
  template <size_t kVectors>
  HWY_INLINE void differentiate_softmax(const BackwardPanel& panel, size_t keys, Scores p, Scores ds) {
    const F32 d;
    const VecF unit = hn::Set(d, score_unit(problem_));
    const VecF log2e = hn::Set(d, kLog2E), floor = hn::Set(d, -126.0F / kLog2E);
    const float* slope = problem_.softcap != 0 ? d_softcap_ + (ds.data - ds_) : nullptr;
    VecF lse[kVectors], delta[kVectors];
    for (size_t v = 0; v < kVectors; ++v) {
      lse[v] = hn::Load(d, panel.lse + v * kLanes);
      delta[v] = hn::Load(d, panel.delta + v * kLanes);
    }
    for (size_t key = 0; key < keys; ++key) {
      for (size_t v = 0; v < kVectors; ++v) {
        const VecF x = hn::MulSub(hn::Load(d, p.at(key, v)), unit, lse[v]);
        const VecF probability = exp2_scaled(x, log2e, floor);
        VecF gradient = hn::Mul(probability, hn::Sub(hn::Load(d, ds.at(key, v)), delta[v]));
        if (slope != nullptr) {
          gradient = hn::Mul(gradient, hn::Load(d, slope + key * kBackwardRows + v * kLanes));
        }
        hn::Store(probability, d, p.at(key, v));
        hn::Store(gradient, d, ds.at(key, v));
      }
    }
  }

  // dv += p^T dO and dk += ds^T Q: keys in groups, each over the panels that see one of its keys.
  void add_key_gradients(int64_t key_begin, int64_t key_end) {
    constexpr int64_t kGroup = 4 * kMicroRows;
    for (int64_t begin = key_begin; begin < key_end; begin += kGroup) {
      const int64_t end = std::min(begin + kGroup, key_end);
      size_t from = kBackwardRows, to = 0;
      for (size_t i = 0; i < panel_count_; ++i) {
        const BackwardPanel& panel = panels_[i];
        if (panel.hull.end <= begin || end <= panel.hull.begin) continue;
        from = std::min(from, panel.column);
        to = panel.column + panel.rows();
      }
      if (from >= to) continue;
      const size_t keys = static_cast<size_t>(end - begin);
      const size_t at = static_cast<size_t>(begin - key_begin) * kBackwardRows + from;
      multiply_columns(keys, to - from, {p_ + at, kBackwardRows}, {dout_ + from * value_row_, value_row_},
                       head_dim_v_, sums_.dv_row(begin), value_row_);
      multiply_columns(keys, to - from, {ds_ + at, kBackwardRows}, {query_ + from * key_row_, key_row_},
                       head_dim_, sums_.dk_row(begin), key_row_);
    }
  }

  int64_t store_dq(const RowBlock& block) {
    int64_t replaced = 0;
    for (size_t i = 0; i < panel_count_; ++i) {
      const BackwardPanel& panel = panels_[i];
      for (size_t lane = 0; lane < panel.rows(); ++lane) {
        const size_t first = lane / kRowsAtOnce * kRowsAtOnce;
        if (lane == first) {
          const size_t count = std::min(kRowsAtOnce, panel.width() - first);
          transpose(panel.dq + first, panel.width(), head_dim_, count, rows_, row_stride_);
        }
        float* row = rows_ + (lane - first) * row_stride_;
        for (size_t d = 0; d < head_dim_; ++d) row[d] *= problem_.softmax_scale;
        const int64_t stacked = panel.begin + static_cast<int64_t>(lane);
        replaced += store_row(problem_, row, head_dim_, block.address(problem_.dq, stacked));
      }
    }
    return replaced;
  }

  const RowBlock& chunk_;
  const Problem& problem_;
  const KvSource key_source_, value_source_;
  const size_t head_dim_, head_dim_v_, key_row_, value_row_, row_stride_;
  KeyGradients& sums_;
  float* keys_ = nullptr;           // [kBackwardKeys][key_row]
  float* values_ = nullptr;         // [kBackwardKeys][value_row]
  float* p_ = nullptr;              // [kBackwardKeys][kBackwardRows]: scores, then p
  float* ds_ = nullptr;             // likewise: dp, then ds
  float* d_softcap_ = nullptr;      // likewise, with a softcap
  float* query_ = nullptr;          // [kBackwardRows][key_row]
  float* dout_ = nullptr;           // [kBackwardRows][value_row]
  float* query_columns_ = nullptr;  // of all panels
  float* dout_columns_ = nullptr;
  float* dq_columns_ = nullptr;
  float* out_columns_ = nullptr;  // of one panel
  float* lse_ = nullptr;
  float* delta_ = nullptr;
  float* rows_ = nullptr;  // a few rows of out or dq, row_stride_ floats each
  BackwardPanel panels_[kPanels];
  size_t panel_count_ = 0;
};

// Writes dk and dv of all keys of the sequence: the sum of the chunks in their order, zeros where no chunk
// sees a key. Returns the number of non-finite values replaced.
inline HWY_NOINLINE int64_t store_key_gradients(const KeyGradientSum& sum) {
  const Problem& problem = *sum.problem;
  const Sequence& sequence = sum.sequence;
  const F32 d;
  const int64_t keys = problem.packed() ? sequence.seqlen_k : problem.seqlen_k;
  HWY_ALIGN float row[tile_row(kMaxHeadDim)];
  int64_t replaced = 0;
  const auto store = [&](int64_t key, const Rows& to, int64_t dim, float scale, auto row_of) {
    const size_t padded = (static_cast<size_t>(dim) + kLanes - 1) / kLanes * kLanes;
    std::fill(row, row + padded, 0.0F);
    for (const KeyGradients& part : sum.parts) {
      if (!part.keys.contains(key)) continue;
      const float* from = row_of(part);
      for (size_t i = 0; i < padded; i += kLanes) {
        hn::Store(hn::Add(hn::Load(d, row + i), hn::Load(d, from + i)), d, row + i);
      }
    }
    for (size_t i = 0; i < padded; i += kLanes) {
      hn::Store(hn::Mul(hn::Load(d, row + i), hn::Set(d, scale)), d, row + i);
    }
    const int64_t index = to.index(sequence.batch, sum.kv_head, sequence.k_row0 + key);
    char* address = static_cast<char*>(to.data) + index * size_of(problem.dtype);
    replaced += store_row(problem, row, static_cast<size_t>(dim), address);
  };
  for (int64_t key = 0; key < keys; ++key) {
    store(key, problem.dk, problem.head_dim, problem.softmax_scale,
          [&](const KeyGradients& part) { return part.dk_row(key); });
    store(key, problem.dv, problem.head_dim_v, 1.0F,
          [&](const KeyGradients& part) { return part.dv_row(key); });
  }
  return replaced;
}

}  // namespace HWY_NAMESPACE
}  // namespace attnspan::cpu
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
