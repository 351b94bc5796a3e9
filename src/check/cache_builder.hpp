#pragma once
// A KvView over memory that the check owns: rows encoded one by one, pages in shuffled order, everything that
// is not a key of a sequence poisoned. Independent of KvCache, so that each can be checked against the other.

#include <vector>

#include "attnspan/kv_view.hpp"
#include "check/buffer.hpp"

namespace attnspan::check {

class BuiltCache {
 public:
  // key and value: [batch, seqlen, kv_heads, dim] buffers; seqlens: how many keys of each sequence exist.
  BuiltCache(const Buffer& key, const Buffer& value, const std::vector<int64_t>& seqlens, KvFormat k_format,
             KvFormat v_format, int64_t page_size, Random& random);
  BuiltCache(const BuiltCache&) = delete;
  BuiltCache& operator=(const BuiltCache&) = delete;

  const KvView& view() const { return view_; }

 private:
  void place(KvRows& rows, std::vector<uint8_t>& codes, std::vector<uint16_t>& scales, KvFormat format,
             int64_t dim);
  void encode(const KvRows& rows, const Buffer& values, const std::vector<int64_t>& seqlens);

  KvView view_;
  std::vector<uint8_t> key_codes_, value_codes_;
  std::vector<uint16_t> key_scales_, value_scales_;
  std::vector<int32_t> block_table_, seqlens_;
};

}  // namespace attnspan::check
