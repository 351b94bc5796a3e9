#pragma once
// The span of keys that one query row may attend to. Every mask of the contract except a masking bias
// (causal, window, key_start / key_end, packed and unequal lengths) is one half-open span per row, and both
// ends never decrease with the row. Nothing else in the library knows the word "causal".
//
// The functions are plain integer arithmetic and compile for host and CUDA device alike.

#include <cstdint>

#ifdef __CUDACC__
#define ATTNSPAN_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define ATTNSPAN_HOST_DEVICE inline
#endif

namespace attnspan {

struct KeySpan {
  int64_t begin = 0;
  int64_t end = 0;  // begin >= end: the row sees no key

  ATTNSPAN_HOST_DEVICE bool empty() const { return begin >= end; }
  ATTNSPAN_HOST_DEVICE int64_t size() const { return begin < end ? end - begin : 0; }
  ATTNSPAN_HOST_DEVICE bool contains(int64_t key) const { return begin <= key && key < end; }
};

// Larger than any position, small enough that sums of a few never overflow.
inline constexpr int64_t kUnlimited = int64_t{1} << 60;

// The mask of one sequence. `causal` has become window_right = min(window_right, 0).
struct SpanRule {
  int64_t diagonal = 0;  // row i sits at key position i + diagonal
  int64_t window_left = kUnlimited;
  int64_t window_right = kUnlimited;
  int64_t key_begin = 0;  // keys of the sequence that exist: [key_begin, key_limit)
  int64_t key_limit = 0;
  const int32_t* key_start = nullptr;  // per row, or null
  const int32_t* key_end = nullptr;

  ATTNSPAN_HOST_DEVICE KeySpan span(int64_t row) const {
    const int64_t position = row + diagonal;
    int64_t begin = position - window_left;
    int64_t end = position + window_right + 1;
    if (key_start != nullptr && begin < key_start[row]) begin = key_start[row];
    if (key_end != nullptr && end > key_end[row]) end = key_end[row];
    if (begin < key_begin) begin = key_begin;
    if (end > key_limit) end = key_limit;
    return {begin, end};
  }

  // The keys that any row of [row_begin, row_end) sees (spans are monotonic, so the ends come from the
  // first and the last row).
  ATTNSPAN_HOST_DEVICE KeySpan hull(int64_t row_begin, int64_t row_end) const {
    return {span(row_begin).begin, span(row_end - 1).end};
  }
  // The keys that every row of [row_begin, row_end) sees.
  ATTNSPAN_HOST_DEVICE KeySpan core(int64_t row_begin, int64_t row_end) const {
    return {span(row_end - 1).begin, span(row_begin).end};
  }
};

// A tile of keys against a tile of rows: outside is skipped and never loaded, inside runs no mask code.
enum class TileClass { outside, edge, inside };

ATTNSPAN_HOST_DEVICE TileClass classify(KeySpan hull, KeySpan core, int64_t key_begin, int64_t key_end) {
  if (hull.empty() || key_end <= hull.begin || hull.end <= key_begin) return TileClass::outside;
  if (core.begin <= key_begin && key_end <= core.end) return TileClass::inside;
  return TileClass::edge;
}

}  // namespace attnspan
