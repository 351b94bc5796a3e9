// The launch that encodes new rows into a cache.

#include "kv/tbq4_constants.hpp"
#include "metal/plan_parts.hpp"

namespace attnspan::metal {

Plan plan_append(const AppendProblem& p) {
  Plan plan;
  if (p.batch == 0 || p.seqlen_new == 0) return plan;
  const KvView& view = *p.view;
  const KvRows& rows = rows_of(view, p.side);
  attnspan_metal::AppendParams params{};
  params.rows = {p.rows.batch_stride, p.rows.head_stride, p.rows.row_stride};
  params.plane = {rows.page_stride,       rows.head_stride,       rows.token_stride,
                  rows.scale_page_stride, rows.scale_head_stride, rows.scale_token_stride};
  if (view.block_table) {
    params.block_table_batch = view.block_table.stride[0];
    params.block_table_page = view.block_table.stride[1];
  }
  params.positions_stride = p.positions.stride[0];
  if (view.first_position) params.first_stride = view.first_position.stride[0];
  params.batch = static_cast<int32_t>(p.batch);
  params.kv_heads = static_cast<int32_t>(view.kv_heads);
  params.seqlen_new = static_cast<int32_t>(p.seqlen_new);
  params.page_size = static_cast<int32_t>(view.page_size);

  // A caller that does not count the scales beyond f16 has them counted where nobody looks.
  TensorSlot saturated = {p.saturated.data, p.saturated.byte_offset};
  if (!p.saturated) {
    Scratch scratch(plan);
    saturated = {nullptr, 0, true};
  }

  Launch launch;
  launch.kernel = "cache_append";
  FunctionConstants& c = launch.constants;
  c[HEAD_DIM] = static_cast<int32_t>(rows.dim);
  c[DTYPE] = static_cast<int32_t>(p.dtype);
  c[KEY_FORMAT] = static_cast<int32_t>(rows.format);
  c[KEY_BLOCK] = static_cast<int32_t>(tbq4::block_size(rows.dim));
  c[KEY_WIDTH] = static_cast<int32_t>(tbq4::padded_dim(rows.dim));
  c[HAS_BLOCK_TABLE] = static_cast<bool>(view.block_table);
  c[HAS_FIRST_POSITION] = static_cast<bool>(view.first_position);
  c[ENCODE_FAST] = p.mode == EncodeMode::fast;
  launch.tensors = {{p.rows.data, p.rows.byte_offset},
                    {p.positions.data, p.positions.byte_offset},
                    {view.block_table.data, view.block_table.byte_offset},
                    {view.first_position.data, view.first_position.byte_offset},
                    {rows.codes, rows.codes_byte_offset},
                    {rows.scales, rows.scales_byte_offset},
                    saturated};
  launch.params = bytes_of(params);
  launch.groups = {tiles(p.seqlen_new, ATTNSPAN_SIMDGROUPS), static_cast<uint32_t>(view.kv_heads),
                   static_cast<uint32_t>(p.batch)};
  launch.threads = ATTNSPAN_THREADS;
  launch.threadgroup_bytes = static_cast<uint32_t>(ATTNSPAN_SIMDGROUPS * c[KEY_WIDTH] * 4);
  plan.launches.push_back(launch);
  return plan;
}

}  // namespace attnspan::metal
