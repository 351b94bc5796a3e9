#include "kv/paged_store.hpp"

#include <algorithm>
#include <utility>

namespace attnspan {

PagedStore::PagedStore(PagePool pool, int64_t origin) : pool_(std::move(pool)), origin_(origin) {}

void PagedStore::add_sequence() {
  SequencePages& added = sequences_.emplace_back();
  added.first = added.length = origin_;
}

void PagedStore::share(int64_t source, int64_t target) {
  sequences_[target] = sequences_[source];
  for (const int32_t page : sequences_[target].pages) pool_.retain(page);
}

void PagedStore::extend(int64_t sequence, int64_t length) {
  SequencePages& pages = sequences_[sequence];
  if (length <= pages.length) return;
  const int64_t in_last = (pages.length - pages.first) % page_size();
  const size_t pages_before = pages.pages.size();
  const auto needed = static_cast<size_t>((length - pages.first + page_size() - 1) / page_size());
  pages.pages.reserve(needed);
  try {
    if (in_last != 0 && pool_.references(pages.pages.back()) > 1) {
      pages.pages.back() = pool_.unshare(pages.pages.back(), in_last);
    }
    while (pages.pages.size() < needed) pages.pages.push_back(pool_.allocate());
  } catch (...) {
    while (pages.pages.size() > pages_before) {
      pool_.release(pages.pages.back());
      pages.pages.pop_back();
    }
    throw;
  }
  pages.length = length;
}

void PagedStore::trim(int64_t sequence, int64_t length) {
  SequencePages& pages = sequences_[sequence];
  pages.length = std::clamp(length, pages.first, pages.length);
  const auto needed = static_cast<size_t>((pages.length - pages.first + page_size() - 1) / page_size());
  while (pages.pages.size() > needed) {
    pool_.release(pages.pages.back());
    pages.pages.pop_back();
  }
}

void PagedStore::recycle(int64_t sequence, int64_t position) {
  SequencePages& pages = sequences_[sequence];
  const int64_t whole = (std::min(position, pages.length) - pages.first) / page_size();
  if (whole <= 0) return;
  for (int64_t i = 0; i < whole; ++i) pool_.release(pages.pages[i]);
  pages.pages.erase(pages.pages.begin(), pages.pages.begin() + whole);
  pages.first += whole * page_size();
}

void PagedStore::clear(int64_t sequence) {
  for (const int32_t page : sequences_[sequence].pages) pool_.release(page);
  sequences_[sequence] = {origin_, origin_, {}};
}

PagedStore::Place PagedStore::place(int64_t sequence, int64_t position) const {
  const SequencePages& pages = sequences_[sequence];
  const int64_t offset = position - pages.first;
  return {pages.pages[offset / page_size()], offset % page_size()};
}

PageOrder order_pages(const PagedStore& store) {
  PageOrder order;
  order.numbers.assign(static_cast<size_t>(store.pool().capacity()), -1);
  const int64_t page_size = store.pool().shape().page_size;
  for (const SequencePages& sequence : store.sequences()) {
    for (size_t i = 0; i < sequence.pages.size(); ++i) {
      const int64_t begin = sequence.first + static_cast<int64_t>(i) * page_size;
      const int64_t filled = std::min(page_size, sequence.length - begin);
      int32_t& number = order.numbers[sequence.pages[i]];
      if (number < 0) {
        number = static_cast<int32_t>(order.pages.size());
        order.pages.push_back(sequence.pages[i]);
        order.filled.push_back(0);
      }
      order.filled[number] = std::max(order.filled[number], filled);
    }
  }
  return order;
}

}  // namespace attnspan
