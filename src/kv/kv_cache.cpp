#include "attnspan/kv_cache.hpp"

#include <algorithm>
#include <bit>
#include <limits>
#include <utility>

#include "core/validation.hpp"
#include "kv/cache_state.hpp"

namespace attnspan {
namespace {

constexpr int64_t kMaxLength = std::numeric_limits<int32_t>::max();  // seqlens are int32

void check_range(const char* field, int64_t found, int64_t low, int64_t high) {
  require(low <= found && found <= high, field, std::to_string(found),
          std::to_string(low) + " to " + std::to_string(high));
}

}  // namespace

KvCacheConfig checked_config(KvCacheConfig config) {
  check_range("kv_heads", config.kv_heads, 1, 1 << 20);
  check_range("head_dim", config.head_dim, 1, kMaxHeadDim);
  if (config.head_dim_v == 0) config.head_dim_v = config.head_dim;
  check_range("head_dim_v", config.head_dim_v, 1, config.value_is_key ? config.head_dim : kMaxHeadDim);
  require(config.page_size >= 16 && config.page_size <= (1 << 20) &&
              std::has_single_bit(static_cast<uint64_t>(config.page_size)),
          "page_size", std::to_string(config.page_size), "a power of two from 16 to 1048576");
  check_range("batch", config.batch, 0, 1 << 24);
  check_range("max_pages", config.max_pages, 0, kMaxLength);
  check_range("reserve_tokens", config.reserve_tokens, 0, int64_t{1} << 40);
  require(config.window == -1 || (config.window >= 1 && config.window <= kMaxLength), "window",
          std::to_string(config.window), "-1 (all keys) or 1 to 2147483647");
  check_range("first_tokens", config.first_tokens, 0, kMaxLength - config.page_size);
  config.first_tokens = (config.first_tokens + config.page_size - 1) / config.page_size * config.page_size;
  require(config.encode_mode == EncodeMode::quality || config.encode_mode == EncodeMode::fast, "encode_mode",
          std::to_string(static_cast<int>(config.encode_mode)), "quality (0) or fast (1)");
  if (config.value_is_key) {
    config.value_format = config.key_format;
    config.first_value_format = config.first_key_format;
  }
  for (const KvFormat format :
       {config.key_format, config.value_format, config.first_key_format, config.first_value_format}) {
    ops_of(format);  // throws for a number that is no format
  }
  return config;
}

PoolShape rest_shape(const KvCacheConfig& c) {
  return {c.kv_heads,   c.page_size,    c.head_dim,     c.head_dim_v,
          c.key_format, c.value_format, c.value_is_key, c.max_pages};
}

PoolShape first_shape(const KvCacheConfig& c) {
  PoolShape shape = rest_shape(c);
  shape.key_format = c.first_key_format;
  shape.value_format = c.first_value_format;
  return shape;
}

KvCache::State::State(const KvCacheConfig& given, PagedStore rest_store,
                      std::optional<PagedStore> first_store)
    : config(given), rest(std::move(rest_store)), first(std::move(first_store)) {
  live.assign(rest.sequences().size(), true);
}

KvCache::State::State(const KvCacheConfig& given)
    : config(checked_config(given)), rest(PagePool(rest_shape(config)), config.first_tokens) {
  if (config.first_tokens > 0) first.emplace(PagePool(first_shape(config)), 0);
  // A view needs addresses even of an empty pool.
  rest.pool().reserve(
      std::max<int64_t>(1, (config.reserve_tokens + config.page_size - 1) / config.page_size));
  if (first)
    first->pool().reserve(std::max<int64_t>(1, config.batch * config.first_tokens / config.page_size));
  for (int64_t i = 0; i < config.batch; ++i) add_sequence();
}

void KvCache::State::add_sequence() {
  rest.add_sequence();
  if (first) first->add_sequence();
  live.push_back(true);
}

int64_t KvCache::State::length(int64_t sequence) const {
  const int64_t behind = rest.sequence(sequence).length;
  return first && behind == config.first_tokens ? first->sequence(sequence).length : behind;
}

void KvCache::State::check_sequence(int64_t sequence) const {
  require(0 <= sequence && sequence < static_cast<int64_t>(live.size()), "sequence", std::to_string(sequence),
          live.empty() ? "a sequence, but the cache has none" : "0 to " + std::to_string(live.size() - 1));
  require(live[sequence], "sequence", std::to_string(sequence) + ", which was released",
          "one that is in use");
}

void KvCache::State::trim(int64_t sequence, int64_t length) {
  if (length <= config.first_tokens) {
    rest.clear(sequence);  // also forgets what the window has recycled
    if (first) first->trim(sequence, length);
  } else {
    rest.trim(sequence, length);
  }
}

KvCache::KvCache(const KvCacheConfig& config) : state_(std::make_unique<State>(config)) {}
KvCache::KvCache(std::unique_ptr<State> state) : state_(std::move(state)) {}
KvCache::~KvCache() = default;
KvCache::KvCache(KvCache&&) noexcept = default;
KvCache& KvCache::operator=(KvCache&&) noexcept = default;

const KvCacheConfig& KvCache::config() const { return state_->config; }
int64_t KvCache::batch() const { return static_cast<int64_t>(state_->live.size()); }
int64_t KvCache::saturated_scales() const { return state_->saturated; }

int64_t KvCache::seqlen(int64_t sequence) const {
  state_->check_sequence(sequence);
  return state_->length(sequence);
}

int64_t KvCache::first_position(int64_t sequence) const {
  state_->check_sequence(sequence);
  const int64_t first = state_->rest.sequence(sequence).first;
  return first == state_->config.first_tokens ? 0 : first;
}

void KvCache::trim(int64_t sequence, int64_t length) {
  State& state = *state_;
  state.check_sequence(sequence);
  require(0 <= length && length <= state.length(sequence), "length", std::to_string(length),
          "0 to " + std::to_string(state.length(sequence)) + ", the length of the sequence");
  const int64_t kept = state.rest.sequence(sequence).first;
  const int64_t origin = state.config.first_tokens;
  if (state.config.window >= 0 && length > origin) {
    require(kept <= std::max(origin, length - state.config.window), "length", std::to_string(length),
            std::to_string(origin) + " or less, or " + std::to_string(kept + state.config.window) +
                " or more: the window has recycled the keys before position " + std::to_string(kept));
  }
  state.all.reset();
  state.trim(sequence, length);
}

int64_t KvCache::add_sequence() {
  State& state = *state_;
  state.all.reset();
  for (size_t i = 0; i < state.live.size(); ++i) {
    if (state.live[i]) continue;
    state.live[i] = true;
    return static_cast<int64_t>(i);
  }
  state.add_sequence();
  return batch() - 1;
}

int64_t KvCache::fork(int64_t source) {
  state_->check_sequence(source);
  const int64_t target = add_sequence();
  state_->rest.share(source, target);
  if (state_->first) state_->first->share(source, target);
  return target;
}

void KvCache::release(int64_t sequence) {
  state_->check_sequence(sequence);
  state_->all.reset();
  state_->trim(sequence, 0);
  state_->live[sequence] = false;
}

KvCacheMemory KvCache::memory() const {
  KvCacheMemory memory;
  const auto add = [&](const PagedStore& store) {
    const PagePool& pool = store.pool();
    memory.pages_used += pool.used();
    memory.pages_shared += pool.shared();
    memory.pages_reserved += pool.capacity();
    memory.bytes_used += pool.used() * page_bytes(pool.shape());
    memory.bytes_reserved += pool.capacity() * page_bytes(pool.shape());
    for (const SequencePages& sequence : store.sequences()) memory.tokens += sequence.length - sequence.first;
    return page_bytes(pool.shape()) / pool.shape().page_size;
  };
  memory.bytes_per_token = add(state_->rest);
  if (state_->first) memory.first_bytes_per_token = add(*state_->first);
  return memory;
}

}  // namespace attnspan
