// The cache functions of attnspan.h.

#include <memory>
#include <span>

#include "attnspan/attnspan.h"
#include "attnspan/kv_cache.hpp"
#include "capi/convert.hpp"
#include "capi/status.hpp"
#include "capi/structs.hpp"

struct attnspan_kv_cache {
  attnspan::KvCache cache;
};

namespace attnspan::capi {
namespace {

static_assert(ATTNSPAN_ENCODE_FAST == static_cast<int>(EncodeMode::fast));

KvFormat to_format(int32_t format, const char* name) {
  return checked_enum<KvFormat>(format, ATTNSPAN_KV_TBQ4, name, "format");
}

KvCacheConfig to_config(const attnspan_kv_cache_config* from) {
  if (from == nullptr) return {};
  const attnspan_kv_cache_config c = load(from, "config", attnspan_kv_cache_config_init());
  KvCacheConfig config;
  config.kv_heads = c.kv_heads;
  config.head_dim = c.head_dim;
  config.head_dim_v = c.head_dim_v;
  config.key_format = to_format(c.key_format, "key_format");
  config.value_format = to_format(c.value_format, "value_format");
  config.value_is_key = c.value_is_key != 0;
  config.encode_mode = checked_enum<EncodeMode>(c.encode_mode, ATTNSPAN_ENCODE_FAST, "encode_mode", "mode");
  config.page_size = c.page_size;
  config.batch = c.batch;
  config.max_pages = c.max_pages;
  config.reserve_tokens = c.reserve_tokens;
  config.window = c.window;
  config.first_tokens = c.first_tokens;
  config.first_key_format = to_format(c.first_key_format, "first_key_format");
  config.first_value_format = to_format(c.first_value_format, "first_value_format");
  require(c.threads >= 0, "threads", std::to_string(c.threads), "0 (all) or more");
  config.threads = c.threads;
  return config;
}

attnspan_kv_cache_config from_config(const KvCacheConfig& c) {
  attnspan_kv_cache_config to = attnspan_kv_cache_config_init();
  to.kv_heads = c.kv_heads;
  to.head_dim = c.head_dim;
  to.head_dim_v = c.head_dim_v;
  to.key_format = static_cast<int32_t>(c.key_format);
  to.value_format = static_cast<int32_t>(c.value_format);
  to.value_is_key = c.value_is_key ? 1 : 0;
  to.encode_mode = static_cast<int32_t>(c.encode_mode);
  to.page_size = c.page_size;
  to.batch = c.batch;
  to.max_pages = c.max_pages;
  to.reserve_tokens = c.reserve_tokens;
  to.window = c.window;
  to.first_tokens = c.first_tokens;
  to.first_key_format = static_cast<int32_t>(c.first_key_format);
  to.first_value_format = static_cast<int32_t>(c.first_value_format);
  to.threads = c.threads;
  return to;
}

template <typename T>
T& given(T* pointer, const char* name) {
  require(pointer != nullptr, name, "a null pointer", "an address");
  return *pointer;
}

KvCache& cache_of(attnspan_kv_cache* cache) { return given(cache, "cache").cache; }
const KvCache& cache_of(const attnspan_kv_cache* cache) { return given(cache, "cache").cache; }

void hand_out(KvCache cache, attnspan_kv_cache** to) { *to = new attnspan_kv_cache{std::move(cache)}; }

}  // namespace
}  // namespace attnspan::capi

using namespace attnspan;  // NOLINT(google-build-using-namespace): this file is the boundary
using namespace attnspan::capi;

extern "C" {

attnspan_status attnspan_kv_cache_create(const attnspan_kv_cache_config* config, attnspan_kv_cache** cache) {
  return guarded([&] {
    given(cache, "cache") = nullptr;
    hand_out(KvCache(to_config(config)), cache);
  });
}

void attnspan_kv_cache_destroy(attnspan_kv_cache* cache) { delete cache; }

attnspan_status attnspan_kv_cache_get_config(const attnspan_kv_cache* cache,
                                             attnspan_kv_cache_config* config) {
  return guarded([&] { save(from_config(cache_of(cache).config()), config, "config"); });
}

attnspan_status attnspan_kv_cache_get_memory(const attnspan_kv_cache* cache,
                                             attnspan_kv_cache_memory* memory) {
  return guarded([&] {
    const KvCacheMemory m = cache_of(cache).memory();
    attnspan_kv_cache_memory to = attnspan_kv_cache_memory_init();
    to.bytes_per_token = m.bytes_per_token;
    to.first_bytes_per_token = m.first_bytes_per_token;
    to.pages_used = m.pages_used;
    to.pages_shared = m.pages_shared;
    to.pages_reserved = m.pages_reserved;
    to.bytes_used = m.bytes_used;
    to.bytes_reserved = m.bytes_reserved;
    to.tokens = m.tokens;
    to.saturated_scales = cache_of(cache).saturated_scales();
    save(to, memory, "memory");
  });
}

attnspan_status attnspan_kv_cache_batch(const attnspan_kv_cache* cache, int64_t* batch) {
  return guarded([&] { given(batch, "batch") = cache_of(cache).batch(); });
}

attnspan_status attnspan_kv_cache_seqlen(const attnspan_kv_cache* cache, int64_t sequence, int64_t* tokens) {
  return guarded([&] { given(tokens, "tokens") = cache_of(cache).seqlen(sequence); });
}

attnspan_status attnspan_kv_cache_first_position(const attnspan_kv_cache* cache, int64_t sequence,
                                                 int64_t* position) {
  return guarded([&] { given(position, "position") = cache_of(cache).first_position(sequence); });
}

attnspan_status attnspan_kv_cache_append(attnspan_kv_cache* cache, int64_t sequence,
                                         const attnspan_tensor* key, const attnspan_tensor* value,
                                         int64_t* saturated) {
  return guarded([&] {
    KvCache& c = cache_of(cache);
    const Tensor k = convert(key, "key");
    const Tensor v = value == nullptr ? Tensor{} : convert(value, "value");
    const int64_t count = sequence == ATTNSPAN_EVERY_SEQUENCE ? c.append(k, v) : c.append(sequence, k, v);
    if (saturated != nullptr) *saturated = count;
  });
}

attnspan_status attnspan_kv_cache_trim(attnspan_kv_cache* cache, int64_t sequence, int64_t tokens) {
  return guarded([&] { cache_of(cache).trim(sequence, tokens); });
}

attnspan_status attnspan_kv_cache_add_sequence(attnspan_kv_cache* cache, int64_t* sequence) {
  return guarded([&] {
    int64_t& to = given(sequence, "sequence");
    to = cache_of(cache).add_sequence();
  });
}

attnspan_status attnspan_kv_cache_fork(attnspan_kv_cache* cache, int64_t source, int64_t* sequence) {
  return guarded([&] {
    int64_t& to = given(sequence, "sequence");
    to = cache_of(cache).fork(source);
  });
}

attnspan_status attnspan_kv_cache_release(attnspan_kv_cache* cache, int64_t sequence) {
  return guarded([&] { cache_of(cache).release(sequence); });
}

attnspan_status attnspan_kv_cache_view(const attnspan_kv_cache* cache, attnspan_kv_view* view) {
  return guarded([&] { store(cache_of(cache).view(), view); });
}

attnspan_status attnspan_kv_cache_forward(const attnspan_kv_cache* cache, const int64_t* sequences,
                                          int64_t count, const attnspan_forward_args* args,
                                          const attnspan_execution* execution, attnspan_result* result) {
  return guarded([&] {
    store(Result{}, result);  // one that cannot be written is refused before the work is done
    require(count >= 0, "count", std::to_string(count), "0 or more");
    const KvCache& c = cache_of(cache);
    const KvCacheView view =
        sequences == nullptr ? c.select() : c.select(std::span(sequences, static_cast<size_t>(count)));
    store(forward(view, convert(args).args, convert(execution)), result);
  });
}

attnspan_status attnspan_kv_cache_convert(const attnspan_kv_cache* cache, int32_t key_format,
                                          int32_t value_format, int32_t encode_mode,
                                          attnspan_kv_cache** converted) {
  return guarded([&] {
    given(converted, "converted") = nullptr;
    KvCacheFormats formats;
    formats.key = to_format(key_format, "key_format");
    formats.value = to_format(value_format, "value_format");
    formats.encode_mode = checked_enum<EncodeMode>(encode_mode, ATTNSPAN_ENCODE_FAST, "encode_mode", "mode");
    hand_out(cache_of(cache).converted(formats), converted);
  });
}

attnspan_status attnspan_kv_cache_save(const attnspan_kv_cache* cache, const char* path) {
  return guarded([&] {
    given(path, "path");
    cache_of(cache).save(path);
  });
}

attnspan_status attnspan_kv_cache_load(const char* path, int32_t threads, attnspan_kv_cache** cache) {
  return guarded([&] {
    given(path, "path");
    given(cache, "cache") = nullptr;
    require(threads >= 0, "threads", std::to_string(threads), "0 (all) or more");
    hand_out(KvCache::load(path, threads), cache);
  });
}

}  // extern "C"
