// What kernels and callers see of a cache: views with their tables, and single rows.

#include <algorithm>
#include <array>
#include <numeric>

#include "core/validation.hpp"
#include "kv/cache_state.hpp"

namespace attnspan {

KvCacheView::Part KvCache::State::part(const PagedStore& store, std::span<const int64_t> sequences,
                                       int64_t max_seqlen) const {
  const auto batch = static_cast<int64_t>(sequences.size());
  int64_t width = 1;
  for (const int64_t s : sequences) {
    width = std::max(width, static_cast<int64_t>(store.sequence(s).pages.size()));
  }
  KvCacheView::Part part;
  part.block_table.assign(static_cast<size_t>(batch * width), 0);
  part.seqlens.reserve(sequences.size());
  part.first_position.reserve(sequences.size());
  for (int64_t b = 0; b < batch; ++b) {
    const SequencePages& pages = store.sequence(sequences[b]);
    std::copy(pages.pages.begin(), pages.pages.end(), part.block_table.begin() + b * width);
    // A sequence with nothing in this store still has its length: the diagonal counts from it.
    const bool stored = pages.length > pages.first;
    part.seqlens.push_back(static_cast<int32_t>(stored ? pages.length : length(sequences[b])));
    part.first_position.push_back(static_cast<int32_t>(stored ? pages.first : part.seqlens.back()));
  }
  KvView& view = part.view;
  view.batch = batch;
  view.kv_heads = config.kv_heads;
  view.page_size = config.page_size;
  view.num_pages = store.pool().capacity();
  view.max_seqlen = max_seqlen;
  view.key = store.pool().key_rows();
  view.value = store.pool().value_rows();
  view.block_table = contiguous(part.block_table.data(), DType::i32, {batch, width});
  view.seqlens = contiguous(part.seqlens.data(), DType::i32, {batch});
  const auto begins_at_zero = [](int32_t position) { return position == 0; };
  if (!std::all_of(part.first_position.begin(), part.first_position.end(), begins_at_zero)) {
    view.first_position = contiguous(part.first_position.data(), DType::i32, {batch});
  }
  return part;
}

KvCacheView KvCache::State::select(std::span<const int64_t> sequences) const {
  KvCacheView view;
  for (const int64_t s : sequences) {
    view.lengths_.push_back(length(s));
    view.max_length_ = std::max(view.max_length_, length(s));
  }
  view.window_ = config.window;
  view.rest_ = part(rest, sequences, view.max_length_);
  if (first) view.first_ = part(*first, sequences, view.max_length_);
  return view;
}

KvCacheView KvCache::select(std::span<const int64_t> sequences) const {
  for (const int64_t s : sequences) state_->check_sequence(s);
  return state_->select(sequences);
}

KvCacheView KvCache::select() const {
  std::vector<int64_t> sequences(static_cast<size_t>(batch()));
  std::iota(sequences.begin(), sequences.end(), int64_t{0});
  return state_->select(sequences);
}

const KvView& KvCache::view() const {
  require(!state_->first, "first_tokens", std::to_string(state_->config.first_tokens),
          "0 for a single view (forward(cache, ...) attends to both spans)");
  if (!state_->all) state_->all.emplace(select());
  return state_->all->view();
}

void decode_row(const PagePool& pool, PagedStore::Place place, int64_t head, KvSide side, float* values) {
  const PoolShape& shape = pool.shape();
  const bool from_key = side == KvSide::key || shape.value_is_key;
  const int plane = from_key ? kKeyCodes : kValueCodes;
  const int64_t encoded = from_key ? shape.key_dim : shape.value_dim;
  const auto* codes = reinterpret_cast<const uint8_t*>(pool.row(plane, place.page, head, place.token));
  const auto* scales = reinterpret_cast<const uint16_t*>(pool.row(plane + 1, place.page, head, place.token));
  std::array<float, kMaxStoredDim> row;
  decode_row(ops_of(from_key ? shape.key_format : shape.value_format), codes, scales, encoded, row.data());
  std::copy_n(row.begin(), side == KvSide::key ? shape.key_dim : shape.value_dim, values);
}

void KvCache::State::read_row(KvSide side, int64_t sequence, int64_t position, float* values) const {
  check_sequence(sequence);
  const PagedStore& store = store_of(position);
  const SequencePages& pages = store.sequence(sequence);
  require(pages.first <= position && position < pages.length, "position", std::to_string(position),
          pages.first == pages.length ? "a stored position, but there is none"
                                      : std::to_string(pages.first) + " to " +
                                            std::to_string(pages.length - 1) + ", which are stored");
  const int64_t dim = side == KvSide::key ? config.head_dim : config.head_dim_v;
  for (int64_t head = 0; head < config.kv_heads; ++head) {
    decode_row(store.pool(), store.place(sequence, position), head, side, values + head * dim);
  }
}

void KvCache::read_key(int64_t sequence, int64_t position, float* values) const {
  state_->read_row(KvSide::key, sequence, position, values);
}

void KvCache::read_value(int64_t sequence, int64_t position, float* values) const {
  state_->read_row(KvSide::value, sequence, position, values);
}

}  // namespace attnspan
