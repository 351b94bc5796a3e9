// Random sequences of append, trim, fork, release, save and load against the simple model of cache_model.hpp.

#include <gtest/gtest.h>

#include <map>

#include "attnspan/error.hpp"
#include "cache_model.hpp"
#include "temp_folder.hpp"

namespace attnspan {
namespace {

using kv_test::append;
using kv_test::cached_row;
using kv_test::expected_row;
using kv_test::Random;
using kv_test::random_tokens;
using kv_test::Token;

KvFormat random_format(Random& random) { return static_cast<KvFormat>(random() % 5); }

KvCacheConfig random_config(Random& random) {
  KvCacheConfig config;
  config.kv_heads = 1 + static_cast<int64_t>(random() % 3);
  config.head_dim = 1 + static_cast<int64_t>(random() % 80);
  config.value_is_key = random() % 5 == 0;
  config.head_dim_v = 1 + static_cast<int64_t>(random() % (config.value_is_key ? config.head_dim : 80));
  config.key_format = random_format(random);
  config.value_format = random_format(random);
  config.first_key_format = random_format(random);
  config.first_value_format = random_format(random);
  config.encode_mode = random() % 2 == 0 ? EncodeMode::quality : EncodeMode::fast;
  config.page_size = int64_t{16} << (random() % 2);
  config.batch = static_cast<int64_t>(random() % 3);
  config.window = random() % 3 == 0 ? 1 + static_cast<int64_t>(random() % 70) : -1;
  config.first_tokens = random() % 3 == 0 ? static_cast<int64_t>(random() % 40) : 0;
  config.max_pages = random() % 4 == 0 ? 12 : 0;
  config.threads = 1 + static_cast<int>(random() % 2);
  return config;
}

// A cache beside its model.
class Pair {
 public:
  Pair(const KvCacheConfig& config, const std::string& path) : cache_(config), path_(path) {
    for (int64_t s = 0; s < config.batch; ++s) model_[s];
  }

  void step(Random& random) {
    const uint64_t choice = random() % 100;
    if (model_.empty() || choice < 4) {
      const int64_t added = cache_.add_sequence();
      ASSERT_EQ(model_.count(added), 0U);
      model_[added];
      return;
    }
    auto& [sequence, tokens] = *std::next(model_.begin(), static_cast<int64_t>(random() % model_.size()));
    if (choice < 60) {
      append_some(random, sequence, tokens);
    } else if (choice < 75) {
      trim_some(random, sequence, tokens);
    } else if (choice < 88) {
      fork_it(sequence, tokens);
    } else if (choice < 93) {
      cache_.release(sequence);
      model_.erase(sequence);
    } else {
      cache_.save(path_);
      cache_ = KvCache::load(path_, 1);
    }
  }

  void check() const {
    for (const auto& [sequence, tokens] : model_) {
      ASSERT_EQ(cache_.seqlen(sequence), static_cast<int64_t>(tokens.size()));
      const KvCacheConfig& c = cache_.config();
      const auto length = static_cast<int64_t>(tokens.size());
      const int64_t first = cache_.first_position(sequence);
      ASSERT_LE(first, c.window < 0 ? 0 : std::max<int64_t>(0, length - c.window));
      for (int64_t p = 0; p < length; ++p) {
        if (p >= c.first_tokens && p < first) continue;
        for (const KvSide side : {KvSide::key, KvSide::value}) {
          ASSERT_EQ(cached_row(cache_, sequence, p, side), expected_row(c, tokens[p], p, side))
              << "sequence " << sequence << " position " << p;
        }
      }
    }
    const KvCacheMemory memory = cache_.memory();
    ASSERT_LE(memory.pages_shared, memory.pages_used);
    ASSERT_LE(memory.pages_used, memory.pages_reserved);
    ASSERT_TRUE(!model_.empty() || memory.pages_used == 0);
  }

 private:
  void append_some(Random& random, int64_t sequence, std::vector<Token>& tokens) {
    const auto count = static_cast<int64_t>(random() % 4 == 0 ? random() % 70 : random() % 3);
    const std::vector<Token> added = random_tokens(random, cache_.config(), count);
    try {
      append(cache_, sequence, added);
    } catch (const Error& error) {
      ASSERT_EQ(error.argument(), "max_pages");  // nothing was appended
      return;
    }
    tokens.insert(tokens.end(), added.begin(), added.end());
  }

  void trim_some(Random& random, int64_t sequence, std::vector<Token>& tokens) {
    const auto length = static_cast<int64_t>(random() % (tokens.size() + 1));
    try {
      cache_.trim(sequence, length);
    } catch (const Error& error) {
      ASSERT_GE(cache_.config().window, 0);
      ASSERT_EQ(error.argument(), "length");
      return;
    }
    tokens.resize(static_cast<size_t>(length));
  }

  void fork_it(int64_t sequence, const std::vector<Token>& tokens) {
    if (model_.size() > 5) return;
    const int64_t child = cache_.fork(sequence);
    ASSERT_EQ(model_.count(child), 0U);
    model_[child] = tokens;
  }

  KvCache cache_;
  std::string path_;
  std::map<int64_t, std::vector<Token>> model_;
};

TEST(CacheProperty, RandomHistoriesMatchTheModel) {
  const io::TempFolder folder;
  for (uint64_t seed = 1; seed <= 120; ++seed) {
    Random random(seed);
    Pair pair(random_config(random), folder.file("cache.kv"));
    for (int step = 0; step < 40; ++step) {
      SCOPED_TRACE("seed " + std::to_string(seed) + " step " + std::to_string(step));
      pair.step(random);
      if (step % 8 == 7) pair.check();
      if (testing::Test::HasFatalFailure()) return;
    }
  }
}

}  // namespace
}  // namespace attnspan
