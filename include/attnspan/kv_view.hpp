#pragma once
/// KvView: what a kernel needs to know of a KV cache, dense or paged, in any format. It owns nothing.
/// KvCache (kv_cache.hpp) makes one; an engine with its own pages can fill one in by hand.

#include <cstdint>

#include "attnspan/tensor.hpp"

namespace attnspan {

/// How a cache stores a row of keys or values. K and V choose apart. docs/kv-formats.md has the bits.
enum class KvFormat : int32_t { f32 = 0, f16 = 1, bf16 = 2, q8 = 3, tbq4 = 4 };
const char* name_of(KvFormat format);

/// How tbq4 chooses its codes: `quality` tries nine scalings of each block, `fast` one (docs/kv-formats.md).
enum class EncodeMode : int32_t { quality = 0, fast = 1 };

/// The rows of K, or of V: row t of head h in page p starts at
///   codes  + p * page_stride  + h * head_stride  + t * token_stride             (bytes)
///   scales + p * scale_page_stride + h * scale_head_stride + t * scale_token_stride   (f16 elements)
/// f32, f16 and bf16 rows are dim values and have no scales.
struct KvRows {
  KvFormat format = KvFormat::f16;
  int64_t dim = 0;
  void* codes = nullptr;
  int64_t codes_byte_offset = 0;
  int64_t page_stride = 0, head_stride = 0, token_stride = 0;
  void* scales = nullptr;
  int64_t scales_byte_offset = 0;
  int64_t scale_page_stride = 0, scale_head_stride = 0, scale_token_stride = 0;
};

/// Key position p of sequence b lies in page block_table[b, (p - first_position[b]) / page_size], at row
/// (p - first_position[b]) % page_size. Keys exist for p in [first_position[b], seqlens[b]).
struct KvView {
  Device device = Device::cpu;
  int64_t batch = 0;
  int64_t kv_heads = 0;
  int64_t page_size = 0;   ///< tokens in a page; a dense cache is one page per sequence
  int64_t num_pages = 0;   ///< pages in the pool
  int64_t max_seqlen = 0;  ///< an upper bound of seqlens, known on the host
  KvRows key, value;       ///< value.codes == key.codes: value is the first value.dim of the key (MLA)
  Tensor block_table;      ///< int32 `[batch, pages per sequence]`; not given: page b belongs to sequence b
  Tensor seqlens;          ///< int32 `[batch]`
  Tensor first_position;   ///< int32 `[batch]`, multiples of page_size (recycled windows); not given: 0
};

/// A dense cache `[batch, max_seqlen, kv_heads, dim]` in f32, f16 or bf16, any strides, as a KvView.
/// `seqlens` int32 `[batch]` counts the keys of each sequence.
KvView dense_cache(const Tensor& key, const Tensor& value, const Tensor& seqlens);
/// Pages `[num_pages, page_size, kv_heads, dim]` in f32, f16 or bf16, any strides (FlashAttention's paged
/// layout).
KvView paged_cache(const Tensor& key, const Tensor& value, const Tensor& block_table, const Tensor& seqlens);

}  // namespace attnspan
