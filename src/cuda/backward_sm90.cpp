#include "cuda/backward_sm90.hpp"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <limits>

#include "attnspan/tensor.hpp"
#include "cuda/tensor_map.hpp"
#include "cuda/tiles.hpp"

namespace attnspan::cuda {
namespace {

constexpr int kWidest = 128;

// query, key, value, dout as TMA sees them.
struct Specs {
  TensorMapSpec query, key, value, dout;
};

TensorMapSpec spec_of(const Params& p, const void* data, int64_t dim, int64_t rows, int64_t heads,
                      int64_t batch_stride, int64_t head_stride, int64_t row_stride) {
  TensorMapSpec spec;
  spec.data = data;
  spec.bf16 = p.dtype == static_cast<int>(DType::bf16);
  spec.dim = dim;
  spec.rows = rows;
  spec.heads = heads;
  spec.batch = p.cu_seqlens_q != nullptr ? 1 : p.batch;
  spec.row_stride = row_stride;
  spec.head_stride = head_stride;
  spec.batch_stride = batch_stride;
  return spec;
}

Specs specs_of(const BackwardParams& b) {
  const Params& p = b.forward;
  const auto queries = [&](const DeviceRows& rows, int64_t dim) {
    return spec_of(p, rows.data, dim, p.seqlen_q, p.heads, rows.batch_stride, rows.head_stride,
                   rows.row_stride);
  };
  const auto keys = [&](const KvPlane& plane, int64_t dim) {  // its strides are bytes
    return spec_of(p, plane.codes, dim, p.seqlen_k, p.kv_heads, plane.page_stride / 2, plane.head_stride / 2,
                   plane.token_stride / 2);
  };
  return {queries(p.query, p.head_dim), keys(p.key, p.head_dim), keys(p.value, p.head_dim_v),
          queries(b.dout, p.head_dim_v)};
}

bool stores_in_words(const DeviceRows& rows) {
  return reinterpret_cast<uintptr_t>(rows.data) % 16 == 0 && rows.batch_stride % 8 == 0 &&
         rows.head_stride % 8 == 0 && rows.row_stride % 8 == 0;
}

int64_t tiles_of(const int32_t* cu_seqlens, int64_t length, int64_t batch) {
  return cu_seqlens == nullptr ? (length + kSm90OwnRows - 1) / kSm90OwnRows * batch
                               : length / kSm90OwnRows + batch;
}

}  // namespace

bool backward_sm90_runs(const BackwardParams& b, int major) {
  const Params& p = b.forward;
  const bool half = p.dtype == static_cast<int>(DType::f16) || p.dtype == static_cast<int>(DType::bf16);
  if (major != 9 || !half || std::max(p.head_dim, p.head_dim_v) > kWidest || p.head_dim % 8 != 0 ||
      p.head_dim_v % 8 != 0) {
    return false;
  }
  const Specs specs = specs_of(b);
  return tma_can_address(specs.query) && tma_can_address(specs.key) && tma_can_address(specs.value) &&
         tma_can_address(specs.dout) && stores_in_words(b.dq) && stores_in_words(b.dk) &&
         stores_in_words(b.dv);
}

cudaError_t launch_backward_sm90(const BackwardParams& b, cudaStream_t stream) {
  const Params& p = b.forward;
  const Specs specs = specs_of(b);
  const bool narrow = std::max(p.head_dim, p.head_dim_v) <= 64;
  detail::Sm90BackwardArgs keys, queries;
  keys.b = queries.b = b;
  keys.zero_tail = queries.zero_tail = p.cu_seqlens_q != nullptr || p.seqused_k != nullptr;

  const int rows_step = narrow ? Sm90KeyTile<64>::kStep : Sm90KeyTile<128>::kStep;
  keys.own[0] = make_tensor_map(specs.key, kSm90OwnRows);
  keys.own[1] = make_tensor_map(specs.value, kSm90OwnRows);
  keys.step[0] = make_tensor_map(specs.query, rows_step);
  keys.step[1] = make_tensor_map(specs.dout, rows_step);
  keys.blocks = tiles_of(p.cu_seqlens_k, p.seqlen_k, p.batch) * p.kv_heads;

  const int keys_step = narrow ? Sm90QueryTile<64>::kStep : Sm90QueryTile<128>::kStep;
  queries.own[0] = make_tensor_map(specs.query, kSm90OwnRows);
  queries.own[1] = make_tensor_map(specs.dout, kSm90OwnRows);
  queries.step[0] = make_tensor_map(specs.key, keys_step);
  queries.step[1] = make_tensor_map(specs.value, keys_step);
  queries.blocks = tiles_of(p.cu_seqlens_q, p.seqlen_q, p.batch) * p.heads;

  const int dim = std::max(p.head_dim, p.head_dim_v);
  return p.dtype == static_cast<int>(DType::f16)
             ? detail::launch_backward_sm90_as<__half>(keys, queries, dim, stream)
             : detail::launch_backward_sm90_as<__nv_bfloat16>(keys, queries, dim, stream);
}

}  // namespace attnspan::cuda
