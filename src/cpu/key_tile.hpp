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

// Asks for the rows of the tile that is read next while another one is computed on: a core that waits for
// each miss in turn reads at a third of the memory's rate.
class RowsAhead {
 public:
  RowsAhead() = default;
  RowsAhead(const KeyTile& tile, size_t row_bytes) : tile_(&tile), row_bytes_(row_bytes) {}

  void fetch(size_t first, size_t count) const {
    if (tile_ == nullptr) return;
    constexpr size_t kLines = 128;  // caches fetch lines of 64 bytes in pairs
    constexpr int kSecondCache = 2;
    if (first == 0 && row_bytes_ <= kSmallRow) touch_pages();
    const size_t end = first + count < tile_->count ? first + count : tile_->count;
    for (size_t row = first; row < end; ++row) {
      for (size_t byte = 0; byte < row_bytes_; byte += kLines) {
        __builtin_prefetch(tile_->rows[row] + byte, 0, kSecondCache);
      }
    }
  }

 private:
  // A prefetch that has to wait for the address translation of its page comes too late where a tile is a page
  // or less: loads of a few bytes bring the translation in time (decode over tbq4 takes 30% less).
  static constexpr size_t kSmallRow = 64;

  void touch_pages() const {
    constexpr size_t kStep = 16;  // the smallest page of a cache; less than a page of memory
    for (size_t row = 0; row < tile_->count; row += kStep) asm volatile("" ::"r"(*tile_->rows[row]));
  }

  const KeyTile* tile_ = nullptr;  // null: nothing comes next
  size_t row_bytes_ = 0;
};

}  // namespace attnspan::cpu
