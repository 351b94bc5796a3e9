// KvCache: pages, sharing, windows, first tokens, accounting and refusals.

#include "attnspan/kv_cache.hpp"

#include <gtest/gtest.h>

#include "attnspan/error.hpp"
#include "cache_model.hpp"

namespace attnspan {
namespace {

using kv_test::append;
using kv_test::cached_row;
using kv_test::expected_row;
using kv_test::Random;
using kv_test::random_tokens;
using kv_test::stored_bytes;
using kv_test::Token;

constexpr KvFormat kAllFormats[] = {KvFormat::f32, KvFormat::f16, KvFormat::bf16, KvFormat::q8,
                                    KvFormat::tbq4};

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

void expect_tokens(const KvCache& cache, int64_t sequence, const std::vector<Token>& tokens) {
  ASSERT_EQ(cache.seqlen(sequence), static_cast<int64_t>(tokens.size()));
  for (int64_t p = 0; p < static_cast<int64_t>(tokens.size()); ++p) {
    if (p >= cache.config().first_tokens && p < cache.first_position(sequence)) continue;
    for (const KvSide side : {KvSide::key, KvSide::value}) {
      ASSERT_EQ(cached_row(cache, sequence, p, side), expected_row(cache.config(), tokens[p], p, side))
          << "position " << p << (side == KvSide::key ? " key" : " value");
    }
  }
}

TEST(KvCache, TokensOneByOneAndWholePrefillsHaveTheSameBytes) {
  Random random(1);
  for (const KvFormat k : kAllFormats) {
    for (const KvFormat v : kAllFormats) {
      const KvCacheConfig config{.kv_heads = 3,
                                 .head_dim = 80,
                                 .head_dim_v = 40,
                                 .key_format = k,
                                 .value_format = v,
                                 .page_size = 16,
                                 .batch = 2};
      const std::vector<Token> tokens = random_tokens(random, config, 53);
      KvCache cache(config);
      append(cache, 0, tokens);
      for (int64_t t = 0; t < 53; ++t) append(cache, 1, tokens, t, 1);
      EXPECT_EQ(stored_bytes(cache, 0), stored_bytes(cache, 1)) << name_of(k) << " " << name_of(v);
      expect_tokens(cache, 0, tokens);
    }
  }
}

TEST(KvCache, ThreadsNeverChangeTheBytes) {
  Random random(2);
  KvCacheConfig config{
      .kv_heads = 8, .head_dim = 128, .key_format = KvFormat::tbq4, .value_format = KvFormat::q8};
  const std::vector<Token> tokens = random_tokens(random, config, 300);
  config.threads = 1;
  KvCache one(config);
  append(one, 0, tokens);
  config.threads = 4;
  KvCache four(config);
  append(four, 0, tokens);
  EXPECT_EQ(stored_bytes(one, 0), stored_bytes(four, 0));
}

TEST(KvCache, EveryDtypeLayoutAndWholeBatchesAreRead) {
  Random random(3);
  const KvCacheConfig config{.kv_heads = 2, .head_dim = 24, .page_size = 16, .batch = 3};
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    // [batch, heads, tokens, dim] in memory, with a gap behind each row
    const int64_t gap = 5;
    const int64_t row = 24 + gap;
    const std::vector<float> values = kv_test::random_values(random, 3 * 2 * 7 * row, dtype);
    std::vector<std::byte> memory(values.size() * 4);
    for (size_t i = 0; i < values.size(); ++i) store_f32(memory.data(), i, dtype, values[i]);
    Tensor tensor = bhsd(memory.data(), dtype, 3, 7, 2, row);
    tensor.shape[3] = 24;
    KvCache cache(config);
    EXPECT_EQ(cache.append(tensor, tensor), 0);
    for (int64_t b = 0; b < 3; ++b) {
      for (int64_t t = 0; t < 7; ++t) {
        const std::vector<float> key = cached_row(cache, b, t, KvSide::key);
        for (int64_t h = 0; h < 2; ++h) {
          for (int64_t d = 0; d < 24; ++d) {
            const float x = values[((b * 2 + h) * 7 + t) * row + d];
            EXPECT_EQ(key[h * 24 + d], f32_from_f16(f16_from_f32(x)));
          }
        }
      }
    }
  }
}

TEST(KvCache, ForkSharesPagesAndNeverChangesItsParent) {
  Random random(4);
  const KvCacheConfig config{.kv_heads = 2,
                             .head_dim = 64,
                             .key_format = KvFormat::q8,
                             .value_format = KvFormat::tbq4,
                             .page_size = 16};
  KvCache cache(config);
  std::vector<Token> parent = random_tokens(random, config, 41);  // two full pages and one with 9 tokens
  append(cache, 0, parent);
  const std::vector<uint8_t> before = stored_bytes(cache, 0);
  const int64_t child = cache.fork(0);
  EXPECT_EQ(cache.memory().pages_used, 3);
  EXPECT_EQ(cache.memory().pages_shared, 3);

  const std::vector<Token> more = random_tokens(random, config, 20);
  append(cache, child, more);
  EXPECT_EQ(stored_bytes(cache, 0), before);
  EXPECT_EQ(cache.memory().pages_shared, 2);  // the full ones
  EXPECT_EQ(cache.memory().pages_used, 5);
  std::vector<Token> expected = parent;
  expected.insert(expected.end(), more.begin(), more.end());
  expect_tokens(cache, child, expected);

  // The parent may be the one that writes, also into the middle of a shared full page.
  const int64_t second = cache.fork(0);
  cache.trim(0, 20);
  append(cache, 0, more);
  expect_tokens(cache, second, parent);
  expect_tokens(cache, child, expected);
  parent.resize(20);
  parent.insert(parent.end(), more.begin(), more.end());
  expect_tokens(cache, 0, parent);

  cache.release(child);
  cache.release(second);
  EXPECT_EQ(cache.memory().pages_shared, 0);
  EXPECT_EQ(cache.memory().pages_used, 3);
  EXPECT_EQ(cache.fork(0), child);  // a released index comes back first
  expect_tokens(cache, child, parent);
}

TEST(KvCache, AWindowRecyclesItsPages) {
  Random random(5);
  const KvCacheConfig config{.kv_heads = 1, .head_dim = 32, .page_size = 16, .window = 40};
  KvCache cache(config);
  const std::vector<Token> tokens = random_tokens(random, config, 1000);
  for (int64_t t = 0; t < 1000; ++t) {
    append(cache, 0, tokens, t, 1);
    const int64_t first = cache.first_position(0);
    EXPECT_EQ(first % 16, 0);
    EXPECT_LE(first, std::max<int64_t>(0, t + 1 - 40));
    EXPECT_LE(cache.memory().pages_used, 4);  // 40 keys reach into 4 pages of 16
  }
  EXPECT_EQ(cache.memory().pages_reserved, 4);
  expect_tokens(cache, 0, tokens);
  EXPECT_NE(error_of([&] { cached_row(cache, 0, 100, KvSide::key); }).find("position: found 100"),
            std::string::npos);

  // A prefill longer than the window keeps what its own rows see, until the next append.
  const std::vector<Token> prefill = random_tokens(random, config, 200);
  append(cache, 0, prefill);
  EXPECT_LE(cache.first_position(0), 1000 - 40);
  append(cache, 0, prefill, 0, 1);
  EXPECT_EQ(cache.first_position(0), (1200 - 40) / 16 * 16);
}

TEST(KvCache, TrimmingBehindTheWindowIsRefused) {
  Random random(6);
  const KvCacheConfig config{.kv_heads = 1, .head_dim = 32, .page_size = 16, .window = 40};
  KvCache cache(config);
  const std::vector<Token> tokens = random_tokens(random, config, 200);
  for (int64_t t = 0; t < 200; ++t) append(cache, 0, tokens, t, 1);
  const int64_t kept = cache.first_position(0);
  cache.trim(0, kept + 40);
  EXPECT_EQ(cache.seqlen(0), kept + 40);
  EXPECT_EQ(error_of([&] { cache.trim(0, kept + 39); }),
            "length: found 183, expected 0 or less, or 184 or more: the window has recycled the keys before "
            "position 144");
  cache.trim(0, 0);
  append(cache, 0, tokens, 0, 30);
  expect_tokens(cache, 0, {tokens.begin(), tokens.begin() + 30});
}

TEST(KvCache, FirstTokensHaveFormatsOfTheirOwnAndStayInAWindow) {
  Random random(7);
  const KvCacheConfig config{.kv_heads = 2,
                             .head_dim = 64,
                             .key_format = KvFormat::tbq4,
                             .value_format = KvFormat::tbq4,
                             .page_size = 16,
                             .window = 32,
                             .first_tokens = 5,
                             .first_key_format = KvFormat::f32,
                             .first_value_format = KvFormat::f16};
  KvCache cache(config);
  EXPECT_EQ(cache.config().first_tokens, 16);  // whole pages
  const std::vector<Token> tokens = random_tokens(random, config, 150);
  for (int64_t t = 0; t < 150; ++t) append(cache, 0, tokens, t, 1);
  expect_tokens(cache, 0, tokens);  // the first 16 tokens exactly, the recent ones as tbq4
  EXPECT_GT(cache.first_position(0), 16);
  EXPECT_EQ(cached_row(cache, 0, 15, KvSide::key), tokens[15].key);
  cache.trim(0, 10);
  expect_tokens(cache, 0, {tokens.begin(), tokens.begin() + 10});
  append(cache, 0, tokens, 10, 30);
  expect_tokens(cache, 0, {tokens.begin(), tokens.begin() + 40});
}

TEST(KvCache, ValuesThatAreKeysShareTheirRows) {
  Random random(8);
  for (const KvFormat format : kAllFormats) {
    const KvCacheConfig config{.kv_heads = 1,
                               .head_dim = 576,
                               .head_dim_v = 512,
                               .key_format = format,
                               .value_is_key = true,
                               .page_size = 16};
    KvCache cache(config);
    const std::vector<Token> tokens = random_tokens(random, config, 40);
    append(cache, 0, tokens);
    expect_tokens(cache, 0, tokens);
    EXPECT_TRUE(shares_rows(cache.view()));
    EXPECT_EQ(cache.memory().bytes_per_token,
              cache.view().key.token_stride + ops_of(format).row_scales(576) * 2);
  }
}

TEST(KvCache, MemoryIsCountedInPagesAndBytes) {
  // tbq4 at 128: 64 bytes of codes and one f16 norm for each of K and V and each of 4 heads.
  const KvCacheConfig config{.kv_heads = 4,
                             .head_dim = 128,
                             .key_format = KvFormat::tbq4,
                             .value_format = KvFormat::tbq4,
                             .page_size = 32,
                             .batch = 2};
  KvCache cache(config);
  Random random(9);
  append(cache, 0, random_tokens(random, config, 33));
  append(cache, 1, random_tokens(random, config, 1));
  const KvCacheMemory memory = cache.memory();
  EXPECT_EQ(memory.bytes_per_token, 4 * 2 * 66);
  EXPECT_EQ(memory.pages_used, 3);
  EXPECT_EQ(memory.bytes_used, 3 * 32 * 4 * 2 * 66);
  EXPECT_EQ(memory.tokens, 34);
  EXPECT_GE(memory.pages_reserved, memory.pages_used);
  EXPECT_EQ(memory.bytes_reserved, memory.pages_reserved * 32 * 4 * 2 * 66);
}

TEST(KvCache, AFullPoolRefusesAndLeavesEverySequenceAsItWas) {
  Random random(10);
  const KvCacheConfig config{.kv_heads = 1, .head_dim = 16, .page_size = 16, .batch = 2, .max_pages = 3};
  KvCache cache(config);
  const std::vector<Token> tokens = random_tokens(random, config, 64);
  append(cache, 0, tokens, 0, 20);
  EXPECT_EQ(error_of([&] { append(cache, 0, tokens, 0, 40); }),
            "max_pages: all 3 pages of the pool are used");
  EXPECT_EQ(cache.memory().pages_used, 2);
  // A batch of which only one part fits is refused as a whole.
  const std::vector<float> rows = kv_test::random_values(random, 2 * 20 * 16);
  const Tensor batch = contiguous(rows.data(), DType::f32, {2, 20, 1, 16});
  EXPECT_THROW(cache.append(batch, batch), Error);
  EXPECT_EQ(cache.seqlen(1), 0);
  EXPECT_EQ(cache.memory().pages_used, 2);
  expect_tokens(cache, 0, {tokens.begin(), tokens.begin() + 20});
}

TEST(KvCache, SaturatedScalesAreCounted) {
  const KvCacheConfig config{
      .kv_heads = 1, .head_dim = 128, .key_format = KvFormat::tbq4, .value_format = KvFormat::q8};
  KvCache cache(config);
  std::vector<Token> tokens{{std::vector<float>(128, 1e6F), std::vector<float>(128, 1.0F)}};
  EXPECT_EQ(append(cache, 0, tokens), 1);
  tokens[0].value.assign(128, 1e9F);
  EXPECT_EQ(append(cache, 0, tokens), 5);  // one norm and four blocks of 32
  EXPECT_EQ(cache.saturated_scales(), 6);
}

TEST(KvCache, WrongArgumentsAreRefusedByName) {
  const KvCacheConfig config{.kv_heads = 2, .head_dim = 16, .page_size = 16};
  KvCache cache(config);
  const std::vector<float> memory(1000);
  const Tensor good = contiguous(memory.data(), DType::f32, {3, 2, 16});
  const auto expect_error = [](const std::function<void()>& call, const std::string& start) {
    const std::string error = error_of(call);
    EXPECT_TRUE(error.starts_with(start)) << error;
  };
  expect_error([&] { cache.append(1, good, good); }, "sequence: found 1, expected 0 to 0");
  expect_error(
      [&] {
        cache.append(0, contiguous(memory.data(), DType::f32, {3, 4, 16}), good);
      },
      "key: found");
  expect_error(
      [&] {
        cache.append(0, good, contiguous(memory.data(), DType::f32, {4, 2, 16}));
      },
      "value: found");
  expect_error([&] { cache.append(0, good, Tensor{}); }, "value: found");
  expect_error(
      [&] {
        cache.append(0, contiguous(memory.data(), DType::i32, {3, 2, 16}), good);
      },
      "key: found");
  expect_error([&] { cache.trim(0, 1); }, "length: found 1, expected 0 to 0");
  EXPECT_EQ(cache.seqlen(0), 0);
  expect_error([&] { cached_row(cache, 0, 0, KvSide::key); },
               "position: found 0, expected a stored position, but");
  expect_error([&] { cached_row(cache, 0, -1, KvSide::key); },
               "position: found -1, expected a stored position");
  const auto expect_config = [&](const KvCacheConfig& wrong, const std::string& start) {
    expect_error([&] { KvCache refused(wrong); }, start);
  };
  expect_config({.page_size = 24}, "page_size: found 24, expected a power of two");
  expect_config({.page_size = 8}, "page_size: found 8");
  expect_config({.kv_heads = 0}, "kv_heads: found 0");
  expect_config({.head_dim = 577}, "head_dim: found 577, expected 1 to 576");
  expect_config({.head_dim = 64, .head_dim_v = 65, .value_is_key = true},
                "head_dim_v: found 65, expected 1 to 64");
  expect_config({.window = 0}, "window: found 0");
  expect_config({.key_format = static_cast<KvFormat>(9)}, "format: found 9");
  KvCache with_first({.first_tokens = 4});
  expect_error([&] { with_first.view(); }, "first_tokens: found 64, expected 0");
}

}  // namespace
}  // namespace attnspan
