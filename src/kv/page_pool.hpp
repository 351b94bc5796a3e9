#pragma once
// The pages of a cache: memory, references and the free list. A page holds page_size tokens of all KV heads,
// in up to four planes: codes and scales of K, codes and scales of V, each [page][kv_head][token][row].

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "attnspan/kv_view.hpp"
#include "kv/format.hpp"

namespace attnspan {

struct PoolShape {
  int64_t kv_heads = 0;
  int64_t page_size = 0;
  int64_t key_dim = 0, value_dim = 0;
  KvFormat key_format = KvFormat::f16, value_format = KvFormat::f16;
  bool value_is_key = false;  // V has no planes: its rows are the key's
  int64_t max_pages = 0;      // 0: no limit
};

// Order of the planes in memory and in files.
enum Plane : int { kKeyCodes = 0, kKeyScales = 1, kValueCodes = 2, kValueScales = 3 };
inline constexpr int kPlanes = 4;
inline constexpr int64_t kPlaneAlignment = 64;

// Bytes of one row of one head in a plane: codes padded to kRowAlignment, scales as they are.
int64_t plane_row_bytes(const PoolShape& shape, int plane);
int64_t plane_page_bytes(const PoolShape& shape, int plane);
int64_t page_bytes(const PoolShape& shape);  // all planes

class PagePool {
 public:
  explicit PagePool(const PoolShape& shape);
  // Over memory that holds pages already (a mapped file), every plane aligned to kPlaneAlignment. One count
  // of references per page.
  PagePool(const PoolShape& shape, std::array<std::shared_ptr<std::byte>, kPlanes> planes,
           std::vector<int32_t> references);
  PagePool(PagePool&&) = default;
  PagePool& operator=(PagePool&&) = default;

  const PoolShape& shape() const { return shape_; }
  int64_t capacity() const { return capacity_; }
  int64_t used() const { return used_; }
  int64_t shared() const;  // pages with more than one reference
  void reserve(int64_t pages);

  // A page with one reference. Throws Error(out_of_memory) at the limit of the pool or of the machine.
  int32_t allocate();
  void retain(int32_t page) { ++references_[page]; }
  void release(int32_t page);
  int32_t references(int32_t page) const { return references_[page]; }
  // A private copy of the first `tokens` tokens; gives up one reference of `page`.
  int32_t unshare(int32_t page, int64_t tokens);

  std::byte* row(int plane, int32_t page, int64_t head, int64_t token);
  const std::byte* row(int plane, int32_t page, int64_t head, int64_t token) const;

  // What a KvView needs.
  KvRows key_rows() const;
  KvRows value_rows() const;

 private:
  KvRows rows(int codes_plane, KvFormat format, int64_t dim) const;
  void grow(int64_t pages);

  PoolShape shape_;
  std::array<int64_t, kPlanes> row_bytes_{}, page_bytes_{};
  std::array<std::shared_ptr<std::byte>, kPlanes> planes_;
  int64_t capacity_ = 0;
  int64_t used_ = 0;
  std::vector<int32_t> references_;  // per page; 0 = free
  std::vector<int32_t> free_;        // a stack: the page that was released last is the warmest
};

}  // namespace attnspan
