#include "metal/launch_plan.hpp"

#include <algorithm>
#include <cstring>

#include "kv/tbq4_constants.hpp"
#include "metal/plan_parts.hpp"
#include "metal/tiles.hpp"

namespace attnspan::metal {

using attnspan_metal::AttentionParams;
using attnspan_metal::KvStrides;
using attnspan_metal::MergeParams;
using attnspan_metal::RowStrides;

bool is_bool(int function_constant) {
  static constexpr bool kIsBool[] = {
#define ATTNSPAN_CONSTANT(TYPE, NAME) sizeof(TYPE) == sizeof(bool),
      ATTNSPAN_FUNCTION_CONSTANTS(ATTNSPAN_CONSTANT)
#undef ATTNSPAN_CONSTANT
  };
  return kIsBool[function_constant];
}

const Tile& tile_for(int64_t dim, bool decode) {
  for (const Tile& tile : kTiles) {
    const bool is_decode = std::strncmp(tile.name, "decode", 6) == 0;
    if (is_decode == decode && dim <= tile.max_dim) return tile;
  }
  return *std::find_if(std::begin(kTiles), std::end(kTiles),
                       [](const Tile& t) { return t.max_dim == kMaxHeadDim; });
}

namespace {

// Positions are ints in the shaders, and sums of two stay below 2^31.
constexpr int64_t kMaxRows = int64_t{1} << 30;

RowStrides strides_of(const Rows& rows) { return {rows.batch_stride, rows.head_stride, rows.row_stride}; }

KvStrides dense_strides(const Rows& rows, DType dtype) {
  const int64_t size = size_of(dtype);
  return {rows.batch_stride * size, rows.head_stride * size, rows.row_stride * size, 0, 0, 0};
}

KvStrides cache_strides(const KvRows& rows) {
  return {rows.page_stride,       rows.head_stride,       rows.token_stride,
          rows.scale_page_stride, rows.scale_head_stride, rows.scale_token_stride};
}

void set_cache_params(const KvView& cache, AttentionParams& params) {
  params.key = cache_strides(cache.key);
  params.value = cache_strides(cache.value);
  params.page_size = static_cast<int32_t>(cache.page_size);
  params.lengths_batch = cache.seqlens.stride[0];
  if (cache.first_position) params.first_position_batch = cache.first_position.stride[0];
  if (cache.block_table) {
    params.block_table_batch = cache.block_table.stride[0];
    params.block_table_page = cache.block_table.stride[1];
  }
}

}  // namespace

AttentionParams params_of(const Problem& p) {
  AttentionParams params{};
  params.query = strides_of(p.query);
  params.out = strides_of(p.out);
  params.lse = strides_of(p.lse);
  params.dlse = strides_of(p.dlse);
  params.dout = strides_of(p.dout);
  params.dq = strides_of(p.dq);
  params.dk = strides_of(p.dk);
  params.dv = strides_of(p.dv);
  if (p.cache != nullptr) {
    set_cache_params(*p.cache, params);
  } else {
    params.key = dense_strides(p.key, p.dtype);
    params.value = dense_strides(p.value, p.dtype);
  }
  params.bias_batch = p.bias.batch_stride;
  params.bias_head = p.bias.head_stride;
  params.bias_row = p.bias.row_stride;
  params.bias_key = p.bias.key_stride;
  params.probs_batch = p.probs.batch_stride;
  params.probs_head = p.probs.head_stride;
  params.probs_row = p.probs.row_stride;
  params.probs_key = p.probs.key_stride;
  params.key_start_batch = p.key_start.batch_stride;
  params.key_end_batch = p.key_end.batch_stride;
  params.alibi_batch = p.alibi_slopes.batch_stride;
  params.diagonal = p.diagonal.value;
  params.window_left = p.window_left;
  params.window_right = p.window_right;
  params.diagonal_kind = static_cast<int32_t>(p.diagonal.kind);
  if (p.seqused_k != nullptr) params.lengths_batch = 1;
  params.batch = static_cast<int32_t>(p.batch);
  params.heads = static_cast<int32_t>(p.heads);
  params.kv_heads = static_cast<int32_t>(p.kv_heads);
  params.seqlen_q = static_cast<int32_t>(p.seqlen_q);
  params.seqlen_k = static_cast<int32_t>(p.seqlen_k);
  params.most_rows = params.seqlen_q;
  params.splits = 1;
  params.softmax_scale = p.softmax_scale;
  params.softcap = p.softcap;
  return params;
}

namespace {

void set_formats(const Problem& p, FunctionConstants& c) {
  const auto set_side = [&](KvSide side, int64_t dim, int format_at, int width_at, int block_at) {
    c[format_at] = static_cast<int32_t>(p.dtype);
    c[width_at] = static_cast<int32_t>(dim);
    c[block_at] = 1;
    if (p.cache == nullptr) return;
    c[format_at] = static_cast<int32_t>(rows_of(*p.cache, side).format);
    if (rows_of(*p.cache, side).format != KvFormat::tbq4) return;
    const int64_t block = tbq4::block_size(encoded_dim(*p.cache, side));
    c[block_at] = static_cast<int32_t>(block);
    c[width_at] = static_cast<int32_t>((dim + block - 1) / block * block);
  };
  set_side(KvSide::key, p.head_dim, KEY_FORMAT, KEY_WIDTH, KEY_BLOCK);
  set_side(KvSide::value, p.head_dim_v, VALUE_FORMAT, VALUE_WIDTH, VALUE_BLOCK);
}

}  // namespace

FunctionConstants constants_of(const Problem& p) {
  FunctionConstants c{};
  c[HEAD_DIM] = static_cast<int32_t>(p.head_dim);
  c[HEAD_DIM_V] = static_cast<int32_t>(p.head_dim_v);
  c[GROUP] = static_cast<int32_t>(p.group());
  c[DTYPE] = static_cast<int32_t>(p.dtype);
  set_formats(p, c);
  c[PACKED] = p.packed();
  c[HAS_LENGTHS] = p.seqused_k != nullptr || p.cache != nullptr;
  c[HAS_FIRST_POSITION] = p.cache != nullptr && p.cache->first_position;
  c[HAS_BLOCK_TABLE] = p.cache != nullptr && p.cache->block_table;
  c[HAS_KEY_START] = static_cast<bool>(p.key_start);
  c[HAS_KEY_END] = static_cast<bool>(p.key_end);
  c[HAS_SOFTCAP] = p.softcap != 0;
  c[HAS_BIAS] = p.bias.data != nullptr;
  c[HAS_ALIBI] = static_cast<bool>(p.alibi_slopes);
  c[HAS_SINKS] = p.sinks != nullptr;
  c[HAS_LSE] = static_cast<bool>(p.lse);
  c[HAS_DLSE] = static_cast<bool>(p.dlse);
  c[NAN_GUARD] = p.nan_guard;
  return c;
}

namespace {

TensorSlot slot(const void* buffer, int64_t byte_offset = 0) {
  return {const_cast<void*>(buffer), byte_offset, false};
}
TensorSlot slot(const Rows& rows) { return slot(rows.data, rows.byte_offset); }
TensorSlot slot(const Tensor& tensor) { return slot(tensor.data, tensor.byte_offset); }

}  // namespace

std::vector<TensorSlot> tensors_of(const Problem& p) {
  std::vector<TensorSlot> t(kAttentionTensors);
  t[k_query] = slot(p.query);
  t[k_key_codes] = slot(p.key);
  t[k_value_codes] = slot(p.value);
  if (p.cache != nullptr) {
    const KvView& cache = *p.cache;
    t[k_key_codes] = slot(cache.key.codes, cache.key.codes_byte_offset);
    t[k_key_scales] = slot(cache.key.scales, cache.key.scales_byte_offset);
    t[k_value_codes] = slot(cache.value.codes, cache.value.codes_byte_offset);
    t[k_value_scales] = slot(cache.value.scales, cache.value.scales_byte_offset);
    t[k_lengths] = slot(cache.seqlens);
    t[k_first_position] = slot(cache.first_position);
    t[k_block_table] = slot(cache.block_table);
  }
  if (p.seqused_k != nullptr) t[k_lengths] = slot(p.seqused_k);
  t[k_out] = slot(p.out);
  t[k_lse] = slot(p.lse);
  t[k_probs] = slot(p.probs.data);
  t[k_cu_seqlens_q] = slot(p.cu_seqlens_q);
  t[k_cu_seqlens_k] = slot(p.cu_seqlens_k);
  t[k_key_start] = slot(p.key_start.data, p.key_start.byte_offset);
  t[k_key_end] = slot(p.key_end.data, p.key_end.byte_offset);
  t[k_bias] = slot(p.bias.data, p.bias.byte_offset);
  t[k_alibi_slopes] = slot(p.alibi_slopes.data, p.alibi_slopes.byte_offset);
  t[k_sinks] = slot(p.sinks);
  t[k_dout] = slot(p.dout);
  t[k_dlse] = slot(p.dlse);
  t[k_dq] = slot(p.dq);
  t[k_dk] = slot(p.dk);
  t[k_dv] = slot(p.dv);
  t[k_d_sinks] = slot(p.d_sinks);
  return t;
}

Scratch::Scratch(Plan& plan) : plan_(plan) { plan_.scratch_bytes = kCounterBytes; }

TensorSlot Scratch::take(int64_t bytes) {
  const TensorSlot taken = {nullptr, static_cast<int64_t>(plan_.scratch_bytes), true};
  plan_.scratch_bytes += static_cast<size_t>((bytes + 255) / 256 * 256);
  return taken;
}

Launch attention_launch(const FunctionConstants& constants, const AttentionParams& params,
                        const std::vector<TensorSlot>& tensors) {
  Launch launch;
  launch.constants = constants;
  launch.tensors = tensors;
  launch.params = bytes_of(params);
  launch.threads = ATTNSPAN_THREADS;
  return launch;
}

DType tile_type(const Problem& p) {
  if (p.cache == nullptr) return p.dtype;
  const auto same = [&](KvFormat format) { return static_cast<int>(format) == static_cast<int>(p.dtype); };
  return same(p.cache->key.format) && same(p.cache->value.format) ? p.dtype : DType::f32;
}

std::string kernel_name(const char* stem, const Tile& tile, DType type) {
  return std::string(stem) + "_" + tile.name + "_" + name_of(type);
}

uint32_t tiles(int64_t rows, int64_t tile) { return static_cast<uint32_t>((rows + tile - 1) / tile); }

Support supports(const Problem& p) {
  if (p.seqlen_q * p.group() >= kMaxRows || p.seqlen_k >= kMaxRows) {
    return Support::no("sequences of 2^30 rows or more (positions are 32-bit in the shaders)");
  }
  return is_unfused(p) ? supports_unfused(p) : Support::yes();
}

Plan plan_merge(const MergeProblem& p) {
  Plan plan;
  if (p.batch == 0 || p.heads == 0 || p.rows == 0) return plan;
  MergeParams params{};
  params.out_a = strides_of(p.out_a);
  params.lse_a = strides_of(p.lse_a);
  params.out_b = strides_of(p.out_b);
  params.lse_b = strides_of(p.lse_b);
  params.out = strides_of(p.out);
  params.lse = strides_of(p.lse);
  params.batch = static_cast<int32_t>(p.batch);
  params.heads = static_cast<int32_t>(p.heads);
  params.rows = static_cast<int32_t>(p.rows);
  params.head_dim_v = static_cast<int32_t>(p.head_dim_v);
  Launch launch;
  launch.kernel = "merge_states";
  launch.constants[DTYPE] = static_cast<int32_t>(p.dtype);
  launch.tensors = {slot(p.out_a), slot(p.lse_a), slot(p.out_b), slot(p.lse_b), slot(p.out), slot(p.lse)};
  launch.params = bytes_of(params);
  launch.threads = ATTNSPAN_THREADS;
  launch.groups = {tiles(p.rows, ATTNSPAN_SIMDGROUPS), static_cast<uint32_t>(p.heads),
                   static_cast<uint32_t>(p.batch)};
  plan.launches.push_back(launch);
  return plan;
}

Plan plan_layout_probe(void* elements) {
  Launch launch;
  launch.kernel = "matrix_layout_probe";
  launch.tensors = {slot(elements)};
  launch.params.resize(4);  // it has none
  launch.groups = {1, 1, 1};
  launch.threads = 32;
  launch.threadgroup_bytes = 64 * 4;
  Plan plan;
  plan.launches.push_back(launch);
  return plan;
}

}  // namespace attnspan::metal
