// Decode of one split: for every tile of its keys, scores of all rows of the group, transform, mask, online
// softmax, values. Every loaded key and value serves all query heads of the KV head.

#if defined(ATTNSPAN_CPU_DECODE_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef ATTNSPAN_CPU_DECODE_INL_HPP
#undef ATTNSPAN_CPU_DECODE_INL_HPP
#else
#define ATTNSPAN_CPU_DECODE_INL_HPP
#endif

#include <algorithm>

#include "cpu/decode_plan.hpp"
#include "cpu/decode_softmax-inl.hpp"
#include "cpu/decode_tbq4-inl.hpp"
#include "cpu/scratch.hpp"

HWY_BEFORE_NAMESPACE();
namespace attnspan::cpu {
namespace HWY_NAMESPACE {

#if HWY_TARGET != HWY_SCALAR

// ---- where things lie

HWY_INLINE Tbq4Query tbq4_query(const KvSource& keys, float* row_memory, const DecodeLayout& layout) {
  Tbq4Query query;
  query.words = keys.stored_dim() / 8;
  query.block_words = static_cast<size_t>(tbq4::block_size(static_cast<int64_t>(keys.encoded_dim()))) / 8;
  query.blocks = query.words / query.block_words;
  query.stride = layout.query_stride;
  query.pairs = reinterpret_cast<int32_t*>(row_memory);
  query.units = row_memory + query.words * 4;
  return query;
}

// The state of one split: row_max, row_sum and the rows of sums.
struct Partial {
  float* row_max;
  float* row_sum;
  float* out;

  Partial(const DecodeGroup& group, int64_t split) {
    const size_t rows = static_cast<size_t>(group.layout.rows);
    row_max = group.partials + static_cast<size_t>(split) * group.layout.partial_stride;
    row_sum = row_max + rows;
    out = row_max + group.layout.partial_stride - rows * group.layout.out_stride;
  }
};

// The query rows of a group as the kernels read them.
inline HWY_NOINLINE void prepare_queries(const DecodeGroup& group) {
  const Problem& problem = *group.block.problem;
  const KvSource keys = KvSource::keys(problem, group.block.sequence, group.block.kv_head);
  const size_t dim = keys.dim(), whole = (dim + kLanes - 1) / kLanes * kLanes;
  const float sign = query_sign(problem);
  HWY_ALIGN float row[kMaxStoredDim + 16], rotated[kMaxStoredDim + 16];
  for (int64_t r = 0; r < group.layout.rows; ++r) {
    const void* from = static_cast<const char*>(problem.query.data) +
                       group.block.index(problem.query, r) * size_of(problem.dtype);
    row_to_f32(from, problem.dtype, dim, row);
    for (size_t i = 0; i < dim; ++i) row[i] *= sign;
    float* to = group.queries + static_cast<size_t>(r) * group.layout.query_stride;
    if (keys.format() == KvFormat::tbq4) {
      keys.enter_domain(row, rotated);
      quantise_query(rotated, tbq4_query(keys, to, group.layout));
    } else {
      std::fill(std::copy(row, row + dim, to), to + whole, 0.0F);
    }
  }
}

// ---- tiles

// f16 scales of `count` rows to scales[block][key].
HWY_INLINE void load_scales(const RowRun& run, size_t per_row, float* HWY_RESTRICT to) {
  const size_t count = static_cast<size_t>(run.count);
  if (per_row == 1 && run.scale_stride == 1) {
    size_t i = 0;
    for (; i + kLanes <= count; i += kLanes) hn::StoreU(load_f16_vector(run.scales + i), F32(), to + i);
    for (; i < count; ++i) to[i] = f32_from_f16(run.scales[i]);
    return;
  }
  for (size_t i = 0; i < count; ++i) {
    const uint16_t* row = run.scales + static_cast<int64_t>(i) * run.scale_stride;
    for (size_t block = 0; block < per_row; ++block) to[block * kTileKeys + i] = f32_from_f16(row[block]);
  }
}

// Asks for the scales of the tile that begins at `key`, which load_key_tile would wait for, and for its first
// codes: a tile of small rows is about a page of memory, whose address is then known when the others are
// asked for.
HWY_INLINE void look_ahead(const KvSource& source, int64_t key, size_t scales) {
  const RowRun run = source.run(key, key + 1);
  const char* first = reinterpret_cast<const char*>(run.scales);
  for (size_t byte = 0; byte < scales * kTileKeys * sizeof(uint16_t); byte += kLine)
    __builtin_prefetch(first + byte);
  __builtin_prefetch(run.codes);
}

// Keys [key_begin, key_end) of a split that ends at split_end.
inline HWY_NOINLINE void load_key_tile(const KvSource& source, int64_t key_begin, int64_t key_end,
                                       int64_t split_end, KeyTile& tile) {
  const size_t scales =
      static_cast<size_t>(ops_of(source.format()).row_scales(static_cast<int64_t>(source.encoded_dim())));
  size_t count = 0;
  while (key_begin < key_end) {
    const RowRun run = source.run(key_begin, key_end);
    for (int64_t i = 0; i < run.count; ++i) {
      tile.rows[count + static_cast<size_t>(i)] = run.codes + i * run.code_stride;
    }
    if (scales > 0) load_scales(run, scales, tile.scales + count);
    count += static_cast<size_t>(run.count);
    key_begin += run.count;
  }
  tile.count = count;
  if (scales > 0 && key_end < split_end) look_ahead(source, key_end, scales);
  for (size_t i = count; i % kLanes != 0; ++i) {
    tile.rows[i] = tile.rows[count - 1];
    for (size_t block = 0; block < scales; ++block) tile.scales[block * kTileKeys + i] = 0;
  }
}

HWY_INLINE size_t row_bytes(const KvSource& source) {
  const auto dim = static_cast<int64_t>(source.encoded_dim());
  return static_cast<size_t>(ops_of(source.format()).row_code_bytes(dim));
}

// ---- kernels by format and number of rows

// Calls call.template operator()<n>() for n = rows.
template <size_t kRows, typename Call>
HWY_INLINE void with_rows(size_t rows, const Call& call) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return with_rows<kRows - 1>(rows, call);
  }
  call.template operator()<kRows>();
}

// Rows that are taken together next: never one alone after a full set.
constexpr size_t next_rows(size_t left, size_t most) {
  return left <= most ? left : left < 2 * most ? (left + 1) / 2 : most;
}

template <bool kVnni>
class DecodeSplit {
 public:
  DecodeSplit(const DecodeGroup& group, int64_t split)
      : group_(group),
        block_(group.block),
        partial_(group, split),
        rows_(static_cast<size_t>(group.layout.rows)),
        keys_(KvSource::keys(*block_.problem, block_.sequence, block_.kv_head)),
        values_(KvSource::values(*block_.problem, block_.sequence, block_.kv_head)),
        key_bytes_(row_bytes(keys_)),
        value_bytes_(row_bytes(values_)) {
    const KeySpan hull = block_.hull(0, group.layout.rows);
    const int64_t first = group.key_begin + split * group.split_keys;
    begin_ = std::max(first, hull.begin);
    end_ = std::min(first + group.split_keys, hull.end);
    allocate();
  }

  void run() {
    std::fill(partial_.row_max, partial_.row_max + rows_, -std::numeric_limits<float>::infinity());
    std::fill(partial_.row_sum, partial_.row_sum + rows_, 0.0F);
    std::fill(partial_.out, partial_.out + rows_ * group_.layout.out_stride, 0.0F);
    constexpr int64_t kTile = kTileKeys;
    const auto tile_end = [&](int64_t key) { return std::min(end_, key / kTile * kTile + kTile); };
    load_key_tile(keys_, begin_, tile_end(begin_), end_, key_tile_);
    for (int64_t key = begin_; key < end_;) {
      const int64_t end = tile_end(key);
      visit(key, end, tile_end(end));
      key = end;
    }
  }

 private:
  void allocate() {
    if (values_.format() == KvFormat::tbq4) {
      weights_.rows = rows_;
      weights_.words = values_.stored_dim() / 8;
      weights_.block_words =
          static_cast<size_t>(tbq4::block_size(static_cast<int64_t>(values_.encoded_dim()))) / 8;
      weights_.blocks = weights_.words / weights_.block_words;
    }
    const size_t weights = rows_ * (weights_.blocks + 1) * kTileKeys;  // a vector may read one block more
    Scratch& scratch = Scratch::of_thread();
    scratch.begin(rows_ * kTileKeys + 2 * rows_ + weights + rows_ * weights_.blocks + 64 * 8);
    scores_ = scratch.take(rows_ * kTileKeys);
    factors_ = scratch.take(rows_);
    weights_.weights = reinterpret_cast<int16_t*>(scratch.take(weights / 2));
    weights_.units = scratch.take(rows_ * weights_.blocks);
  }

  // Keys [begin, end), whose rows key_tile_ holds; the next tile is [end, next_end). Values are asked for
  // while scores are computed, the next keys while values are added.
  void visit(int64_t begin, int64_t end, int64_t next_end) {
    load_key_tile(values_, begin, end, end_, value_tile_);
    score();
    for (size_t r = 0; r < rows_; ++r) {
      const ScoreRow row{block_, static_cast<int64_t>(r), begin, key_tile_.count, scores_ + r * kTileKeys};
      transform_row(row);
      mask_row(row);
      factors_[r] = online_softmax_row(row, partial_.row_max[r], partial_.row_sum[r]);
    }
    key_tile_.count = 0;
    if (end < next_end) load_key_tile(keys_, end, next_end, end_, key_tile_);
    add_values_of_tile();
  }

  void score() {
    switch (keys_.format()) {
      case KvFormat::f32:
        return score_format<KvFormat::f32>();
      case KvFormat::f16:
        return score_format<KvFormat::f16>();
      case KvFormat::bf16:
        return score_format<KvFormat::bf16>();
      case KvFormat::q8:
        return score_format<KvFormat::q8>();
      case KvFormat::tbq4:
        return score_format<KvFormat::tbq4>();
    }
  }

  template <KvFormat kFormat>
  void score_format() {
    constexpr size_t kMost = kFormat == KvFormat::tbq4 ? kMaxTbq4Rows : kMaxRows;
    const size_t stride = group_.layout.query_stride;
    for (size_t r = 0; r < rows_;) {
      const size_t n = next_rows(rows_ - r, kMost);
      float* queries = group_.queries + r * stride;
      float* scores = scores_ + r * kTileKeys;
      const RowsAhead ahead(value_tile_, value_bytes_, r, r + n, rows_);
      with_rows<kMost>(n, [&]<size_t kRows>() HWY_ATTR {
        if constexpr (kFormat == KvFormat::tbq4) {
          score_tbq4<kVnni, kRows>(key_tile_, ahead, tbq4_query(keys_, queries, group_.layout), scores);
        } else {
          score_rows<kFormat, kRows>(key_tile_, ahead, keys_.dim(), queries, stride, scores);
        }
      });
      r += n;
    }
  }

  void add_values_of_tile() {
    switch (values_.format()) {
      case KvFormat::f32:
        return add_format<KvFormat::f32>();
      case KvFormat::f16:
        return add_format<KvFormat::f16>();
      case KvFormat::bf16:
        return add_format<KvFormat::bf16>();
      case KvFormat::q8:
        return add_format<KvFormat::q8>();
      case KvFormat::tbq4:
        for (size_t r = 0; r < rows_; ++r)
          quantise_weights(value_tile_, scores_ + r * kTileKeys, weights_, r);
        return add_format<KvFormat::tbq4>();
    }
  }

  template <KvFormat kFormat>
  void add_format() {
    constexpr size_t kMost = kFormat == KvFormat::tbq4 ? kMaxTbq4Rows : kMaxRows;
    const size_t stride = group_.layout.out_stride;
    for (size_t r = 0; r < rows_;) {
      const size_t n = next_rows(rows_ - r, kMost);
      float* out = partial_.out + r * stride;
      const RowsAhead ahead(key_tile_, key_bytes_, r, r + n, rows_);
      with_rows<kMost>(n, [&]<size_t kRows>() HWY_ATTR {
        if constexpr (kFormat == KvFormat::tbq4) {
          add_tbq4<kVnni, kRows>(value_tile_, ahead, weights_, r, factors_ + r, out, stride);
        } else {
          add_values<kFormat, kRows>(value_tile_, ahead, values_.dim(), scores_ + r * kTileKeys, factors_ + r,
                                     out, stride);
        }
      });
      r += n;
    }
  }

  const DecodeGroup& group_;
  const RowBlock& block_;
  const Partial partial_;
  const size_t rows_;
  const KvSource keys_, values_;
  const size_t key_bytes_, value_bytes_;  // of a row's codes
  int64_t begin_ = 0, end_ = 0;
  float* scores_ = nullptr;   // [rows][kTileKeys]
  float* factors_ = nullptr;  // [rows]
  Tbq4Weights weights_;
  KeyTile key_tile_, value_tile_;
};

#endif  // not scalar

}  // namespace HWY_NAMESPACE
}  // namespace attnspan::cpu
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
