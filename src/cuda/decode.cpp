#include "cuda/decode.hpp"

#include <algorithm>

#include "attnspan/tensor.hpp"

namespace attnspan::cuda {
namespace {

constexpr size_t kMultiprocessorShared =
    228 * 1024;                       // of Hopper; elsewhere fewer blocks fit, and the units wait
constexpr int64_t kUnitsPerTeam = 2;  // in a batch, at least: lengths differ

// 16 neighbouring keys lie in one page.
bool pages_fit(const Params& p) { return !p.has_pages || p.block_table == nullptr || p.page_size % 16 == 0; }

// Offsets of 16 rows, and of pages that come from a table, are products of 32 bits.
bool strides_fit(const Params& p, const KvPlane& plane) {
  return plane.token_stride >= 0 && plane.token_stride < 1LL << 27 &&
         (p.block_table == nullptr || (plane.page_stride >= 0 && plane.page_stride < 1LL << 32));
}

bool own_format(const Params& p, const KvPlane& plane) {
  return p.dtype != static_cast<int>(DType::f32) &&
         plane.format == (p.dtype == static_cast<int>(DType::f16) ? Format::f16 : Format::bf16);
}

// Multi-head latent attention as DeepSeek's models have it.
bool is_mla(const Params& p) {
  return p.shared_rows && own_format(p, p.key) && own_format(p, p.value) && p.head_dim == 576 &&
         p.head_dim_v == 512;
}

bool is_dense(const Params& p) {
  return own_format(p, p.key) && own_format(p, p.value) && strides_fit(p, p.key) && strides_fit(p, p.value) &&
         p.head_dim % 8 == 0 && p.head_dim_v % 8 == 0 && std::max(p.head_dim, p.head_dim_v) <= 256;
}

int scales_of_row(const KvPlane& plane) {
  return plane.format == Format::q8 ? (plane.dim + 31) / 32 : plane.stored_dim / plane.block;
}

// A plane that the quantised kernel reads: whole rows of its bucket, the scales of neighbouring keys side by
// side in words of two.
bool plane_fits(const Params& p, const KvPlane& plane, int dim) {
  if (plane.format != Format::q8 && plane.format != Format::tbq4) return false;
  const bool whole = plane.dim == dim && (plane.format == Format::q8 || plane.block == std::min(dim, 128));
  const int64_t scales = scales_of_row(plane);
  return whole && strides_fit(p, plane) && plane.scale_token_stride == scales &&
         plane.scale_page_stride % 2 == 0 && plane.scale_head_stride % 2 == 0 &&
         reinterpret_cast<uintptr_t>(plane.scales) % 4 == 0;
}

bool is_quantised(const Params& p) {
  const int dim = p.head_dim;
  return p.head_dim_v == dim && (dim == 64 || dim == 128 || dim == 256) && plane_fits(p, p.key, dim) &&
         plane_fits(p, p.value, dim);
}

constexpr size_t kTeamBytes = 1152;  // sizeof(DecodeTeam), at most

void shape_dense(DecodePlan& plan, const Params& p, const DeviceLimits& device) {
  const int dim = std::max(p.head_dim, p.head_dim_v);
  plan.dim = dim <= 64 ? 64 : dim <= 128 ? 128 : 256;
  plan.tile_rows = dense_rows(plan.dim, p.seqlen_q * p.group);
  plan.min_split_keys = kDenseSplitKeys;
  plan.grid.stages = dense_stages(plan.dim);
  const auto bytes = [&] {
    return static_cast<size_t>(plan.warps * plan.grid.stages * 2 * 16 * plan.dim * 2) + kTeamBytes;
  };
  while (bytes() > device.shared_bytes && plan.warps > 1) --plan.warps;
  plan.shared_bytes = bytes();
}

void shape_quantised(DecodePlan& plan, const Params& p, const DeviceLimits& device) {
  const bool key_q8 = p.key.format == Format::q8, value_q8 = p.value.format == Format::q8;
  plan.dim = p.head_dim;
  plan.tile_rows = quantised_rows(plan.dim, p.seqlen_q * p.group, key_q8 || value_q8);
  plan.min_split_keys = kQuantisedSplitKeys;
  const QuantisedShape shape = quantised_shape(plan.dim, plan.tile_rows, key_q8, value_q8);
  const size_t table = key_q8 && value_q8 ? 0 : kTableBytes;
  const size_t step = static_cast<size_t>(quantised_step_bytes(plan.dim, key_q8, value_q8, shape.groups));
  plan.teams = shape.teams;
  plan.grid.stages = shape.stages;
  const auto bytes = [&] {
    return quantised_table(plan.dim, plan.tile_rows) - shared_base(device.major) + table +
           static_cast<size_t>(plan.teams * plan.warps * plan.grid.stages) * step;
  };
  // What does not fit loses, in this order: the third step, teams, warps.
  if (bytes() > device.shared_bytes) plan.grid.stages = 2;
  while (bytes() > device.shared_bytes && plan.teams > 1) --plan.teams;
  while (bytes() > device.shared_bytes && plan.warps > 1) --plan.warps;
  plan.shared_bytes = bytes();
}

int64_t resident_teams(const DecodePlan& plan, const DeviceLimits& device) {
  return static_cast<int64_t>(plan.blocks_per_multiprocessor) * device.multiprocessors * plan.teams;
}

}  // namespace

DecodePlan plan_decode_kernel(const Params& p, const DeviceLimits& device) {
  DecodePlan plan;
  if (p.cu_seqlens_q != nullptr || !p.key.aligned || !p.value.aligned || !pages_fit(p)) return plan;
  plan.mla = is_mla(p);
  if (plan.mla) {
    plan.tile_rows = 16;
    plan.min_split_keys = kDenseSplitKeys;
    plan.shared_bytes = kMlaSharedBytes;
    plan.overlap = device.major >= 9;
    plan.ok = plan.shared_bytes <= device.shared_bytes;
    return plan;
  }
  if (p.shared_rows) return plan;
  plan.quantised = is_quantised(p);
  if (!plan.quantised && !is_dense(p)) return plan;
  if (plan.quantised) {
    shape_quantised(plan, p, device);
  } else {
    shape_dense(plan, p, device);
    plan.blocks_per_multiprocessor = kMultiprocessorShared / (plan.shared_bytes + 1024) >= 2 ? 2 : 1;
  }
  plan.overlap = device.major >= 9;
  plan.ok = plan.shared_bytes <= device.shared_bytes;
  return plan;
}

void plan_decode_grid(DecodePlan& plan, const Params& p, const DeviceLimits& device) {
  const int64_t rows = static_cast<int64_t>(p.seqlen_q) * p.group;
  const int64_t columns = (rows + plan.tile_rows - 1) / plan.tile_rows * p.kv_heads * p.batch;
  const int64_t teams = resident_teams(plan, device);
  // Runs as long as every team still gets some of them: queries and places are found once a run.
  const int64_t longest =
      std::clamp<int64_t>(columns * p.max_splits / (kUnitsPerTeam * teams), 1, p.max_splits);
  const int64_t runs = (p.max_splits + longest - 1) / longest;
  plan.grid.run_splits = plan.mla ? 1 : static_cast<int32_t>((p.max_splits + runs - 1) / runs);
  plan.grid.runs = (p.max_splits + plan.grid.run_splits - 1) / plan.grid.run_splits;
  plan.grid.units = static_cast<uint32_t>(columns * plan.grid.runs);
  plan.blocks = plan.mla ? plan.grid.units : std::min<int64_t>(plan.grid.units, teams / plan.teams);
}

cudaError_t launch_decode(const Params& p, const DecodePlan& plan, cudaStream_t stream) {
  if (plan.mla) return detail::launch_decode_mla(p, plan, stream);
  if (plan.quantised) return detail::launch_decode_quantised(p, plan, stream);
  return detail::launch_decode_dense(p, plan, stream);
}

}  // namespace attnspan::cuda
