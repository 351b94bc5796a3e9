// The same tokens in other formats, page by page, so that what was shared stays shared.

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <utility>

#include "core/parallel.hpp"
#include "core/validation.hpp"
#include "kv/cache_state.hpp"

namespace attnspan {
namespace {

// One page of one side. Rows of an unchanged format are copied.
int64_t convert_page(const PagePool& from, int32_t source, PagePool& to, int32_t target, int64_t tokens,
                     KvSide side, EncodeMode mode) {
  const bool key = side == KvSide::key;
  const PoolShape& old_shape = from.shape();
  const PoolShape& shape = to.shape();
  if (!key && shape.value_is_key) return 0;
  const bool same =
      key ? old_shape.key_format == shape.key_format : old_shape.value_format == shape.value_format;
  const int codes = key ? kKeyCodes : kValueCodes;
  std::array<float, kMaxStoredDim> values;
  int64_t saturated = 0;
  for (int64_t head = 0; head < shape.kv_heads; ++head) {
    for (const int plane : {codes, codes + 1}) {
      const int64_t bytes = plane_row_bytes(shape, plane) * tokens;
      if (same && bytes > 0) {
        std::memcpy(to.row(plane, target, head, 0), from.row(plane, source, head, 0),
                    static_cast<size_t>(bytes));
      }
    }
    for (int64_t token = 0; !same && token < tokens; ++token) {
      decode_row(from, {source, token}, head, side, values.data());
      saturated += encode_row(to, {target, token}, head, side, mode, values.data());
    }
  }
  return saturated;
}

PagedStore convert_store(const PagedStore& from, const PoolShape& shape, int64_t origin, EncodeMode mode,
                         int threads, int64_t& saturated) {
  const PageOrder order = order_pages(from);
  PagedStore to(PagePool(shape), origin);
  PagePool& pool = to.pool();
  pool.reserve(std::max<int64_t>(1, static_cast<int64_t>(order.pages.size())));
  std::vector<int32_t> targets;
  for (size_t i = 0; i < order.pages.size(); ++i) targets.push_back(pool.allocate());
  std::vector<SequencePages> sequences = from.sequences();
  std::vector<bool> met(order.pages.size(), false);
  for (SequencePages& sequence : sequences) {
    for (int32_t& page : sequence.pages) {
      const int32_t number = order.numbers[page];
      page = targets[number];
      if (met[number]) pool.retain(page);
      met[number] = true;
    }
  }
  to.adopt(std::move(sequences));
  std::atomic<int64_t> count{0};
  parallel_for_each(threads, static_cast<int64_t>(targets.size()), [&](int64_t i) {
    for (const KvSide side : {KvSide::key, KvSide::value}) {
      count += convert_page(from.pool(), order.pages[i], pool, targets[i], order.filled[i], side, mode);
    }
  });
  saturated += count;
  return to;
}

}  // namespace

KvCache KvCache::converted(const KvCacheFormats& formats) const {
  KvCacheConfig config = state_->config;
  if (config.value_is_key) {
    const bool one = !formats.value || formats.value == formats.key.value_or(config.key_format);
    require(one, "value", name_of(*formats.value), "the format of the keys, which the values are part of");
  }
  config.key_format = formats.key.value_or(config.key_format);
  config.value_format = formats.value.value_or(config.value_format);
  config.first_key_format = formats.first_key.value_or(config.first_key_format);
  config.first_value_format = formats.first_value.value_or(config.first_value_format);
  config.encode_mode = formats.encode_mode;
  config = checked_config(config);

  int64_t saturated = state_->saturated;
  PagedStore rest = convert_store(state_->rest, rest_shape(config), config.first_tokens, config.encode_mode,
                                  config.threads, saturated);
  std::optional<PagedStore> first;
  if (state_->first) {
    first.emplace(
        convert_store(*state_->first, first_shape(config), 0, config.encode_mode, config.threads, saturated));
  }
  auto state = std::make_unique<State>(config, std::move(rest), std::move(first));
  state->live = state_->live;
  state->saturated = saturated;
  return KvCache(std::move(state));
}

}  // namespace attnspan
