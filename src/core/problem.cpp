#include "core/problem.hpp"

#include <algorithm>
#include <cmath>

#include "core/validation.hpp"

namespace attnspan {
namespace {

// Handles (WebGPU, Metal) keep their byte offset; addresses absorb it.
void* address(const Tensor& tensor, int64_t& byte_offset) {
  if (tensor.device == Device::cpu || tensor.device == Device::cuda) {
    byte_offset = 0;
    return tensor.data == nullptr ? nullptr : static_cast<char*>(tensor.data) + tensor.byte_offset;
  }
  byte_offset = tensor.byte_offset;
  return tensor.data;
}

template <typename T>
const T* side_address(const Tensor& tensor, int64_t& byte_offset) {
  return static_cast<const T*>(address(tensor, byte_offset));
}

// For side inputs that Problem keeps as a bare address: a handle must start at its first byte.
template <typename T>
const T* bare_address(const Tensor& tensor, const char* name) {
  int64_t byte_offset = 0;
  const T* data = side_address<T>(tensor, byte_offset);
  if (byte_offset != 0) {
    refuse(name, "byte_offset " + std::to_string(byte_offset), "0 for buffer handles");
  }
  return data;
}

// [batch, rows, heads, dim], or packed [total, heads, dim]
Rows rows_of(const Tensor& tensor) {
  Rows rows;
  if (!tensor) return rows;
  rows.data = address(tensor, rows.byte_offset);
  const int first = tensor.rank == 4 ? 1 : 0;
  rows.batch_stride = tensor.rank == 4 ? tensor.stride[0] : 0;
  rows.row_stride = tensor.stride[first];
  rows.head_stride = tensor.stride[first + 1];
  return rows;
}

// [batch, heads, rows], or packed [heads, total]
Rows lse_rows_of(const Tensor& tensor) {
  Rows rows;
  if (!tensor) return rows;
  rows.data = address(tensor, rows.byte_offset);
  const int first = tensor.rank == 3 ? 1 : 0;
  rows.batch_stride = tensor.rank == 3 ? tensor.stride[0] : 0;
  rows.head_stride = tensor.stride[first];
  rows.row_stride = tensor.stride[first + 1];
  return rows;
}

const char* const kDense = "[batch, seqlen, heads, dim]";
const char* const kPacked = "[total, heads, dim], because cu_seqlens is given";

void check_rows_tensor(const Tensor& tensor, const char* name, const Problem& p) {
  require(static_cast<bool>(tensor), name, "no tensor", "one");
  require_rank(tensor, name, p.packed() ? 3 : 4, p.packed() ? kPacked : kDense);
  require_dtype(tensor, name, p.dtype);
  require_device(tensor, name, p.device);
  require_rows(tensor, name);
}

// Shape of a tensor like query (rows = seqlen_q, heads) or like key (seqlen_k, kv_heads).
void check_shape(const Tensor& tensor, const char* name, const Problem& p, int64_t rows, int64_t heads,
                 int64_t dim, const std::string& meaning) {
  if (p.packed()) {
    require_shape(tensor, name, {rows, heads, dim}, meaning);
  } else {
    require_shape(tensor, name, {p.batch, rows, heads, dim}, meaning);
  }
}

void check_lse_like(const Tensor& tensor, const char* name, const Problem& p) {
  require_dtype(tensor, name, DType::f32);
  require_device(tensor, name, p.device);
  if (p.packed()) {
    require_shape(tensor, name, {p.heads, p.seqlen_q}, "heads, total_q");
  } else {
    require_shape(tensor, name, {p.batch, p.heads, p.seqlen_q}, "batch, heads, seqlen_q");
  }
  require(tensor.data != nullptr || tensor.numel() == 0, name, "no data (null address)", "an address");
}

// cu_seqlens[0] = 0, never decreasing, ending at the rows of the tensor. Device arrays are trusted.
void check_cu_seqlens(const Tensor& cu, const char* name, int64_t batch, int64_t total, const Problem& p) {
  require_dtype(cu, name, DType::i32);
  require_device(cu, name, p.device);
  require_shape(cu, name, {batch + 1}, "batch + 1");
  require_rows(cu, name);
  if (cu.device != Device::cpu) return;
  int64_t offset = 0;
  const int32_t* values = side_address<int32_t>(cu, offset);
  if (values[0] != 0) {
    refuse(name, "first entry " + std::to_string(values[0]), "0");
  }
  for (int64_t i = 0; i < batch; ++i) {
    if (values[i + 1] < values[i]) {
      refuse(name,
             "entry " + std::to_string(i + 1) + " = " + std::to_string(values[i + 1]) + " after " +
                 std::to_string(values[i]),
             "offsets that never decrease");
    }
  }
  if (values[batch] != total) {
    refuse(name, "last entry " + std::to_string(values[batch]),
           std::to_string(total) + " (rows of the packed tensor)");
  }
}

void set_packed(Problem& p, const AttentionOptions& o, const Tensor& query, const Tensor& key) {
  require(o.cu_seqlens_q && o.cu_seqlens_k, o.cu_seqlens_q ? "cu_seqlens_k" : "cu_seqlens_q", "no tensor",
          "both cu_seqlens_q and cu_seqlens_k, or neither");
  require_rank(o.cu_seqlens_q, "cu_seqlens_q", 1, "batch + 1");
  p.batch = o.cu_seqlens_q.shape[0] - 1;
  require(p.batch >= 0, "cu_seqlens_q", "no entries", "batch + 1 entries");
  check_cu_seqlens(o.cu_seqlens_q, "cu_seqlens_q", p.batch, query.rank > 0 ? query.shape[0] : 0, p);
  check_cu_seqlens(o.cu_seqlens_k, "cu_seqlens_k", p.batch, key.rank > 0 ? key.shape[0] : 0, p);
  p.cu_seqlens_q = bare_address<int32_t>(o.cu_seqlens_q, "cu_seqlens_q");
  p.cu_seqlens_k = bare_address<int32_t>(o.cu_seqlens_k, "cu_seqlens_k");
  for (const auto& [tensor, name] : {std::pair{o.key_start, "key_start"},
                                     {o.key_end, "key_end"},
                                     {o.bias, "bias"},
                                     {o.seqused_k, "seqused_k"}}) {
    require(!tensor, name, "a tensor together with cu_seqlens", "one of the two");
  }
}

void check_value_head_count(const Problem& p) {
  if (p.kv_heads < 1 || p.heads < 1 || p.heads % p.kv_heads != 0) {
    refuse("query", std::to_string(p.heads) + " heads over " + std::to_string(p.kv_heads) + " KV heads",
           "heads that are a multiple of KV heads");
  }
}

void set_query(Problem& p, const Tensor& query, const AttentionOptions& o) {
  require(static_cast<bool>(query), "query", "no tensor", "one");
  require(query.dtype != DType::i32, "query", name_of(query.dtype), "f32, f16 or bf16");
  p.device = query.device;
  p.dtype = query.dtype;
  const bool packed = o.cu_seqlens_q || o.cu_seqlens_k;
  require_rank(query, "query", packed ? 3 : 4, packed ? kPacked : kDense);
  require_rows(query, "query");
  const int row_dim = packed ? 0 : 1;
  p.batch = packed ? 0 : query.shape[0];
  p.seqlen_q = query.shape[row_dim];
  p.heads = query.shape[row_dim + 1];
  p.head_dim = query.shape[row_dim + 2];
  check_head_dim(p.head_dim, "query");
  p.query = rows_of(query);
}

void set_key_value(Problem& p, const Tensor& key, const Tensor& value, const AttentionOptions& o,
                   const Tensor& query) {
  if (o.cu_seqlens_q || o.cu_seqlens_k) set_packed(p, o, query, key);
  check_rows_tensor(key, "key", p);
  check_rows_tensor(value, "value", p);
  const int row_dim = p.packed() ? 0 : 1;
  p.seqlen_k = key.shape[row_dim];
  p.kv_heads = key.shape[row_dim + 1];
  p.head_dim_v = value.shape[row_dim + 2];
  check_head_dim(p.head_dim_v, "value");
  check_value_head_count(p);
  check_shape(key, "key", p, -1, -1, p.head_dim, "batch and head_dim like query");
  check_shape(value, "value", p, p.seqlen_k, p.kv_heads, -1, "batch, seqlen and heads like key");
  p.key = rows_of(key);
  p.value = rows_of(value);
}

void check_cache_lengths(const KvView& cache) {
  require_shape(cache.seqlens, "cache", {cache.batch}, "seqlens: batch");
  require_dtype(cache.seqlens, "cache", DType::i32);
  if (cache.block_table) {
    require_shape(cache.block_table, "cache", {cache.batch, -1}, "block_table: batch, pages per sequence");
    require_dtype(cache.block_table, "cache", DType::i32);
  }
  if (cache.device != Device::cpu) return;  // lengths and tables on a device are trusted
  const int32_t* seqlens = bare_address<int32_t>(cache.seqlens, "cache");
  const int32_t* first =
      cache.first_position ? bare_address<int32_t>(cache.first_position, "cache") : nullptr;
  const int64_t pages_of_one = cache.block_table ? cache.block_table.shape[1] : 1;
  for (int64_t b = 0; b < cache.batch; ++b) {
    const int64_t begin = first != nullptr ? first[b * cache.first_position.stride[0]] : 0;
    const int64_t end = seqlens[b * cache.seqlens.stride[0]];
    if (begin < 0 || end < begin || end > cache.max_seqlen) {
      refuse("cache", "seqlens " + std::to_string(end) + " for sequence " + std::to_string(b),
             std::to_string(begin) + " to " + std::to_string(cache.max_seqlen));
    }
    const int64_t pages = (end - begin + cache.page_size - 1) / cache.page_size;
    if (pages > pages_of_one) {
      refuse("cache", std::to_string(pages) + " pages for sequence " + std::to_string(b),
             "at most " + std::to_string(pages_of_one) + ", the width of block_table");
    }
    const int32_t* table = cache.block_table ? bare_address<int32_t>(cache.block_table, "cache") +
                                                   b * cache.block_table.stride[0]
                                             : nullptr;
    for (int64_t i = 0; table != nullptr && i < pages; ++i) {
      const int32_t page = table[i * cache.block_table.stride[1]];
      if (page < 0 || page >= cache.num_pages) {
        refuse("cache", "page " + std::to_string(page) + " in block_table of sequence " + std::to_string(b),
               "0 to " + std::to_string(cache.num_pages - 1));
      }
    }
  }
}

void set_cache(Problem& p, const KvView& cache, const AttentionOptions& o) {
  for (const auto& [tensor, name] : {std::pair{o.cu_seqlens_q, "cu_seqlens_q"},
                                     {o.cu_seqlens_k, "cu_seqlens_k"},
                                     {o.seqused_k, "seqused_k"}}) {
    require(!tensor, name, "a tensor together with a cache", "one of the two (the cache knows its lengths)");
  }
  if (cache.device != p.device) {
    refuse("cache", std::string("a cache on ") + name_of(cache.device),
           std::string("one on ") + name_of(p.device) + ", where query is");
  }
  if (cache.batch != p.batch) {
    refuse("cache", std::to_string(cache.batch) + " sequences", std::to_string(p.batch) + " (query's batch)");
  }
  if (cache.key.dim != p.head_dim) {
    refuse("cache", "key head dim " + std::to_string(cache.key.dim),
           std::to_string(p.head_dim) + " (query's)");
  }
  check_head_dim(cache.value.dim, "cache");
  if (cache.page_size < 1) {
    refuse("cache", "page_size " + std::to_string(cache.page_size), "1 or more");
  }
  check_cache_lengths(cache);
  p.cache = &cache;
  p.kv_heads = cache.kv_heads;
  p.head_dim_v = cache.value.dim;
  p.seqlen_k = cache.max_seqlen;
  check_value_head_count(p);
}

void set_score(Problem& p, const AttentionOptions& o) {
  if (!std::isfinite(o.softmax_scale)) {
    refuse("softmax_scale", std::to_string(o.softmax_scale), "a finite number");
  }
  if (!std::isfinite(o.softcap) || o.softcap < 0) {
    refuse("softcap", std::to_string(o.softcap), "0 (off) or a positive number");
  }
  p.softmax_scale = o.softmax_scale != 0
                        ? o.softmax_scale
                        : static_cast<float>(1.0 / std::sqrt(static_cast<double>(p.head_dim)));
  p.softcap = o.softcap;
  if (o.bias) {
    require_dtype(o.bias, "bias", DType::f32);
    require_device(o.bias, "bias", p.device);
    require_rank(o.bias, "bias", 4, "broadcastable to [batch, heads, seqlen_q, seqlen_k]");
    const int64_t full[4] = {p.batch, p.heads, p.seqlen_q, p.seqlen_k};
    int64_t stride[4];
    for (int i = 0; i < 4; ++i) {
      if (o.bias.shape[i] != full[i] && o.bias.shape[i] != 1) {
        refuse("bias", "extent " + std::to_string(o.bias.shape[i]) + " in dimension " + std::to_string(i),
               std::to_string(full[i]) + " or 1");
      }
      require(o.bias.stride[i] >= 0, "bias", "a negative stride", "strides of 0 or more");
      stride[i] = o.bias.shape[i] == 1 ? 0 : o.bias.stride[i];
    }
    p.bias.data = side_address<float>(o.bias, p.bias.byte_offset);
    p.bias.batch_stride = stride[0];
    p.bias.head_stride = stride[1];
    p.bias.row_stride = stride[2];
    p.bias.key_stride = stride[3];
  }
  if (o.alibi_slopes) {
    require_dtype(o.alibi_slopes, "alibi_slopes", DType::f32);
    require_device(o.alibi_slopes, "alibi_slopes", p.device);
    const bool per_batch = o.alibi_slopes.rank == 2;
    if (per_batch) require_shape(o.alibi_slopes, "alibi_slopes", {p.batch, p.heads}, "batch, heads");
    if (!per_batch) require_shape(o.alibi_slopes, "alibi_slopes", {p.heads}, "heads");
    require_rows(o.alibi_slopes, "alibi_slopes");
    p.alibi_slopes.data = side_address<float>(o.alibi_slopes, p.alibi_slopes.byte_offset);
    p.alibi_slopes.batch_stride = per_batch ? o.alibi_slopes.stride[0] : 0;
  }
  if (o.sinks) {
    require_dtype(o.sinks, "sinks", DType::f32);
    require_device(o.sinks, "sinks", p.device);
    require_shape(o.sinks, "sinks", {p.heads}, "heads");
    require_rows(o.sinks, "sinks");
    p.sinks = bare_address<float>(o.sinks, "sinks");
  }
}

int64_t window(int64_t size, const char* name) {
  if (size < -1) refuse(name, std::to_string(size), "0 or more, or -1 for unlimited");
  return size == -1 ? kUnlimited : std::min(size, kUnlimited);
}

SideVector<int32_t> per_row_keys(const Tensor& tensor, const char* name, const Problem& p) {
  SideVector<int32_t> vector;
  if (!tensor) return vector;
  require_dtype(tensor, name, DType::i32);
  require_device(tensor, name, p.device);
  if (tensor.rank == 2) {
    require_shape(tensor, name, {p.batch, p.seqlen_q}, "batch, seqlen_q");
  } else {
    require_shape(tensor, name, {p.seqlen_q}, "seqlen_q");
  }
  require_rows(tensor, name);
  vector.data = side_address<int32_t>(tensor, vector.byte_offset);
  vector.batch_stride = tensor.rank == 2 ? tensor.stride[0] : 0;
  if (tensor.device != Device::cpu) return vector;  // values on a device are trusted
  for (int64_t b = 0; b < (tensor.rank == 2 ? p.batch : 1); ++b) {
    const int32_t* values = vector.data + b * vector.batch_stride;
    for (int64_t i = 1; i < p.seqlen_q; ++i) {
      if (values[i] < values[i - 1]) {
        refuse(name,
               "entry " + std::to_string(i) + " = " + std::to_string(values[i]) + " after " +
                   std::to_string(values[i - 1]),
               "values that never decrease along the sequence");
      }
    }
  }
  return vector;
}

void set_mask(Problem& p, const AttentionOptions& o) {
  p.diagonal = o.diagonal;
  if (o.diagonal.value <= -kUnlimited / 4 || o.diagonal.value >= kUnlimited / 4) {
    refuse("diagonal", std::to_string(o.diagonal.value), "an offset that fits a sequence");
  }
  p.window_left = window(o.window_left, "window_left");
  p.window_right = window(o.window_right, "window_right");
  if (o.causal) p.window_right = std::min<int64_t>(p.window_right, 0);
  p.key_start = per_row_keys(o.key_start, "key_start", p);
  p.key_end = per_row_keys(o.key_end, "key_end", p);
  if (o.seqused_k) {
    require_dtype(o.seqused_k, "seqused_k", DType::i32);
    require_device(o.seqused_k, "seqused_k", p.device);
    require_shape(o.seqused_k, "seqused_k", {p.batch}, "batch");
    require_rows(o.seqused_k, "seqused_k");
    p.seqused_k = bare_address<int32_t>(o.seqused_k, "seqused_k");
    for (int64_t b = 0; o.seqused_k.device == Device::cpu && b < p.batch; ++b) {
      if (p.seqused_k[b] < 0 || p.seqused_k[b] > p.seqlen_k) {
        refuse("seqused_k", std::to_string(p.seqused_k[b]) + " for sequence " + std::to_string(b),
               "0 to seqlen_k = " + std::to_string(p.seqlen_k));
      }
    }
  }
}

Rows output_like_query(const Tensor& tensor, const char* name, const Problem& p, int64_t dim) {
  check_rows_tensor(tensor, name, p);
  check_shape(tensor, name, p, p.seqlen_q, p.heads, dim, "batch, seqlen_q and heads like query");
  return rows_of(tensor);
}

Rows output_like_key(const Tensor& tensor, const char* name, const Problem& p, int64_t dim) {
  check_rows_tensor(tensor, name, p);
  check_shape(tensor, name, p, p.seqlen_k, p.kv_heads, dim, "batch, seqlen_k and kv_heads like key");
  require_no_overlap(tensor, name);
  return rows_of(tensor);
}

void set_probs(Problem& p, const Tensor& probs) {
  if (!probs) return;
  require(!p.packed(), "probs", "a tensor together with cu_seqlens", "none: probs are for dense batches");
  require_dtype(probs, "probs", DType::f32);
  require_device(probs, "probs", p.device);
  require_shape(probs, "probs", {p.batch, p.heads, p.seqlen_q, p.seqlen_k},
                "batch, heads, seqlen_q, seqlen_k");
  require_no_overlap(probs, "probs");
  p.probs.data = const_cast<float*>(bare_address<float>(probs, "probs"));
  p.probs.batch_stride = probs.stride[0];
  p.probs.head_stride = probs.stride[1];
  p.probs.row_stride = probs.stride[2];
  p.probs.key_stride = probs.stride[3];
}

}  // namespace

Problem make_problem(const ForwardArgs& args) {
  Problem p;
  p.phase = Phase::forward;
  set_query(p, args.query, args.options);
  if (args.cache != nullptr) {
    require(!args.key && !args.value, "key", "a tensor together with a cache", "one of the two");
    set_cache(p, *args.cache, args.options);
  } else {
    set_key_value(p, args.key, args.value, args.options, args.query);
  }
  set_score(p, args.options);
  set_mask(p, args.options);
  p.out = output_like_query(args.out, "out", p, p.head_dim_v);
  require_no_overlap(args.out, "out");
  if (args.lse) {
    check_lse_like(args.lse, "lse", p);
    require_no_overlap(args.lse, "lse");
  }
  p.lse = lse_rows_of(args.lse);
  set_probs(p, args.probs);
  p.nan_guard = args.options.nan_guard;
  return p;
}

Problem make_problem(const BackwardArgs& args) {
  Problem p;
  p.phase = Phase::backward;
  set_query(p, args.query, args.options);
  set_key_value(p, args.key, args.value, args.options, args.query);
  set_score(p, args.options);
  set_mask(p, args.options);
  p.out = output_like_query(args.out, "out", p, p.head_dim_v);
  p.dout = output_like_query(args.dout, "dout", p, p.head_dim_v);
  require(static_cast<bool>(args.lse), "lse", "no tensor", "the lse of the forward pass");
  check_lse_like(args.lse, "lse", p);
  p.lse = lse_rows_of(args.lse);
  if (args.dlse) check_lse_like(args.dlse, "dlse", p);
  p.dlse = lse_rows_of(args.dlse);
  p.dq = output_like_query(args.dq, "dq", p, p.head_dim);
  require_no_overlap(args.dq, "dq");
  p.dk = output_like_key(args.dk, "dk", p, p.head_dim);
  p.dv = output_like_key(args.dv, "dv", p, p.head_dim_v);
  if (args.d_sinks) {
    require(p.sinks != nullptr, "d_sinks", "a tensor without sinks", "sinks in the options");
    require_dtype(args.d_sinks, "d_sinks", DType::f32);
    require_device(args.d_sinks, "d_sinks", p.device);
    require_shape(args.d_sinks, "d_sinks", {p.heads}, "heads");
    require_rows(args.d_sinks, "d_sinks");
    p.d_sinks = const_cast<float*>(bare_address<float>(args.d_sinks, "d_sinks"));
  }
  p.nan_guard = args.options.nan_guard;
  return p;
}

Sequence sequence(const Problem& p, int64_t batch) {
  Sequence s;
  s.batch = batch;
  s.seqlen_q = p.seqlen_q;
  s.seqlen_k = p.seqlen_k;
  if (p.packed()) {
    s.q_row0 = p.cu_seqlens_q[batch];
    s.k_row0 = p.cu_seqlens_k[batch];
    s.seqlen_q = p.cu_seqlens_q[batch + 1] - s.q_row0;
    s.seqlen_k = p.cu_seqlens_k[batch + 1] - s.k_row0;
  }
  if (p.seqused_k != nullptr) s.seqlen_k = p.seqused_k[batch];
  if (p.cache != nullptr) {
    const KvView& cache = *p.cache;
    s.seqlen_k = bare_address<int32_t>(cache.seqlens, "cache")[batch * cache.seqlens.stride[0]];
    if (cache.first_position) {
      s.rule.key_begin =
          bare_address<int32_t>(cache.first_position, "cache")[batch * cache.first_position.stride[0]];
    }
  }
  s.rule.key_limit = s.seqlen_k;
  s.rule.diagonal = diagonal_offset(p.diagonal, s.seqlen_q, s.seqlen_k);
  s.rule.window_left = p.window_left;
  s.rule.window_right = p.window_right;
  if (p.key_start) s.rule.key_start = p.key_start.data + batch * p.key_start.batch_stride;
  if (p.key_end) s.rule.key_end = p.key_end.data + batch * p.key_end.batch_stride;
  return s;
}

}  // namespace attnspan
