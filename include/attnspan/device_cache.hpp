#pragma once
/// Appending to a cache whose pages live on a device: rows are encoded there, with the same bytes as KvCache
/// writes on the host. Pages, block table and lengths belong to the caller; nothing is waited for.

#include "attnspan/attention.hpp"
#include "attnspan/kv_view.hpp"

namespace attnspan {

/// Token t of sequence b becomes position start[b] + t. The pages of those positions must be in the block
/// table; seqlens is not touched. Everything lives on the cache's device.
struct DeviceAppendArgs {
  const KvView* cache = nullptr;
  Tensor key;    ///< `[batch, tokens, kv_heads, head_dim]` in f32, f16 or bf16, any strides
  Tensor value;  ///< likewise with head_dim_v, in key's dtype; not given where values are keys (MLA)
  Tensor start;  ///< int32 `[batch]`
  EncodeMode encode_mode = EncodeMode::quality;  ///< of tbq4
  Tensor saturated;  ///< optional, int32 `[1]`: scales beyond f16, stored as 65504, are added to it
};

/// Throws Error naming the argument; unsupported where the device's backend can't encode.
void append(const DeviceAppendArgs& args, const Execution& execution = {});

}  // namespace attnspan
