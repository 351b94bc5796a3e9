#pragma once
// A tile of consecutive keys of one side of a cache or tensor as decode sees it: the address of every row and
// its scales as f32. Rows of different pages lie side by side here, so that kernels know nothing of pages.

#include <cstddef>

#include "attnspan/attention.hpp"

namespace attnspan::cpu {

// Keys of a tile. 64 rows of 128 f16 are 16 KiB: keys and values of a tile fit the first cache together with
// the scores. 64 also bounds the int32 sums of the tbq4 kernels (decode_tbq4-inl.hpp).
inline constexpr size_t kTileKeys = 64;
// q8 has the most scales a row: one for 32 values of 576.
inline constexpr size_t kMaxRowScales = 18;

struct KeyTile {
  size_t count = 0;
  const char* rows[kTileKeys];  // whole vectors of keys are read: those beyond count repeat the last row
  alignas(64) float scales[kMaxRowScales * kTileKeys];  // [block][key], 0 beyond count
};

inline constexpr size_t kLine = 64;
// Asks for the rows of the tile that is read next while another one is computed on, evenly over the time that
// this takes: a core keeps some 24 lines in flight, and asking for a whole tile at once fills that queue and
// then leaves it empty.
class RowsAhead {
 public:
  RowsAhead() = default;
  // What falls to query rows [begin, end) of `rows`, when each of them asks for as much.
  RowsAhead(const KeyTile& tile, size_t row_bytes, size_t begin, size_t end, size_t rows)
      : tile_(&tile),
        row_bytes_(row_bytes),
        next_(tile.count * begin / rows),
        end_(tile.count * end / rows) {}

  // To be called once, before `steps` calls of step().
  void spread(size_t steps) {
    if (next_ == end_) return;
    per_step_ = (end_ - next_) * kOneRow / (steps > 0 ? steps : 1) + 1;
  }
  void step() {
    for (due_ += per_step_; due_ >= kOneRow; due_ -= kOneRow) {
      if (next_ == end_) return;
      const char* row = tile_->rows[next_++];
      constexpr int kSecondCache = 2;
      for (size_t byte = 0; byte < row_bytes_; byte += kLine) __builtin_prefetch(row + byte, 0, kSecondCache);
    }
  }

 private:
  static constexpr size_t kOneRow = 4096;  // what is due is counted in parts of a row

  const KeyTile* tile_ = nullptr;
  size_t row_bytes_ = 0;
  size_t next_ = 0, end_ = 0;
  size_t per_step_ = 0, due_ = 0;
};

}  // namespace attnspan::cpu
