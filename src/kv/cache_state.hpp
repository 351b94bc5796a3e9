#pragma once
// What a KvCache owns, shared by its operations (kv_cache.cpp), its files (cache_file.cpp) and its views.

#include <optional>
#include <span>
#include <vector>

#include "attnspan/kv_cache.hpp"
#include "kv/paged_store.hpp"

namespace attnspan {

// The config with defaults filled in; throws Error naming the field that is wrong.
KvCacheConfig checked_config(KvCacheConfig config);
PoolShape rest_shape(const KvCacheConfig& config);
PoolShape first_shape(const KvCacheConfig& config);

// Rows of one appended tensor, by token and head. Strides are in elements.
struct RowSource {
  const Tensor* tensor = nullptr;  // null: nothing is appended on this side
  int64_t start = 0, token_stride = 0, head_stride = 0;
  int64_t dim = 0;

  void read(int64_t token, int64_t head, float* values) const;
};

// Tokens that go to the end of one sequence.
struct AppendTarget {
  int64_t sequence = 0;
  int64_t begin = 0;  // position of the first new token
  RowSource key, value;
};

// Encodes one row of one head. Returns how many scales saturated.
int64_t encode_row(PagePool& pool, PagedStore::Place place, int64_t head, KvSide side, EncodeMode mode,
                   const float* values);
// Decodes one: the dim of its side.
void decode_row(const PagePool& pool, PagedStore::Place place, int64_t head, KvSide side, float* values);

struct KvCache::State {
  explicit State(const KvCacheConfig& config);  // empty sequences
  State(const KvCacheConfig& config, PagedStore rest, std::optional<PagedStore> first);

  KvCacheConfig config;
  PagedStore rest;                  // positions from first_tokens on
  std::optional<PagedStore> first;  // positions [0, first_tokens)
  std::vector<bool> live;
  int64_t saturated = 0;
  mutable std::optional<KvCacheView> all;  // of view(), until the cache changes

  int64_t length(int64_t sequence) const;
  void check_sequence(int64_t sequence) const;
  void add_sequence();
  void trim(int64_t sequence, int64_t length);  // unchecked
  PagedStore& store_of(int64_t position) { return first && position < config.first_tokens ? *first : rest; }
  const PagedStore& store_of(int64_t position) const {
    return first && position < config.first_tokens ? *first : rest;
  }

  void make_room(const std::vector<AppendTarget>& targets, int64_t tokens);
  int64_t append(const std::vector<AppendTarget>& targets, int64_t tokens);
  int64_t encode_token(const AppendTarget& target, int64_t token);

  KvCacheView select(std::span<const int64_t> sequences) const;
  KvCacheView::Part part(const PagedStore& store, std::span<const int64_t> sequences,
                         int64_t max_seqlen) const;
  void read_row(KvSide side, int64_t sequence, int64_t position, float* values) const;
};

}  // namespace attnspan
