// The cache functions of the C ABI: the same cache as the C++ class, statuses and messages for what goes
// wrong.

#include "attnspan/kv_cache.hpp"

#include <gmock/gmock.h>

#include <cstring>
#include <random>

#include "../io/temp_folder.hpp"
#include "attnspan/attnspan.h"

namespace attnspan {
namespace {

using testing::HasSubstr;

attnspan_tensor rows(std::vector<float>& values, int64_t tokens, int64_t heads, int64_t dim) {
  return attnspan_contiguous(values.data(), ATTNSPAN_F32, 3, tokens, heads, dim, 0);
}

std::vector<float> random_values(int64_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<size_t>(count));
  for (float& x : values) x = normal(random);
  return values;
}

class CCache : public testing::Test {
 protected:
  void SetUp() override {
    config_.kv_heads = 2;
    config_.head_dim = 32;
    config_.key_format = ATTNSPAN_KV_Q8;
    config_.value_format = ATTNSPAN_KV_TBQ4;
    config_.page_size = 16;
    ASSERT_EQ(attnspan_kv_cache_create(&config_, &cache_), ATTNSPAN_OK) << attnspan_last_error();
  }
  void TearDown() override { attnspan_kv_cache_destroy(cache_); }

  attnspan_status append(int64_t sequence, int64_t tokens, uint64_t seed) {
    std::vector<float> key = random_values(tokens * 64, seed), value = random_values(tokens * 64, seed + 1);
    const attnspan_tensor k = rows(key, tokens, 2, 32), v = rows(value, tokens, 2, 32);
    return attnspan_kv_cache_append(cache_, sequence, &k, &v, nullptr);
  }
  int64_t seqlen(int64_t sequence) {
    int64_t tokens = -1;
    EXPECT_EQ(attnspan_kv_cache_seqlen(cache_, sequence, &tokens), ATTNSPAN_OK) << attnspan_last_error();
    return tokens;
  }
  // Attention of one query row over the chosen sequences.
  std::vector<float> attend(const attnspan_kv_cache* cache, const std::vector<int64_t>& sequences) {
    const auto batch = static_cast<int64_t>(sequences.size());
    std::vector<float> query = random_values(batch * 4 * 32, 9), out(query.size(), NAN);
    attnspan_forward_args args = attnspan_forward_args_init();
    args.query = attnspan_contiguous(query.data(), ATTNSPAN_F32, 4, batch, 1, 4, 32);
    args.out = attnspan_contiguous(out.data(), ATTNSPAN_F32, 4, batch, 1, 4, 32);
    attnspan_execution execution = attnspan_execution_init();
    execution.backend = "reference";
    attnspan_result result = attnspan_result_init();
    EXPECT_EQ(attnspan_kv_cache_forward(cache, sequences.data(), batch, &args, &execution, &result),
              ATTNSPAN_OK)
        << attnspan_last_error();
    EXPECT_STREQ(result.backend, "reference");
    return out;
  }

  attnspan_kv_cache_config config_ = attnspan_kv_cache_config_init();
  attnspan_kv_cache* cache_ = nullptr;
};

TEST_F(CCache, DefaultsAreThoseOfTheCppConfig) {
  attnspan_kv_cache* cache = nullptr;
  ASSERT_EQ(attnspan_kv_cache_create(nullptr, &cache), ATTNSPAN_OK);
  attnspan_kv_cache_config config = attnspan_kv_cache_config_init(), given = config;
  std::memset(reinterpret_cast<char*>(&config) + sizeof(size_t), 0x5a, sizeof(config) - sizeof(size_t));
  ASSERT_EQ(attnspan_kv_cache_get_config(cache, &config), ATTNSPAN_OK);
  given.head_dim_v = given.head_dim;  // filled in
  EXPECT_EQ(std::memcmp(&config, &given, sizeof(config)), 0);
  attnspan_kv_cache_destroy(cache);
  attnspan_kv_cache_destroy(nullptr);
}

TEST_F(CCache, GrowsForksTrimsAndAttendsAsInCpp) {
  ASSERT_EQ(append(0, 40, 1), ATTNSPAN_OK);
  int64_t child = -1;
  ASSERT_EQ(attnspan_kv_cache_fork(cache_, 0, &child), ATTNSPAN_OK);
  EXPECT_EQ(child, 1);
  ASSERT_EQ(append(child, 3, 5), ATTNSPAN_OK);
  ASSERT_EQ(attnspan_kv_cache_trim(cache_, 0, 33), ATTNSPAN_OK);
  EXPECT_EQ(seqlen(0), 33);
  EXPECT_EQ(seqlen(1), 43);

  KvCache expected({.kv_heads = 2,
                    .head_dim = 32,
                    .key_format = KvFormat::q8,
                    .value_format = KvFormat::tbq4,
                    .page_size = 16,
                    .batch = 2});
  const auto append_to = [&](int64_t sequence, int64_t tokens, uint64_t seed) {
    const std::vector<float> key = random_values(40 * 64, seed), value = random_values(40 * 64, seed + 1);
    expected.append(sequence, contiguous(key.data(), DType::f32, {tokens, 2, 32}),
                    contiguous(value.data(), DType::f32, {tokens, 2, 32}));
  };
  append_to(0, 33, 1);
  append_to(1, 40, 1);
  append_to(1, 3, 5);
  std::vector<float> query = random_values(2 * 4 * 32, 9), out(query.size());
  ForwardArgs args;
  args.query = contiguous(query.data(), DType::f32, {2, 1, 4, 32});
  args.out = contiguous(out.data(), DType::f32, {2, 1, 4, 32});
  args.cache = &expected.view();
  forward(args, {.backend = "reference"});
  EXPECT_EQ(attend(cache_, {0, 1}), out);

  // The view is what attnspan_forward takes.
  attnspan_kv_view view = attnspan_kv_view_init();
  ASSERT_EQ(attnspan_kv_cache_view(cache_, &view), ATTNSPAN_OK);
  EXPECT_EQ(view.batch, 2);
  EXPECT_EQ(view.max_seqlen, 43);
  EXPECT_EQ(view.key.format, ATTNSPAN_KV_Q8);

  attnspan_kv_cache_memory memory = attnspan_kv_cache_memory_init();
  ASSERT_EQ(attnspan_kv_cache_get_memory(cache_, &memory), ATTNSPAN_OK);
  EXPECT_EQ(memory.bytes_per_token, expected.memory().bytes_per_token);
  EXPECT_EQ(memory.pages_shared, 2);
  EXPECT_EQ(memory.tokens, 76);

  ASSERT_EQ(attnspan_kv_cache_release(cache_, 1), ATTNSPAN_OK);
  int64_t added = -1, batch = -1;
  ASSERT_EQ(attnspan_kv_cache_add_sequence(cache_, &added), ATTNSPAN_OK);
  ASSERT_EQ(attnspan_kv_cache_batch(cache_, &batch), ATTNSPAN_OK);
  EXPECT_EQ(added, 1);
  EXPECT_EQ(batch, 2);
}

TEST_F(CCache, SavesLoadsAndConverts) {
  const io::TempFolder folder;
  ASSERT_EQ(append(0, 40, 1), ATTNSPAN_OK);
  ASSERT_EQ(attnspan_kv_cache_save(cache_, folder.file("a.kv").c_str()), ATTNSPAN_OK)
      << attnspan_last_error();
  attnspan_kv_cache *loaded = nullptr, *converted = nullptr;
  ASSERT_EQ(attnspan_kv_cache_load(folder.file("a.kv").c_str(), 1, &loaded), ATTNSPAN_OK);
  EXPECT_EQ(attend(loaded, {0}), attend(cache_, {0}));
  ASSERT_EQ(attnspan_kv_cache_convert(loaded, ATTNSPAN_KV_F32, ATTNSPAN_KV_F32, ATTNSPAN_ENCODE_QUALITY,
                                      &converted),
            ATTNSPAN_OK);
  const std::vector<float> exact = attend(cache_, {0}), again = attend(converted, {0});
  for (size_t i = 0; i < exact.size(); ++i) EXPECT_NEAR(exact[i], again[i], 1e-5);
  attnspan_kv_cache_destroy(loaded);
  attnspan_kv_cache_destroy(converted);
}

TEST_F(CCache, RefusalsHaveAStatusAndAMessage) {
  EXPECT_EQ(append(7, 1, 1), ATTNSPAN_INVALID_ARGUMENT);
  EXPECT_THAT(attnspan_last_error(), HasSubstr("sequence: found 7, expected 0 to 0"));
  EXPECT_EQ(attnspan_kv_cache_trim(nullptr, 0, 0), ATTNSPAN_INVALID_ARGUMENT);
  EXPECT_THAT(attnspan_last_error(), HasSubstr("cache: found a null pointer"));
  EXPECT_EQ(attnspan_kv_cache_append(cache_, 0, nullptr, nullptr, nullptr), ATTNSPAN_INVALID_ARGUMENT);
  EXPECT_EQ(attnspan_kv_cache_seqlen(cache_, 0, nullptr), ATTNSPAN_INVALID_ARGUMENT);
  attnspan_kv_cache* cache = nullptr;
  EXPECT_EQ(attnspan_kv_cache_load("/no/such/file", 0, &cache), ATTNSPAN_IO);
  EXPECT_THAT(attnspan_last_error(), HasSubstr("/no/such/file: cannot be read"));
  EXPECT_EQ(cache, nullptr);
  attnspan_kv_cache_config wrong = config_;
  wrong.page_size = 17;
  EXPECT_EQ(attnspan_kv_cache_create(&wrong, &cache), ATTNSPAN_INVALID_ARGUMENT);
  wrong = config_;
  wrong.key_format = 5;
  EXPECT_EQ(attnspan_kv_cache_create(&wrong, &cache), ATTNSPAN_INVALID_ARGUMENT);
  wrong = config_;
  wrong.max_pages = 1;
  attnspan_kv_cache* small = nullptr;
  ASSERT_EQ(attnspan_kv_cache_create(&wrong, &small), ATTNSPAN_OK);
  std::swap(small, cache_);
  EXPECT_EQ(append(0, 17, 1), ATTNSPAN_OUT_OF_MEMORY);
  EXPECT_EQ(seqlen(0), 0);
  attnspan_kv_cache_destroy(small);
}

}  // namespace
}  // namespace attnspan
