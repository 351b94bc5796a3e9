#pragma once
// The gradients of the keys and values of one (sequence, KV head): what each chunk of query rows adds to
// them, and their sum.
//
// Chunks are work items; each sums into memory of its own, and whoever finishes last adds the chunks in their
// order. So the result depends on the chunks alone, which follow from the shape (plan.cpp), and not on
// threads. A chunk's memory covers the keys that it sees and lives until the sum.

#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

#include "cpu/row_block.hpp"
#include "cpu/scratch.hpp"

namespace attnspan::cpu {

// dk and dv of keys [keys.begin, keys.end), not yet scaled.
struct KeyGradients {
  KeySpan keys;
  size_t key_stride = 0;    // floats from row to row of dk
  size_t value_stride = 0;  // and of dv
  float* dk = nullptr;
  float* dv = nullptr;
  std::unique_ptr<Scratch> memory;
  std::vector<double> d_sinks;  // of each head of the group

  void allocate(KeySpan span, size_t key_row, size_t value_row) {
    keys = span;
    key_stride = key_row;
    value_stride = value_row;
    const size_t count = static_cast<size_t>(span.size());
    memory = std::make_unique<Scratch>();
    memory->begin(Scratch::padded(count * key_row) + Scratch::padded(count * value_row));
    dk = memory->take(count * key_row);
    dv = memory->take(count * value_row);
    std::fill_n(dk, count * key_row, 0.0F);
    std::fill_n(dv, count * value_row, 0.0F);
  }
  void release() { memory.reset(); }
  float* dk_row(int64_t key) const { return dk + static_cast<size_t>(key - keys.begin) * key_stride; }
  float* dv_row(int64_t key) const { return dv + static_cast<size_t>(key - keys.begin) * value_stride; }
};

// The chunks of one (sequence, KV head).
struct KeyGradientSum {
  const Problem* problem = nullptr;
  Sequence sequence;
  int64_t kv_head = 0;
  std::vector<RowBlock> chunks;
  std::vector<KeyGradients> parts;  // one for each chunk
  std::atomic<int64_t> unfinished{0};
};

}  // namespace attnspan::cpu
