#pragma once
// Decode: few query rows against many keys. How a call is cut: every (sequence, KV head) is a group of query
// rows, and its keys are cut into splits that are computed apart and merged in order. Boundaries follow from
// the sequence's own length, the head counts and the dims, never from batchmates or threads.

#include <vector>

#include "cpu/key_tile.hpp"
#include "cpu/kv_source.hpp"
#include "cpu/row_block.hpp"

namespace attnspan::cpu {

// What one (sequence, KV head) needs while it runs. Sizes are in floats.
struct DecodeLayout {
  int64_t rows = 0;           // stacked query rows of the group
  size_t query_stride = 0;    // of one prepared query row: f32, or int16 pairs and their units (tbq4)
  size_t out_stride = 0;      // of one row of sums, in the order of the kernels
  size_t partial_stride = 0;  // of one split: row_max[rows], row_sum[rows], out[rows][out_stride]
};

struct DecodeGroup {
  RowBlock block;
  int64_t key_begin = 0;   // of the first tile: a multiple of kTileKeys
  int64_t key_end = 0;     // of the last key that some row sees
  int64_t split_keys = 0;  // a multiple of kTileKeys
  int64_t splits = 0;      // 0: no row sees a key
  DecodeLayout layout;
  float* queries = nullptr;   // [rows][query_stride]
  float* partials = nullptr;  // [splits][partial_stride]
};

struct DecodeItem {
  DecodeGroup* group = nullptr;
  int64_t split = 0;
};

// Whether the rows of this sequence go through decode: by the sequence's own shape alone.
bool is_decode(const Problem& problem, const Sequence& sequence);

// The groups of all sequences that go through decode, without memory. `lanes` is the width of a vector.
std::vector<DecodeGroup> plan_decode(const Problem& problem, size_t lanes);
std::vector<DecodeItem> decode_items(std::vector<DecodeGroup>& groups);

}  // namespace attnspan::cpu
