#include "kv/page_pool.hpp"

#if __has_include(<sys/mman.h>)
#include <sys/mman.h>
#endif

#include <algorithm>
#include <cstring>
#include <new>
#include <string>
#include <utility>

#include "attnspan/error.hpp"

namespace attnspan {
namespace {

int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// Decode reads a whole cache for every token; with pages of 4 KiB a core looks up an address every 64 lines.
// Planes of at least this size lie on pages of 2 MiB where the system has them.
constexpr int64_t kHugePage = int64_t{2} << 20;

std::shared_ptr<std::byte> allocate_plane(int64_t bytes) {
  const auto size = static_cast<size_t>(bytes);
  const auto alignment = static_cast<std::align_val_t>(bytes < kHugePage ? kPlaneAlignment : kHugePage);
  void* memory = ::operator new(size, alignment, std::nothrow);
  if (memory == nullptr) {
    throw Error(ErrorCode::out_of_memory, "",
                "no memory for " + std::to_string(bytes) + " bytes of cache pages");
  }
#ifdef MADV_HUGEPAGE
  if (bytes >= kHugePage) madvise(memory, size, MADV_HUGEPAGE);  // a wish: no failure matters
#endif
  return {static_cast<std::byte*>(memory),
          [alignment](std::byte* address) { ::operator delete(address, alignment); }};
}

}  // namespace

int64_t plane_row_bytes(const PoolShape& shape, int plane) {
  const bool key = plane == kKeyCodes || plane == kKeyScales;
  if (!key && shape.value_is_key) return 0;
  const KvFormatOps& ops = ops_of(key ? shape.key_format : shape.value_format);
  const int64_t dim = key ? shape.key_dim : shape.value_dim;
  const bool codes = plane == kKeyCodes || plane == kValueCodes;
  return codes ? round_up(ops.row_code_bytes(dim), kRowAlignment) : ops.row_scales(dim) * 2;
}

int64_t plane_page_bytes(const PoolShape& shape, int plane) {
  return shape.kv_heads * shape.page_size * plane_row_bytes(shape, plane);
}

int64_t page_bytes(const PoolShape& shape) {
  int64_t bytes = 0;
  for (int plane = 0; plane < kPlanes; ++plane) bytes += plane_page_bytes(shape, plane);
  return bytes;
}

PagePool::PagePool(const PoolShape& shape) : shape_(shape) {
  for (int plane = 0; plane < kPlanes; ++plane) {
    row_bytes_[plane] = plane_row_bytes(shape, plane);
    page_bytes_[plane] = plane_page_bytes(shape, plane);
  }
}

PagePool::PagePool(const PoolShape& shape, std::array<std::shared_ptr<std::byte>, kPlanes> planes,
                   std::vector<int32_t> references)
    : PagePool(shape) {
  planes_ = std::move(planes);
  references_ = std::move(references);
  capacity_ = static_cast<int64_t>(references_.size());
  for (int64_t page = capacity_; page-- > 0;) {
    if (references_[page] == 0) free_.push_back(static_cast<int32_t>(page));
  }
  used_ = capacity_ - static_cast<int64_t>(free_.size());
}

int64_t PagePool::shared() const {
  return std::count_if(references_.begin(), references_.end(), [](int32_t count) { return count > 1; });
}

void PagePool::reserve(int64_t pages) {
  if (shape_.max_pages != 0) pages = std::min(pages, shape_.max_pages);
  if (pages > capacity_) grow(pages);
}

void PagePool::grow(int64_t pages) {
  std::array<std::shared_ptr<std::byte>, kPlanes> grown;
  for (int plane = 0; plane < kPlanes; ++plane) {
    if (page_bytes_[plane] == 0) continue;
    grown[plane] = allocate_plane(pages * page_bytes_[plane]);
  }
  references_.resize(static_cast<size_t>(pages), 0);
  free_.reserve(static_cast<size_t>(pages));
  for (int plane = 0; plane < kPlanes; ++plane) {
    if (capacity_ == 0 || page_bytes_[plane] == 0) continue;
    std::memcpy(grown[plane].get(), planes_[plane].get(),
                static_cast<size_t>(capacity_ * page_bytes_[plane]));
  }
  planes_ = std::move(grown);
  // Below the pages that are free already, the lowest number on top.
  std::vector<int32_t> added;
  for (int64_t page = pages; page-- > capacity_;) added.push_back(static_cast<int32_t>(page));
  free_.insert(free_.begin(), added.begin(), added.end());
  capacity_ = pages;
}

int32_t PagePool::allocate() {
  if (free_.empty()) {
    if (shape_.max_pages != 0 && capacity_ >= shape_.max_pages) {
      throw Error(ErrorCode::out_of_memory, "max_pages",
                  "all " + std::to_string(capacity_) + " pages of the pool are used");
    }
    // Half as much again: appending n tokens one by one copies fewer than 3 n.
    reserve(std::max<int64_t>(4, capacity_ + (capacity_ + 1) / 2));
  }
  const int32_t page = free_.back();
  free_.pop_back();
  references_[page] = 1;
  ++used_;
  return page;
}

void PagePool::release(int32_t page) {
  if (--references_[page] != 0) return;
  free_.push_back(page);
  --used_;
}

int32_t PagePool::unshare(int32_t page, int64_t tokens) {
  const int32_t copy = allocate();
  for (int plane = 0; plane < kPlanes; ++plane) {
    if (row_bytes_[plane] == 0) continue;
    for (int64_t head = 0; head < shape_.kv_heads; ++head) {
      std::memcpy(row(plane, copy, head, 0), row(plane, page, head, 0),
                  static_cast<size_t>(tokens * row_bytes_[plane]));
    }
  }
  release(page);
  return copy;
}

const std::byte* PagePool::row(int plane, int32_t page, int64_t head, int64_t token) const {
  return planes_[plane].get() + page * page_bytes_[plane] +
         (head * shape_.page_size + token) * row_bytes_[plane];
}

std::byte* PagePool::row(int plane, int32_t page, int64_t head, int64_t token) {
  return const_cast<std::byte*>(std::as_const(*this).row(plane, page, head, token));
}

KvRows PagePool::rows(int codes_plane, KvFormat format, int64_t dim) const {
  const int scales_plane = codes_plane + 1;
  KvRows rows;
  rows.format = format;
  rows.dim = dim;
  rows.codes = planes_[codes_plane].get();
  rows.token_stride = row_bytes_[codes_plane];
  rows.head_stride = rows.token_stride * shape_.page_size;
  rows.page_stride = page_bytes_[codes_plane];
  if (row_bytes_[scales_plane] == 0) return rows;
  rows.scales = planes_[scales_plane].get();
  rows.scale_token_stride = row_bytes_[scales_plane] / 2;
  rows.scale_head_stride = rows.scale_token_stride * shape_.page_size;
  rows.scale_page_stride = page_bytes_[scales_plane] / 2;
  return rows;
}

KvRows PagePool::key_rows() const { return rows(kKeyCodes, shape_.key_format, shape_.key_dim); }

KvRows PagePool::value_rows() const {
  if (!shape_.value_is_key) return rows(kValueCodes, shape_.value_format, shape_.value_dim);
  return rows(kKeyCodes, shape_.key_format, shape_.value_dim);
}

}  // namespace attnspan
