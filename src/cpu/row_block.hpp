#pragma once
// A block of query rows that one work item owns. The rows of all query heads of a KV head are stacked,
// position by position: stacked row r is query row r / group of query head kv_head * group + r % group. Spans
// stay monotonic along stacked rows, and one loaded tile of keys serves every head of the group.

#include <cstdint>

#include "core/problem.hpp"

namespace attnspan::cpu {

struct RowBlock {
  const Problem* problem = nullptr;
  Sequence sequence;
  int64_t kv_head = 0;
  int64_t begin = 0;  // stacked rows [begin, end)
  int64_t end = 0;

  int64_t query_row(int64_t stacked) const { return stacked / problem->group(); }
  int64_t head(int64_t stacked) const { return kv_head * problem->group() + stacked % problem->group(); }
  KeySpan span(int64_t stacked) const { return sequence.rule.span(query_row(stacked)); }
  // Of the stacked rows [from, to).
  KeySpan hull(int64_t from, int64_t to) const {
    return sequence.rule.hull(query_row(from), query_row(to - 1) + 1);
  }
  KeySpan core(int64_t from, int64_t to) const {
    return sequence.rule.core(query_row(from), query_row(to - 1) + 1);
  }
  // Element offsets in query-side tensors and in lse.
  int64_t index(const Rows& rows, int64_t stacked) const {
    return rows.index(sequence.batch, head(stacked), sequence.q_row0 + query_row(stacked));
  }
  // Where the row lies in a query-side tensor.
  char* address(const Rows& rows, int64_t stacked) const {
    return static_cast<char*>(rows.data) + index(rows, stacked) * size_of(problem->dtype);
  }
};

// Score units: kernels keep raw products query . key, so that differences from the maximum are exact for huge
// logits too; `unit` > 0 turns a difference into natural logits. A negative softmax_scale negates the query.
inline float query_sign(const Problem& problem) { return problem.softmax_scale < 0 ? -1.0F : 1.0F; }
inline float score_unit(const Problem& problem) {
  return problem.has_score_transform() ? 1.0F : query_sign(problem) * problem.softmax_scale;
}

}  // namespace attnspan::cpu
