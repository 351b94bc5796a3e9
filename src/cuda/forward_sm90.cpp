#include "cuda/forward_sm90.hpp"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <iterator>
#include <limits>

#include "attnspan/tensor.hpp"
#include "cuda/tensor_map.hpp"
#include "cuda/tiles.hpp"

namespace attnspan::cuda {
namespace {

struct Bucket {
  int depth, columns, rows, keys;
};

template <typename Tile>
constexpr Bucket bucket_of() {
  return {Tile::kDepth, Tile::kColumns, Tile::kWarpgroups * 64, Tile::kKeys};
}
constexpr Bucket kBuckets[] = {bucket_of<Sm90Dim64Short>(), bucket_of<Sm90Dim64>(),  bucket_of<Sm90Dim96>(),
                               bucket_of<Sm90Dim128>(),     bucket_of<Sm90Dim192>(), bucket_of<Sm90Dim256>()};

// Scores in registers stay products where one positive factor makes them logits.
bool transformed(const Params& p) {
  return p.softcap != 0 || p.bias.data != nullptr || p.alibi_slopes.data != nullptr || p.softmax_scale <= 0;
}

// -1 where no bucket is wide enough. Score transforms do not fit the registers of three warpgroups.
int find_bucket(const Params& p) {
  const int first = p.seqlen_q >= kSm90LongRows && !transformed(p) ? 1 : 0;
  for (int i = first; i < static_cast<int>(std::size(kBuckets)); ++i) {
    if (p.head_dim <= kBuckets[i].depth && p.head_dim_v <= kBuckets[i].columns) return i;
  }
  return -1;
}

bool packed(const Params& p) { return p.cu_seqlens_q != nullptr; }

TensorMapSpec spec_of(const Params& p, const void* data, int64_t dim, int64_t rows, int64_t heads,
                      const DeviceRows& strides) {
  TensorMapSpec spec;
  spec.data = data;
  spec.bf16 = p.dtype == static_cast<int>(DType::bf16);
  spec.dim = dim;
  spec.rows = rows;
  spec.heads = heads;
  spec.batch = packed(p) ? 1 : p.batch;
  spec.row_stride = strides.row_stride;
  spec.head_stride = strides.head_stride;
  spec.batch_stride = strides.batch_stride;
  return spec;
}

// Strides of a dense plane, back in elements of 2 bytes.
DeviceRows strides_of(const KvPlane& plane) {
  return {nullptr, plane.page_stride / 2, plane.head_stride / 2, plane.token_stride / 2};
}

struct Specs {
  TensorMapSpec query, key, value;
};

Specs specs_of(const Params& p) {
  return {spec_of(p, p.query.data, p.head_dim, p.seqlen_q, p.heads, p.query),
          spec_of(p, p.key.codes, p.head_dim, p.seqlen_k, p.kv_heads, strides_of(p.key)),
          spec_of(p, p.value.codes, p.head_dim_v, p.seqlen_k, p.kv_heads, strides_of(p.value))};
}

// Rows of out are written 16 bytes at a time.
bool stores_in_words(const Params& p) {
  return reinterpret_cast<uintptr_t>(p.out.data) % 16 == 0 && p.out.batch_stride % 8 == 0 &&
         p.out.head_stride % 8 == 0 && p.out.row_stride % 8 == 0;
}

}  // namespace

Sm90Plan plan_forward_sm90(const Params& p, int major, int multiprocessors, int64_t l2_bytes) {
  Sm90Plan plan;
  const int bucket = find_bucket(p);
  const bool half = p.dtype == static_cast<int>(DType::f16) || p.dtype == static_cast<int>(DType::bf16);
  if (major != 9 || !half || p.has_pages || bucket < 0 || p.head_dim % 8 != 0 || p.head_dim_v % 8 != 0)
    return plan;
  // Positions a tile further must fit 32 bits.
  if (std::max(p.seqlen_q, p.seqlen_k) > std::numeric_limits<int32_t>::max() - 512) return plan;
  const Specs specs = specs_of(p);
  if (!tma_can_address(specs.query) || !tma_can_address(specs.key) || !tma_can_address(specs.value) ||
      !stores_in_words(p)) {
    return plan;
  }
  plan.ok = true;
  Sm90Schedule& schedule = plan.schedule;
  const int rows = kBuckets[bucket].rows;
  schedule.row_tiles = (p.seqlen_q + rows - 1) / rows;
  schedule.tiles = max_row_tiles(p, rows, 1) * p.heads;
  schedule.zero_tail = packed(p) || p.seqused_k != nullptr;
  // Half the L2 for the keys and values of a section; the heads of a group share theirs.
  const int64_t pair_bytes = static_cast<int64_t>(p.seqlen_k) * (p.head_dim + p.head_dim_v) * 2 / p.group;
  const int64_t pairs = static_cast<int64_t>(p.batch) * p.heads;
  schedule.section =
      static_cast<int32_t>(std::clamp<int64_t>(l2_bytes / 2 / std::max<int64_t>(pair_bytes, 1), 1, pairs));
  plan.blocks = static_cast<int>(std::min<int64_t>(schedule.tiles, multiprocessors));
  plan.needs_counter = schedule.tiles > plan.blocks && schedule.row_tiles > kSm90DealtTiles;
  return plan;
}

cudaError_t launch_forward_sm90(const Params& p, const Sm90Plan& plan, cudaStream_t stream) {
  if (plan.blocks == 0) return cudaSuccess;
  const int bucket = find_bucket(p);
  const Specs specs = specs_of(p);
  detail::Sm90Args args;
  args.query = make_tensor_map(specs.query, kBuckets[bucket].rows);
  args.key = make_tensor_map(specs.key, kBuckets[bucket].keys);
  args.value = make_tensor_map(specs.value, kBuckets[bucket].keys);
  args.p = p;
  args.schedule = plan.schedule;
  return p.dtype == static_cast<int>(DType::f16)
             ? detail::launch_forward_sm90_as<__half>(args, bucket, transformed(p), plan.blocks, stream)
             : detail::launch_forward_sm90_as<__nv_bfloat16>(args, bucket, transformed(p), plan.blocks,
                                                             stream);
}

}  // namespace attnspan::cuda
