#pragma once
// A cache as simple as it can be, to check KvCache against: every sequence is a list of tokens, every token
// the rows that its format decodes to.

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "attnspan/kv_cache.hpp"
#include "core/dtype.hpp"
#include "kv/format.hpp"

namespace attnspan::kv_test {

using Random = std::mt19937_64;

struct Token {
  std::vector<float> key, value;  // as appended, [kv_heads][dim]; no value where value_is_key
};

inline int64_t value_dim(const KvCacheConfig& c) { return c.head_dim_v == 0 ? c.head_dim : c.head_dim_v; }

inline std::vector<float> random_values(Random& random, int64_t count, DType dtype = DType::f32) {
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<size_t>(count));
  for (float& x : values) {
    x = normal(random);
    if (dtype == DType::f16) x = f32_from_f16(f16_from_f32(x));
    if (dtype == DType::bf16) x = f32_from_bf16(bf16_from_f32(x));
  }
  return values;
}

inline std::vector<Token> random_tokens(Random& random, const KvCacheConfig& c, int64_t count) {
  std::vector<Token> tokens(static_cast<size_t>(count));
  for (Token& token : tokens) {
    token.key = random_values(random, c.kv_heads * c.head_dim);
    if (!c.value_is_key) token.value = random_values(random, c.kv_heads * value_dim(c));
  }
  return tokens;
}

// [count, kv_heads, dim] of one side
inline std::vector<float> side_of(const std::vector<Token>& tokens, int64_t begin, int64_t count,
                                  KvSide side) {
  std::vector<float> values;
  for (int64_t t = begin; t < begin + count; ++t) {
    const std::vector<float>& row = side == KvSide::key ? tokens[t].key : tokens[t].value;
    values.insert(values.end(), row.begin(), row.end());
  }
  return values;
}

inline int64_t append(KvCache& cache, int64_t sequence, const std::vector<Token>& tokens, int64_t begin,
                      int64_t count) {
  const KvCacheConfig& c = cache.config();
  const std::vector<float> key = side_of(tokens, begin, count, KvSide::key);
  const std::vector<float> value = side_of(tokens, begin, count, KvSide::value);
  return cache.append(
      sequence, contiguous(key.data(), DType::f32, {count, c.kv_heads, c.head_dim}),
      c.value_is_key ? Tensor{} : contiguous(value.data(), DType::f32, {count, c.kv_heads, c.head_dim_v}));
}

inline int64_t append(KvCache& cache, int64_t sequence, const std::vector<Token>& tokens) {
  return append(cache, sequence, tokens, 0, static_cast<int64_t>(tokens.size()));
}

inline KvFormat format_at(const KvCacheConfig& c, KvSide side, int64_t position) {
  if (position < c.first_tokens) return side == KvSide::key ? c.first_key_format : c.first_value_format;
  return side == KvSide::key ? c.key_format : c.value_format;
}

// What the cache must decode for a token at a position: one side, [kv_heads][dim].
inline std::vector<float> expected_row(const KvCacheConfig& c, const Token& token, int64_t position,
                                       KvSide side) {
  const bool from_key = side == KvSide::key || c.value_is_key;
  const int64_t encoded = from_key ? c.head_dim : c.head_dim_v;
  const int64_t dim = side == KvSide::key ? c.head_dim : c.head_dim_v;
  const KvFormatOps& ops = ops_of(format_at(c, from_key ? KvSide::key : KvSide::value, position));
  std::vector<uint8_t> codes(ops.row_code_bytes(encoded));
  std::vector<uint16_t> scales(ops.row_scales(encoded));
  std::vector<float> decoded(encoded), row;
  for (int64_t h = 0; h < c.kv_heads; ++h) {
    const float* values = (from_key ? token.key : token.value).data() + h * encoded;
    ops.encode_row(values, encoded, c.encode_mode, codes.data(), scales.data());
    decode_row(ops, codes.data(), scales.data(), encoded, decoded.data());
    row.insert(row.end(), decoded.begin(), decoded.begin() + dim);
  }
  return row;
}

inline std::vector<float> cached_row(const KvCache& cache, int64_t sequence, int64_t position, KvSide side) {
  const KvCacheConfig& c = cache.config();
  std::vector<float> row(c.kv_heads * (side == KvSide::key ? c.head_dim : c.head_dim_v), NAN);
  if (side == KvSide::key) {
    cache.read_key(sequence, position, row.data());
  } else {
    cache.read_value(sequence, position, row.data());
  }
  return row;
}

// Stored bytes of every position of a sequence, through its view: codes and scales of K and V.
inline std::vector<uint8_t> stored_bytes(const KvCache& cache, int64_t sequence) {
  std::vector<uint8_t> bytes;
  const int64_t only[] = {sequence};
  const KvCacheView views = cache.select(only);
  for (const KvView* view : {views.first_view(), &views.view()}) {
    if (view == nullptr) continue;
    for (int64_t p = first_position_of(*view, 0); p < seqlen_of(*view, 0); ++p) {
      for (int64_t h = 0; h < view->kv_heads; ++h) {
        for (const KvSide side : {KvSide::key, KvSide::value}) {
          const RowAddress row = row_address(*view, side, 0, h, p);
          const KvFormatOps& ops = ops_of(rows_of(*view, side).format);
          const int64_t dim = encoded_dim(*view, side);
          bytes.insert(bytes.end(), row.codes, row.codes + ops.row_code_bytes(dim));
          const auto* scales = reinterpret_cast<const uint8_t*>(row.scales);
          if (scales != nullptr) bytes.insert(bytes.end(), scales, scales + 2 * ops.row_scales(dim));
        }
      }
    }
  }
  return bytes;
}

}  // namespace attnspan::kv_test
