#include "core/staging.hpp"

#include <cstring>

#include "kv/format.hpp"

namespace attnspan {
namespace {

// Calls visit(element index of the row, rows per call = 1) for every innermost row of the view.
template <typename Visit>
void for_each_row(const Tensor& tensor, Visit visit) {
  if (tensor.numel() == 0) return;
  std::array<int64_t, kMaxRank> index{};
  const int outer = tensor.rank - 1;
  for (;;) {
    int64_t element = 0;
    for (int i = 0; i < outer; ++i) element += index[i] * tensor.stride[i];
    visit(element);
    int dim = outer - 1;
    while (dim >= 0 && ++index[dim] == tensor.shape[dim]) index[dim--] = 0;
    if (dim < 0) return;
  }
}

const char* bytes_of(const Tensor& tensor) {
  return static_cast<const char*>(tensor.data) + tensor.byte_offset;
}

std::vector<char> packed_copy(const Tensor& host) {
  const int64_t size = size_of(host.dtype);
  const int64_t row = host.shape[host.rank - 1];
  const int64_t step = host.stride[host.rank - 1];  // 0 for a broadcast last dimension (bias)
  std::vector<char> bytes(static_cast<size_t>(host.numel() * size));
  char* to = bytes.data();
  for_each_row(host, [&](int64_t element) {
    const char* from = bytes_of(host) + element * size;
    if (step == 1) {
      std::memcpy(to, from, static_cast<size_t>(row * size));
    } else {
      for (int64_t i = 0; i < row; ++i)
        std::memcpy(to + i * size, from + i * step * size, static_cast<size_t>(size));
    }
    to += row * size;
  });
  return bytes;
}

Tensor contiguous_like(const Tensor& host, void* data, Device device) {
  Tensor tensor = host;
  tensor.data = data;
  tensor.byte_offset = 0;
  tensor.device = device;
  int64_t stride = 1;
  for (int i = host.rank - 1; i >= 0; --i) {
    tensor.stride[i] = stride;
    stride *= host.shape[i];
  }
  return tensor;
}

}  // namespace

Staging::~Staging() {
  for (void* allocation : allocations_) memory_.release(allocation);
}

void* Staging::allocate(size_t bytes) {
  void* address = memory_.allocate(bytes > 0 ? bytes : 16);
  allocations_.push_back(address);
  return address;
}

Tensor Staging::input(const Tensor& host) {
  if (!host) return host;
  const std::vector<char> bytes = packed_copy(host);
  void* address = allocate(bytes.size());
  if (!bytes.empty()) memory_.upload(address, bytes.data(), bytes.size());
  return contiguous_like(host, address, device_);
}

Tensor Staging::output(const Tensor& host) {
  if (!host) return host;
  void* address = allocate(static_cast<size_t>(host.numel() * size_of(host.dtype)));
  const Tensor device = contiguous_like(host, address, device_);
  outputs_.push_back({host, device});
  return device;
}

AttentionOptions Staging::side_inputs(const AttentionOptions& options) {
  AttentionOptions staged = options;
  staged.key_start = input(options.key_start);
  staged.key_end = input(options.key_end);
  staged.cu_seqlens_q = input(options.cu_seqlens_q);
  staged.cu_seqlens_k = input(options.cu_seqlens_k);
  staged.seqused_k = input(options.seqused_k);
  staged.bias = input(options.bias);
  staged.alibi_slopes = input(options.alibi_slopes);
  staged.sinks = input(options.sinks);
  return staged;
}

// The pool travels as it lies: one block from the first byte of the first page to the last of the last.
KvRows Staging::cache_rows(const KvRows& host, const KvView& view) {
  KvRows staged = host;
  const int64_t last_page = view.num_pages - 1, last_head = view.kv_heads - 1,
                last_token = view.page_size - 1;
  if (last_page < 0 || last_head < 0 || last_token < 0) return staged;
  const KvFormatOps& format = ops_of(host.format);
  const auto extent = [&](int64_t page, int64_t head, int64_t token, int64_t row) {
    return static_cast<size_t>(last_page * page + last_head * head + last_token * token + row);
  };
  const size_t code_bytes =
      extent(host.page_stride, host.head_stride, host.token_stride, format.row_code_bytes(host.dim));
  staged.codes = allocate(code_bytes);
  staged.codes_byte_offset = 0;
  memory_.upload(staged.codes, static_cast<const char*>(host.codes) + host.codes_byte_offset, code_bytes);
  if (host.scales != nullptr) {
    const size_t scale_bytes = 2 * extent(host.scale_page_stride, host.scale_head_stride,
                                          host.scale_token_stride, format.row_scales(host.dim));
    staged.scales = allocate(scale_bytes);
    staged.scales_byte_offset = 0;
    memory_.upload(staged.scales, static_cast<const char*>(host.scales) + host.scales_byte_offset,
                   scale_bytes);
  }
  return staged;
}

const KvView* Staging::cache(const KvView* host) {
  if (host == nullptr) return nullptr;
  cache_ = std::make_unique<KvView>(*host);
  cache_->device = device_;
  cache_->key = cache_rows(host->key, *host);
  if (shares_rows(*host)) {  // MLA: one tensor serves as both
    cache_->value.codes = cache_->key.codes;
    cache_->value.codes_byte_offset = 0;
    cache_->value.scales = cache_->key.scales;
    cache_->value.scales_byte_offset = 0;
  } else {
    cache_->value = cache_rows(host->value, *host);
  }
  cache_->block_table = input(host->block_table);
  cache_->seqlens = input(host->seqlens);
  cache_->first_position = input(host->first_position);
  return cache_.get();
}

ForwardArgs Staging::stage(const ForwardArgs& args) {
  ForwardArgs staged;
  staged.query = input(args.query);
  staged.key = input(args.key);
  staged.value = input(args.value);
  staged.cache = cache(args.cache);
  staged.out = output(args.out);
  staged.lse = output(args.lse);
  staged.probs = output(args.probs);
  staged.options = side_inputs(args.options);
  return staged;
}

BackwardArgs Staging::stage(const BackwardArgs& args) {
  BackwardArgs staged;
  staged.query = input(args.query);
  staged.key = input(args.key);
  staged.value = input(args.value);
  staged.out = input(args.out);
  staged.lse = input(args.lse);
  staged.dout = input(args.dout);
  staged.dlse = input(args.dlse);
  staged.dq = output(args.dq);
  staged.dk = output(args.dk);
  staged.dv = output(args.dv);
  staged.d_sinks = output(args.d_sinks);
  staged.options = side_inputs(args.options);
  return staged;
}

MergeArgs Staging::stage(const MergeArgs& args) {
  MergeArgs staged;
  staged.out_a = input(args.out_a);
  staged.lse_a = input(args.lse_a);
  staged.out_b = input(args.out_b);
  staged.lse_b = input(args.lse_b);
  staged.out = output(args.out);
  staged.lse = output(args.lse);
  return staged;
}

void Staging::fetch_outputs() {
  for (const Output& output : outputs_) {
    const int64_t size = size_of(output.host.dtype);
    std::vector<char> bytes(static_cast<size_t>(output.host.numel() * size));
    if (bytes.empty()) continue;
    memory_.download(bytes.data(), output.device.data, bytes.size());
    const int64_t row = output.host.shape[output.host.rank - 1];
    const int64_t step = output.host.stride[output.host.rank - 1];
    char* base = static_cast<char*>(output.host.data) + output.host.byte_offset;
    const char* from = bytes.data();
    for_each_row(output.host, [&](int64_t element) {
      for (int64_t i = 0; i < row; ++i) {
        std::memcpy(base + (element + i * step) * size, from + i * size, static_cast<size_t>(size));
      }
      from += row * size;
    });
  }
}

}  // namespace attnspan
