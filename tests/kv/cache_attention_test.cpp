// Attention over a KvCache: equal to attention over the values that its rows decode to.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "cache_model.hpp"
#include "registry/registry.hpp"

namespace attnspan {
namespace {

using kv_test::append;
using kv_test::expected_row;
using kv_test::Random;
using kv_test::random_tokens;
using kv_test::random_values;
using kv_test::Token;

struct Attended {
  std::vector<float> out, lse;
};

// One sequence at a time over dense, decoded f32 keys and values, on the reference backend.
Attended over_decoded(const KvCacheConfig& c, const std::vector<Token>& tokens,
                      const std::vector<float>& query, int64_t rows, int64_t heads,
                      const AttentionOptions& options) {
  const auto length = static_cast<int64_t>(tokens.size());
  std::vector<float> key, value;
  for (int64_t p = 0; p < length; ++p) {
    const std::vector<float> k = expected_row(c, tokens[p], p, KvSide::key);
    const std::vector<float> v = expected_row(c, tokens[p], p, KvSide::value);
    key.insert(key.end(), k.begin(), k.end());
    value.insert(value.end(), v.begin(), v.end());
  }
  Attended result{std::vector<float>(rows * heads * c.head_dim_v, NAN),
                  std::vector<float>(heads * rows, NAN)};
  ForwardArgs args;
  args.query = contiguous(query.data(), DType::f32, {1, rows, heads, c.head_dim});
  args.key = contiguous(key.data(), DType::f32, {1, length, c.kv_heads, c.head_dim});
  args.value = contiguous(value.data(), DType::f32, {1, length, c.kv_heads, c.head_dim_v});
  args.out = contiguous(result.out.data(), DType::f32, {1, rows, heads, c.head_dim_v});
  args.lse = contiguous(result.lse.data(), DType::f32, {1, heads, rows});
  args.options = options;
  forward(args, {.backend = "reference"});
  return result;
}

void expect_near(const float* result, const std::vector<float>& expected, double tolerance,
                 const std::string& what) {
  for (size_t i = 0; i < expected.size(); ++i) {
    if (std::isinf(expected[i])) {
      ASSERT_EQ(result[i], expected[i]) << what << " " << i;
    } else {
      ASSERT_NEAR(result[i], expected[i], tolerance) << what << " " << i;
    }
  }
}

struct Setting {
  std::string name;
  KvCacheConfig config;
  std::vector<int64_t> lengths;
  int64_t rows = 1, heads = 4;
  bool alibi = false, sinks = false, bias = false;
};

// The CPU takes tbq4 in int16 (docs/decisions/0011), CUDA q8 and tbq4 in 16-bit floats: 1e-3 of values that
// are about 1. Everything else is f32.
double tolerance_of(const KvCacheConfig& c, const std::string& backend) {
  const auto is = [&](KvFormat format) { return c.key_format == format || c.value_format == format; };
  const bool inexact = (backend == "cpu" && is(KvFormat::tbq4)) ||
                       (backend == "cuda" && (is(KvFormat::tbq4) || is(KvFormat::q8)));
  return inexact ? 1e-3 : 2e-5;
}

// Fills a cache token by token, attends with forward(cache, ...) and checks each sequence against dense,
// decoded values. In window mode the oracle is a masking bias: first tokens and the last `window` keys.
void check(const Setting& s, const std::string& backend) {
  Random random(11);
  KvCacheConfig config = s.config;
  config.batch = static_cast<int64_t>(s.lengths.size());
  KvCache cache(config);
  config = cache.config();
  std::vector<std::vector<Token>> tokens;
  for (int64_t b = 0; b < config.batch; ++b) {
    tokens.push_back(random_tokens(random, config, s.lengths[b]));
    for (int64_t t = 0; t < s.lengths[b]; ++t) append(cache, b, tokens[b], t, 1);
  }
  const int64_t rows = s.rows, heads = s.heads, dim_v = config.head_dim_v;
  const int64_t longest = *std::max_element(s.lengths.begin(), s.lengths.end());
  const std::vector<float> query = random_values(random, config.batch * rows * heads * config.head_dim);
  const std::vector<float> slopes = random_values(random, heads);
  const std::vector<float> sinks = random_values(random, heads);
  const std::vector<float> bias = random_values(random, config.batch * longest);
  std::vector<float> out(config.batch * rows * heads * dim_v, NAN), lse(config.batch * heads * rows, NAN);
  ForwardArgs args;
  args.query = contiguous(query.data(), DType::f32, {config.batch, rows, heads, config.head_dim});
  args.out = contiguous(out.data(), DType::f32, {config.batch, rows, heads, dim_v});
  args.lse = contiguous(lse.data(), DType::f32, {config.batch, heads, rows});
  args.options.causal = true;
  if (s.alibi) args.options.alibi_slopes = contiguous(slopes.data(), DType::f32, {heads});
  if (s.sinks) args.options.sinks = contiguous(sinks.data(), DType::f32, {heads});
  if (s.bias) args.options.bias = contiguous(bias.data(), DType::f32, {config.batch, 1, 1, longest});
  const Result result = forward(cache, args, {.backend = backend});
  EXPECT_EQ(result.backend, backend);

  const double tolerance = tolerance_of(config, backend);
  for (int64_t b = 0; b < config.batch; ++b) {
    AttentionOptions options = args.options;
    const int64_t length = s.lengths[b];
    std::vector<float> mask(rows * length, 0.0F);
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t p = 0; p < length; ++p) {
        const bool recent = config.window < 0 || p > i + length - rows - config.window;
        const float added = s.bias ? bias[b * longest + p] : 0.0F;
        mask[i * length + p] = recent || p < config.first_tokens ? added : -INFINITY;
      }
    }
    options.bias = contiguous(mask.data(), DType::f32, {1, 1, rows, length});
    const std::vector<float> own(query.begin() + b * rows * heads * config.head_dim,
                                 query.begin() + (b + 1) * rows * heads * config.head_dim);
    const Attended expected = over_decoded(config, tokens[b], own, rows, heads, options);
    const std::string what = s.name + ", sequence " + std::to_string(b);
    expect_near(out.data() + b * rows * heads * dim_v, expected.out, tolerance, what + ", out");
    expect_near(lse.data() + b * heads * rows, expected.lse, tolerance, what + ", lse");
  }
}

std::vector<Setting> settings() {
  std::vector<Setting> all;
  for (const KvFormat k : {KvFormat::f32, KvFormat::f16, KvFormat::q8, KvFormat::tbq4}) {
    for (const KvFormat v : {KvFormat::bf16, KvFormat::q8, KvFormat::tbq4}) {
      all.push_back({std::string(name_of(k)) + "/" + name_of(v),
                     {.kv_heads = 2,
                      .head_dim = 64,
                      .head_dim_v = 128,
                      .key_format = k,
                      .value_format = v,
                      .page_size = 16},
                     {0, 1, 37, 200}});
    }
  }
  const KvCacheConfig tbq4{.kv_heads = 2,
                           .head_dim = 80,
                           .key_format = KvFormat::tbq4,
                           .value_format = KvFormat::tbq4,
                           .page_size = 16};
  KvCacheConfig window = tbq4, first = tbq4, both = tbq4, mla = tbq4;
  window.window = both.window = 40;
  first.first_tokens = both.first_tokens = 20;
  mla.kv_heads = 1;
  mla.head_dim = 576;
  mla.head_dim_v = 512;
  mla.value_is_key = true;
  const std::vector<int64_t> lengths{3, 20, 32, 33, 90, 300};
  all.push_back({"mla", mla, lengths, 1, 16});
  all.push_back({"window", window, lengths});
  all.push_back({"first tokens", first, lengths});
  all.push_back({"first tokens, all short", first, {1, 7, 31, 0}});
  all.push_back({"first tokens and window", both, lengths});
  all.push_back({"first tokens, rows and score transforms", first, {5, 31, 34, 90}, 5, 4, true, true, true});
  all.push_back({"first tokens, window, transforms", both, lengths, 1, 4, true, true, true});
  return all;
}

TEST(CacheAttention, EqualsAttentionOverDecodedValues) {
  for (const RegisteredBackend& entry : backends()) {
    if (entry.backend == nullptr || entry.backend->device() != Device::cpu) continue;
    for (const Setting& setting : settings()) {
      SCOPED_TRACE(entry.name + ", " + setting.name);
      try {
        check(setting, entry.name);
      } catch (const Error& error) {
        // A backend may say no to a format; the reference may not.
        if (error.code() != ErrorCode::unsupported || entry.name == "reference") throw;
      }
    }
  }
}

TEST(CacheAttention, LowPrecisionOutputsAreRoundedOnceAndGuarded) {
  Random random(12);
  KvCacheConfig config{.kv_heads = 1, .head_dim = 32, .page_size = 16, .first_tokens = 16};
  KvCache cache(config);
  append(cache, 0, random_tokens(random, cache.config(), 50));
  std::vector<uint16_t> query(2 * 32), out(2 * 32);
  const std::vector<float> values = random_values(random, 2 * 32, DType::f16);
  for (size_t i = 0; i < query.size(); ++i) query[i] = f16_from_f32(values[i]);
  std::vector<float> exact(2 * 32);
  ForwardArgs args;
  args.query = contiguous(values.data(), DType::f32, {1, 1, 2, 32});
  args.out = contiguous(exact.data(), DType::f32, {1, 1, 2, 32});
  forward(cache, args, {.backend = "reference"});
  args.query = contiguous(query.data(), DType::f16, {1, 1, 2, 32});
  args.out = contiguous(out.data(), DType::f16, {1, 1, 2, 32});
  forward(cache, args, {.backend = "reference"});
  for (size_t i = 0; i < out.size(); ++i) EXPECT_EQ(out[i], f16_from_f32(exact[i]));

  // A value that is not a number is replaced in every row that sees it, and counted.
  std::vector<Token> bad = random_tokens(random, cache.config(), 1);
  bad[0].value[3] = NAN;
  append(cache, 0, bad);
  args.options.nan_guard = true;
  const Result guarded = forward(cache, args, {.backend = "reference"});
  EXPECT_EQ(guarded.nonfinite_replaced, 2);  // column 3 of both heads
  EXPECT_EQ(out[3], 0);
}

TEST(CacheAttention, AWindowLargerThanTheCacheKeepsIsRefused) {
  KvCache cache({.head_dim = 16, .page_size = 16, .window = 32});
  const std::vector<float> query(16), out(16);
  ForwardArgs args;
  args.query = contiguous(query.data(), DType::f32, {1, 1, 1, 16});
  args.out = contiguous(out.data(), DType::f32, {1, 1, 1, 16});
  args.options.window_left = 32;
  EXPECT_THROW(forward(cache, args), Error);
  args.options.window_left = 31;
  EXPECT_NO_THROW(forward(cache, args));
}

}  // namespace
}  // namespace attnspan
