#pragma once
// Sequences over one pool: which pages hold which positions. A cache is one store, or two where the first
// tokens have formats of their own.

#include <cstdint>
#include <utility>
#include <vector>

#include "kv/page_pool.hpp"

namespace attnspan {

struct SequencePages {
  int64_t first = 0;   // position of the first row of the first page; a multiple of page_size
  int64_t length = 0;  // positions [first, length) exist
  std::vector<int32_t> pages;
};

class PagedStore {
 public:
  // Positions of every sequence start at `origin`, a multiple of page_size.
  PagedStore(PagePool pool, int64_t origin);

  PagePool& pool() { return pool_; }
  const PagePool& pool() const { return pool_; }
  const std::vector<SequencePages>& sequences() const { return sequences_; }
  const SequencePages& sequence(int64_t index) const { return sequences_[static_cast<size_t>(index)]; }

  void add_sequence();
  // Replaces an empty sequence by the pages of another.
  void share(int64_t source, int64_t target);
  // Gives pages that hold positions [sequence.length, length) to write to, unshared. On an error the sequence
  // is as before. The new rows have no defined values yet.
  void extend(int64_t sequence, int64_t length);
  void trim(int64_t sequence, int64_t length);
  // Drops the pages whose positions all lie before `position`.
  void recycle(int64_t sequence, int64_t position);
  void clear(int64_t sequence);
  // For a loaded file, whose pool counts these references already.
  void adopt(std::vector<SequencePages> sequences) { sequences_ = std::move(sequences); }

  struct Place {
    int32_t page;
    int64_t token;
  };
  Place place(int64_t sequence, int64_t position) const;

 private:
  int64_t page_size() const { return pool_.shape().page_size; }

  PagePool pool_;
  int64_t origin_;
  std::vector<SequencePages> sequences_;
};

// The pages of a store that sequences use, numbered in the order in which sequences meet them, and how many
// rows of each belong to somebody. What a trim left behind those rows is nobody's business: files and
// conversions leave it out, so equal caches give equal files.
struct PageOrder {
  std::vector<int32_t> pages;    // in the pool, by number
  std::vector<int64_t> filled;   // tokens, by number
  std::vector<int32_t> numbers;  // by page in the pool; -1: unused
};
PageOrder order_pages(const PagedStore& store);

}  // namespace attnspan
