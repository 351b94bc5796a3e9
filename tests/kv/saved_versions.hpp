#pragma once
// Two caches that a file may hold, told apart by their contents.

#include "cache_model.hpp"

namespace attnspan::kv_test {

// About 1 MB: long enough to be killed in the middle of.
inline KvCache version(int which) {
  Random random(100 + which);
  KvCache cache({.kv_heads = 8, .head_dim = 128, .page_size = 32, .threads = 1});
  append(cache, 0, random_tokens(random, cache.config(), 200 + which));
  return cache;
}

}  // namespace attnspan::kv_test
