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

// How tiles come from memory. Measured on decode over f16, 128 values, 4 query heads of a KV head, cycles a
// key on one core (80 are arithmetic): 186 when the kernels meet the rows as they are, 180 with every other
// line asked for ahead, 158 with the tile read through first as well, 113 with every line asked for.
inline constexpr size_t kLine = 64;
// A tile of rows up to this size is a page of memory or less.
inline constexpr size_t kSmallRow = 64;

// Reads a tile through once, in the order of memory, so that misses overlap: the kernels take rows in fours
// and would wait for each.
inline void read_through(const KeyTile& tile, size_t row_bytes) {
  if (row_bytes <= kSmallRow) return;
  for (size_t row = 0; row < tile.count; ++row) {
    for (size_t byte = 0; byte < row_bytes; byte += kLine) asm volatile("" ::"r"(tile.rows[row][byte]));
  }
}

// Asks for the rows of the tile that is read next while another one is computed on.
class RowsAhead {
 public:
  RowsAhead() = default;
  RowsAhead(const KeyTile& tile, size_t row_bytes) : tile_(&tile), row_bytes_(row_bytes) {}

  void fetch(size_t first, size_t count) const {
    if (tile_ == nullptr) return;
    constexpr int kSecondCache = 2;
    if (first == 0 && row_bytes_ <= kSmallRow) touch_pages();
    const size_t end = first + count < tile_->count ? first + count : tile_->count;
    for (size_t row = first; row < end; ++row) {
      for (size_t byte = 0; byte < row_bytes_; byte += kLine) {
        __builtin_prefetch(tile_->rows[row] + byte, 0, kSecondCache);
      }
    }
  }

 private:
  // A prefetch that has to wait for the address translation of its page comes too late for small rows: loads
  // of a few bytes bring the translation in time (decode over tbq4 takes 30% less).
  void touch_pages() const {
    constexpr size_t kStep = 16;  // the smallest page of a cache; less than a page of memory
    for (size_t row = 0; row < tile_->count; row += kStep) asm volatile("" ::"r"(*tile_->rows[row]));
  }

  const KeyTile* tile_ = nullptr;  // null: nothing comes next
  size_t row_bytes_ = 0;
};

}  // namespace attnspan::cpu
