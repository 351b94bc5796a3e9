#include "cuda/decode.hpp"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "attnspan/tensor.hpp"

namespace attnspan::cuda {
namespace {

constexpr int kWarps = 4;
constexpr size_t kMultiprocessorShared =
    228 * 1024;  // of Hopper; elsewhere fewer blocks fit, and the splits wait

int bucket_of(int dim) { return dim <= 64 ? 0 : dim <= 128 ? 1 : 2; }
constexpr int kBucketDims[3] = {64, 128, 256};

// 16 neighbouring keys lie in one page.
bool pages_fit(const Params& p) { return !p.has_pages || p.block_table == nullptr || p.page_size % 16 == 0; }

bool is_dense(const Params& p) {
  const Format own = p.dtype == static_cast<int>(DType::f16) ? Format::f16 : Format::bf16;
  return p.dtype != static_cast<int>(DType::f32) && p.key.format == own && p.value.format == own &&
         p.head_dim % 8 == 0 && p.head_dim_v % 8 == 0 && std::max(p.head_dim, p.head_dim_v) <= 256;
}

int scales_of_row(const KvPlane& plane) {
  return plane.format == Format::q8 ? (plane.dim + 31) / 32 : plane.stored_dim / plane.block;
}
int bytes_of_row(const KvPlane& plane) {
  return plane.format == Format::q8 ? plane.dim : plane.stored_dim / 2;
}

// A plane that the quantised kernel reads: whole rows of its bucket, scales of neighbouring keys in a row.
bool plane_fits(const KvPlane& plane, int dim) {
  if (plane.format != Format::q8 && plane.format != Format::tbq4) return false;
  const bool whole = plane.dim == dim && (plane.format == Format::q8 || plane.block == std::min(dim, 128));
  const bool scales = plane.scale_token_stride == scales_of_row(plane) && plane.scale_page_stride % 2 == 0 &&
                      plane.scale_head_stride % 2 == 0 && reinterpret_cast<uintptr_t>(plane.scales) % 4 == 0;
  return whole && scales;
}

bool is_quantised(const Params& p) {
  const int dim = p.head_dim;
  return p.head_dim_v == dim && (dim == 64 || dim == 128 || dim == 256) && plane_fits(p.key, dim) &&
         plane_fits(p.value, dim);
}

size_t merge_bytes(int dim, int warps) { return static_cast<size_t>(warps) * 8 * (dim + 6) * sizeof(float); }

size_t dense_shared_bytes(int dim) {
  const int stages = dim == 64 ? 6 : 3;
  return static_cast<size_t>(kWarps) * stages * 2 * 16 * dim * 2;
}

// Shared memory of the quantised kernel with plan.stages.
size_t quantised_shared_bytes(const Params& p, const DecodePlan& plan) {
  const size_t codes = static_cast<size_t>(plan.key_row + plan.value_row) * kQuantisedStep;
  const size_t scales = static_cast<size_t>(plan.key_scales + plan.value_scales) * 2 * kQuantisedStep;
  const size_t ring = plan.warps * plan.stages * ((codes + scales + 127) / 128 * 128);
  const bool table = p.key.format == Format::tbq4 || p.value.format == Format::tbq4;
  const size_t query = static_cast<size_t>(plan.tile_rows) * (p.head_dim + 2) * sizeof(float);
  return (table ? 256 * 32 * 4 : 0) + std::max({ring, query, merge_bytes(p.head_dim, plan.warps)});
}

void shape_quantised(DecodePlan& plan, const Params& p, size_t shared_limit) {
  plan.key_row = bytes_of_row(p.key);
  plan.value_row = bytes_of_row(p.value);
  plan.key_scales = scales_of_row(p.key);
  plan.value_scales = scales_of_row(p.value);
  plan.warps = quantised_warps(p.head_dim, plan.tile_rows / 8);
  for (;;) {  // fewer steps in flight, then fewer warps, until they fit
    for (plan.stages = 4; plan.stages >= 2; --plan.stages) {
      plan.shared_bytes = quantised_shared_bytes(p, plan);
      if (plan.shared_bytes <= shared_limit) return;
    }
    if (plan.warps == 1) return;
    plan.warps /= 2;
  }
}

}  // namespace

DecodePlan plan_decode_kernel(const Params& p, size_t shared_limit, int multiprocessors, int major) {
  DecodePlan plan;
  if (p.cu_seqlens_q != nullptr || !p.key.aligned || !p.value.aligned || !pages_fit(p) || p.shared_rows)
    return plan;
  plan.quantised = is_quantised(p);
  if (!plan.quantised && !is_dense(p)) return plan;
  plan.bucket = bucket_of(std::max(p.head_dim, p.head_dim_v));
  plan.warps = kWarps;
  plan.tile_rows = p.seqlen_q * p.group <= 8 ? 8 : 16;
  if (plan.quantised) {
    shape_quantised(plan, p, shared_limit);
  } else {
    // The merge of warps has memory of its own: copies of the next item are under way then.
    plan.shared_bytes =
        dense_shared_bytes(kBucketDims[plan.bucket]) + merge_bytes(kBucketDims[plan.bucket], kWarps);
  }
  plan.blocks_per_multiprocessor =
      std::max<int>(1, static_cast<int>(kMultiprocessorShared / (plan.shared_bytes + 1024)));
  plan.resident_blocks = plan.blocks_per_multiprocessor * multiprocessors;
  plan.overlap = major >= 9;
  plan.ok = plan.shared_bytes <= shared_limit;
  return plan;
}

cudaError_t launch_decode(const Params& p, const DecodePlan& plan, cudaStream_t stream) {
  if (plan.quantised) return detail::launch_decode_quantised(p, plan, stream);
  return p.dtype == static_cast<int>(DType::f16)
             ? detail::launch_decode_dense<__half>(p, plan, stream)
             : detail::launch_decode_dense<__nv_bfloat16>(p, plan, stream);
}

}  // namespace attnspan::cuda
