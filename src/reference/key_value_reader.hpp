#pragma once
// Rows of keys and values as doubles, from dense tensors or from a cache in any format.

#include <vector>

#include "core/dtype.hpp"
#include "core/problem.hpp"
#include "kv/format.hpp"

namespace attnspan::reference {

inline std::vector<double> read_row(const Rows& rows, int64_t index, int64_t dim, DType dtype) {
  std::vector<double> row(static_cast<size_t>(dim));
  for (int64_t d = 0; d < dim; ++d) row[d] = load_f32(rows.data, index + d, dtype);
  return row;
}

// Row `position` of one head of a cache, decoded to its original (not rotated) values.
inline std::vector<double> read_cache_row(const KvView& cache, KvSide side, int64_t batch, int64_t head,
                                          int64_t position) {
  std::vector<float> values(static_cast<size_t>(rows_of(cache, side).dim));
  read_row(cache, side, batch, head, position, values.data());
  return {values.begin(), values.end()};
}

struct KeyValue {
  std::vector<std::vector<double>> key;    // [seqlen_k][head_dim]
  std::vector<std::vector<double>> value;  // [seqlen_k][head_dim_v]
};

// The keys and values of one KV head. Rows that do not exist (before the cache's first position) stay empty.
inline KeyValue read_key_value(const Problem& p, const Sequence& s, int64_t kv_head) {
  KeyValue kv;
  kv.key.resize(static_cast<size_t>(s.seqlen_k));
  kv.value.resize(static_cast<size_t>(s.seqlen_k));
  for (int64_t j = s.rule.key_begin; j < s.rule.key_limit; ++j) {
    if (p.cache != nullptr) {
      kv.key[j] = read_cache_row(*p.cache, KvSide::key, s.batch, kv_head, j);
      kv.value[j] = read_cache_row(*p.cache, KvSide::value, s.batch, kv_head, j);
    } else {
      kv.key[j] = read_row(p.key, p.key.index(s.batch, kv_head, s.k_row0 + j), p.head_dim, p.dtype);
      kv.value[j] = read_row(p.value, p.value.index(s.batch, kv_head, s.k_row0 + j), p.head_dim_v, p.dtype);
    }
  }
  return kv;
}

}  // namespace attnspan::reference
