// Forward over one block of query rows. For every tile of keys that a row of the block sees:
//   load the tile, then for every panel of rows: QK^T, transform, mask, online softmax, PV.

#if defined(ATTNSPAN_CPU_FORWARD_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef ATTNSPAN_CPU_FORWARD_INL_HPP
#undef ATTNSPAN_CPU_FORWARD_INL_HPP
#else
#define ATTNSPAN_CPU_FORWARD_INL_HPP
#endif

#include "core/softmax_state.hpp"
#include "cpu/epilogue-inl.hpp"
#include "cpu/gemm-inl.hpp"
#include "cpu/loader-inl.hpp"
#include "cpu/panel-inl.hpp"
#include "cpu/scratch.hpp"

HWY_BEFORE_NAMESPACE();
namespace attnspan::cpu {
namespace HWY_NAMESPACE {

// Keys of a tile: with 128, a panel's scores take 16 KiB of the first cache (32 lanes), the accumulators are
// loaded and stored once per 128 steps of depth (1.6% of the FMAs' time), and the tile of f32 keys and values
// takes 128 KiB of the second cache at head_dim 128. Wide heads halve it to stay within half a megabyte.
constexpr int64_t key_tile(size_t dims) { return dims <= 512 ? 128 : 64; }

// Each part of a step loads and stores the sums of its rows once, which costs as much as two or three keys.
inline constexpr size_t kMinPartKeys = 8;

class ForwardBlock {
 public:
  explicit ForwardBlock(const RowBlock& block)
      : block_(block),
        key_source_(KvSource::keys(*block.problem, block.sequence, block.kv_head)),
        value_source_(KvSource::values(*block.problem, block.sequence, block.kv_head)),
        head_dim_(key_source_.stored_dim()),
        head_dim_v_(value_source_.stored_dim()),
        tile_(key_tile(head_dim_ + head_dim_v_)) {
    allocate();
  }

  // Returns the number of non-finite values replaced.
  int64_t run() {
    const KeySpan hull = block_.hull(block_.begin, block_.end);
    if (!hull.empty()) {
      // Tiles start at multiples of the tile, so that a row's sums do not depend on the rows beside it.
      for (int64_t key = hull.begin / tile_ * tile_; key < hull.end; key += tile_) {
        visit(std::max(key, hull.begin), std::min(key + tile_, hull.end));
      }
    }
    int64_t replaced = 0;
    for (size_t i = 0; i < panel_count_; ++i)
      replaced += store_rows(block_, value_source_, panels_[i], rows_, row_stride_, row_);
    return replaced;
  }

 private:
  static constexpr size_t kMaxPanels = 64;

  void allocate() {
    const size_t rows = static_cast<size_t>(block_.end - block_.begin);
    const size_t lanes = (rows + kLanes - 1) / kLanes * kLanes;
    row_stride_ = tile_row(std::max(head_dim_, head_dim_v_));
    const size_t tile = static_cast<size_t>(tile_);
    const size_t panels = (rows + kPanelRows - 1) / kPanelRows;
    Scratch& scratch = Scratch::of_thread();
    scratch.begin(lanes * (head_dim_ + head_dim_v_ + 2) + 4 * panels * Scratch::padded(1) +
                  tile * (tile_row(head_dim_) + tile_row(head_dim_v_)) + tile * kPanelRows +
                  (kRowsAtOnce + 1) * row_stride_ + 64);
    keys_ = scratch.take(tile * tile_row(head_dim_));
    values_ = scratch.take(tile * tile_row(head_dim_v_));
    scores_ = scratch.take(tile * kPanelRows);
    rows_ = scratch.take(kRowsAtOnce * row_stride_);
    row_ = scratch.take(row_stride_);
    for (int64_t begin = block_.begin; begin < block_.end; begin += kPanelRows) {
      add_panel(scratch, begin, std::min(begin + static_cast<int64_t>(kPanelRows), block_.end));
    }
  }

  void add_panel(Scratch& scratch, int64_t begin, int64_t end) {
    ForwardPanel& panel = panels_[panel_count_++] = ForwardPanel(block_, begin, end);
    const size_t width = panel.width();
    panel.query = scratch.take(head_dim_ * width);
    panel.out = scratch.take(head_dim_v_ * width);
    panel.row_max = scratch.take(width);
    panel.row_sum = scratch.take(width);
    load_queries(block_, key_source_, panel, rows_, row_stride_, row_);
    std::fill(panel.out, panel.out + head_dim_v_ * width, 0.0F);
    std::fill(panel.row_max, panel.row_max + width, -kInfinity);
    std::fill(panel.row_sum, panel.row_sum + width, 0.0F);
  }

  void visit(int64_t key_begin, int64_t key_end) {
    load_tile(key_source_, key_begin, key_end, keys_, tile_row(head_dim_));
    load_tile(value_source_, key_begin, key_end, values_, tile_row(head_dim_v_));
    for (size_t i = 0; i < panel_count_; ++i) {
      const ForwardPanel& panel = panels_[i];
      const int64_t begin = std::max(key_begin, panel.hull.begin);
      const int64_t end = std::min(key_end, panel.hull.end);
      if (begin < end) step_of<kPanelVectors>(panel, begin, end, static_cast<size_t>(begin - key_begin));
    }
  }

  template <size_t kVectors>
  void step_of(const ForwardPanel& panel, int64_t begin, int64_t end, size_t first) {
    if constexpr (kVectors > 1) {
      if (panel.vectors < kVectors) return step_of<kVectors - 1>(panel, begin, end, first);
    }
    step<kVectors>(panel, begin, end, first);
  }

  // One panel against keys [begin, end), which start at row `first` of the tile.
  template <size_t kVectors>
  HWY_NOINLINE void step(const ForwardPanel& panel, int64_t begin, int64_t end, size_t first) {
    const size_t keys = static_cast<size_t>(end - begin);
    const size_t key_row = tile_row(head_dim_), value_row = tile_row(head_dim_v_);
    const size_t width = kVectors * kLanes;
    for_parts<kVectors>(panel, begin, end, [&]<size_t kPart>(const Part& part) HWY_ATTR {
      multiply<kPart, Order::by_row>(part.keys, head_dim_, {keys_ + (first + part.key) * key_row, key_row},
                                     {panel.query + part.lane, width}, scores_ + part.key * width + part.lane,
                                     width, false);
    });
    const Scores scores{scores_, width};
    if (block_.problem->has_score_transform()) {
      scale_and_cap<kVectors>(*block_.problem, keys, scores);
      add_biases<kVectors>(block_, panel, begin, end, scores);
    }
    mask<kVectors>(block_, panel, begin, end, scores);
    online_softmax<kVectors>(panel, keys);
    for_parts<kVectors>(panel, begin, end, [&]<size_t kPart>(const Part& part) HWY_ATTR {
      multiply<kPart, Order::by_column>(
          head_dim_v_, part.keys, {values_ + (first + part.key) * value_row, value_row},
          {scores_ + part.key * width + part.lane, width}, panel.out + part.lane, width, true);
    });
  }

  // Keys [key, key + keys) of those that a step takes, for the vectors of rows from `lane` on.
  struct Part {
    size_t key, keys, lane;
  };

  // Keys [begin, end) for all vectors of a panel, but those at either end that only one half of its rows sees
  // for that half alone: with a window of 256 keys and panels of 32 rows, 16 of 287 keys less. The scores of
  // the other half are masked in any case, and its sums would only gain zeros.
  template <size_t kVectors, typename Call>
  HWY_INLINE void for_parts(const ForwardPanel& panel, int64_t begin, int64_t end, const Call& call) {
    const auto all = [&](size_t key, size_t keys) HWY_ATTR {
      call.template operator()<kVectors>(Part{key, keys, 0});
    };
    const size_t keys = static_cast<size_t>(end - begin);
    if constexpr (kVectors == 1) {
      all(0, keys);
    } else {
      constexpr size_t kFirst = kVectors / 2, kSecond = kVectors - kFirst;
      if (panel.core.begin <= begin && end <= panel.core.end) return all(0, keys);
      const int64_t middle = panel.begin + static_cast<int64_t>(kFirst * kLanes);
      size_t from = static_cast<size_t>(std::clamp(block_.hull(middle, panel.end).begin, begin, end) - begin);
      size_t to = static_cast<size_t>(std::clamp(block_.hull(panel.begin, middle).end, begin, end) - begin);
      if (from < kMinPartKeys) from = 0;
      if (to + kMinPartKeys > keys) to = keys;
      to = std::max(from, to);
      if (from > 0) call.template operator()<kFirst>(Part{0, from, 0});
      if (from < to) all(from, to - from);
      if (to < keys) call.template operator()<kSecond>(Part{to, keys - to, kFirst * kLanes});
    }
  }

  // scores become p = exp(score - row_max); row_max, row_sum and out move to the new maximum.
  template <size_t kVectors>
  HWY_INLINE void online_softmax(const ForwardPanel& panel, size_t keys) {
    const F32 d;
    const float unit = score_unit(*block_.problem) * kLog2E;
    const VecF scale = hn::Set(d, unit), floor = hn::Set(d, -126.0F / unit);
    VecF maximum[kVectors], sum[kVectors], factor[kVectors];
    for (size_t v = 0; v < kVectors; ++v) maximum[v] = hn::Load(d, panel.row_max + v * kLanes);
    for (size_t key = 0; key < keys; ++key) {
      for (size_t v = 0; v < kVectors; ++v) {
        maximum[v] = hn::Max(maximum[v], hn::Load(d, scores_ + (key * kVectors + v) * kLanes));
      }
    }
    bool moved = false;
    for (size_t v = 0; v < kVectors; ++v) {
      const VecF before = hn::Load(d, panel.row_max + v * kLanes);
      hn::Store(maximum[v], d, panel.row_max + v * kLanes);
      // A row that has met no key has only scores of -inf: against 0 they all become p = 0.
      maximum[v] = hn::IfThenElse(hn::Gt(maximum[v], hn::Set(d, -kInfinity)), maximum[v], hn::Zero(d));
      moved = moved || !hn::AllTrue(d, hn::Eq(before, maximum[v]));
      factor[v] = exp2_scaled(hn::Sub(before, maximum[v]), scale, floor);
      sum[v] = hn::Zero(d);
    }
    for (size_t key = 0; key < keys; ++key) {
      for (size_t v = 0; v < kVectors; ++v) {
        float* score = scores_ + (key * kVectors + v) * kLanes;
        const VecF p = exp2_scaled(hn::Sub(hn::Load(d, score), maximum[v]), scale, floor);
        hn::Store(p, d, score);
        sum[v] = hn::Add(sum[v], p);
      }
    }
    for (size_t v = 0; v < kVectors; ++v) {
      float* row_sum = panel.row_sum + v * kLanes;
      hn::Store(hn::MulAdd(hn::Load(d, row_sum), factor[v], sum[v]), d, row_sum);
    }
    if (moved) rescale<kVectors>(panel, factor);
  }

  template <size_t kVectors>
  HWY_INLINE void rescale(const ForwardPanel& panel, const VecF* factor) {
    const F32 d;
    for (size_t i = 0; i < head_dim_v_; ++i) {
      for (size_t v = 0; v < kVectors; ++v) {
        float* out = panel.out + (i * kVectors + v) * kLanes;
        hn::Store(hn::Mul(factor[v], hn::Load(d, out)), d, out);
      }
    }
  }

  const RowBlock& block_;
  const KvSource key_source_, value_source_;
  const size_t head_dim_, head_dim_v_;  // in the stored domain
  const int64_t tile_;
  float* keys_ = nullptr;    // [tile][tile_row(head_dim)]
  float* values_ = nullptr;  // [tile][tile_row(head_dim_v)]
  float* scores_ = nullptr;  // [tile][panel width]
  float* rows_ = nullptr;    // a few rows of query or out, row_stride_ floats each
  float* row_ = nullptr;     // one more
  size_t row_stride_ = 0;
  ForwardPanel panels_[kMaxPanels];
  size_t panel_count_ = 0;
};

}  // namespace HWY_NAMESPACE
}  // namespace attnspan::cpu
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
