// Attention over a cache whose first tokens have formats of their own: two spans are two states, merged. Both
// partial results and the merge are f32, so an f16 or bf16 output is rounded once, as by a single pass.

#include <cmath>
#include <vector>

#include "attnspan/kv_cache.hpp"
#include "core/dtype.hpp"
#include "core/problem.hpp"
#include "core/validation.hpp"

namespace attnspan {
namespace {

// A state of every query row, in f32.
struct PartialState {
  PartialState(const Problem& p)
      : out_values(static_cast<size_t>(p.batch * p.seqlen_q * p.heads * p.head_dim_v)),
        lse_values(static_cast<size_t>(p.batch * p.heads * p.seqlen_q)),
        out(contiguous(out_values.data(), DType::f32, {p.batch, p.seqlen_q, p.heads, p.head_dim_v})),
        lse(contiguous(lse_values.data(), DType::f32, {p.batch, p.heads, p.seqlen_q})) {}
  PartialState(const PartialState&) = delete;
  PartialState& operator=(const PartialState&) = delete;

  std::vector<float> out_values, lse_values;
  Tensor out, lse;
};

// Entry `index` of the first dimension, which stays as one of extent 1.
Tensor entry(Tensor tensor, int64_t index) {
  if (!tensor || tensor.shape[0] == 1) return tensor;
  tensor.byte_offset += index * tensor.stride[0] * size_of(tensor.dtype);
  tensor.shape[0] = 1;
  return tensor;
}

KvView sequence_of(KvView view, int64_t index) {
  view.batch = 1;
  view.block_table = entry(view.block_table, index);
  view.seqlens = entry(view.seqlens, index);
  view.first_position = entry(view.first_position, index);
  return view;
}

std::vector<float> rows_as_f32(const Problem& p, const Rows& rows, int64_t dim) {
  std::vector<float> values;
  values.reserve(static_cast<size_t>(p.batch * p.seqlen_q * p.heads * dim));
  for (int64_t b = 0; b < p.batch; ++b) {
    for (int64_t i = 0; i < p.seqlen_q; ++i) {
      for (int64_t h = 0; h < p.heads; ++h) {
        for (int64_t d = 0; d < dim; ++d) {
          values.push_back(load_f32(rows.data, rows.index(b, h, i) + d, p.dtype));
        }
      }
    }
  }
  return values;
}

// The options of one sequence against its first tokens. The diagonal counts from the whole sequence, which
// the view of the first tokens does not know; sinks belong to the other state.
AttentionOptions first_options(const KvCacheView& cache, const AttentionOptions& options, int64_t batch,
                               int64_t seqlen_q) {
  AttentionOptions first = options;
  first.diagonal = Diagonal::at(diagonal_offset(options.diagonal, seqlen_q, cache.seqlen(batch)));
  if (cache.window() >= 0) first.window_left = -1;
  if (options.key_start.rank == 2) first.key_start = entry(options.key_start, batch);
  if (options.key_end.rank == 2) first.key_end = entry(options.key_end, batch);
  if (options.alibi_slopes.rank == 2) first.alibi_slopes = entry(options.alibi_slopes, batch);
  first.bias = entry(options.bias, batch);
  first.sinks = {};
  first.nan_guard = false;
  return first;
}

// Rounds the merged rows to the caller's out. Returns how many values nan_guard replaced.
int64_t write_out(const Problem& p, const std::vector<float>& merged) {
  int64_t replaced = 0;
  auto value = merged.begin();
  for (int64_t b = 0; b < p.batch; ++b) {
    for (int64_t i = 0; i < p.seqlen_q; ++i) {
      for (int64_t h = 0; h < p.heads; ++h) {
        for (int64_t d = 0; d < p.head_dim_v; ++d, ++value) {
          const bool replace = p.nan_guard && !std::isfinite(*value);
          store_f32(p.out.data, p.out.index(b, h, i) + d, p.dtype, replace ? 0.0F : *value);
          replaced += replace ? 1 : 0;
        }
      }
    }
  }
  return replaced;
}

Result forward_two_spans(const KvCacheView& cache, const ForwardArgs& args, const Execution& execution) {
  const Problem p = make_problem(args);  // refuses wrong arguments by name
  require(!args.probs, "probs", "a tensor", "none for a cache with first tokens");
  PartialState rest(p), first(p), merged(p);
  const std::vector<float> query_values = rows_as_f32(p, p.query, p.head_dim);

  ForwardArgs part = args;
  part.query = contiguous(query_values.data(), DType::f32, {p.batch, p.seqlen_q, p.heads, p.head_dim});
  part.out = rest.out;
  part.lse = rest.lse;
  part.options.nan_guard = false;
  Result result = forward(part, execution);

  for (int64_t b = 0; b < p.batch; ++b) {
    const KvView view = sequence_of(*cache.first_view(), b);
    ForwardArgs one;
    one.query = entry(part.query, b);
    one.cache = &view;
    one.out = entry(first.out, b);
    one.lse = entry(first.lse, b);
    one.options = first_options(cache, args.options, b, p.seqlen_q);
    forward(one, execution);
  }
  merge_states({first.out, first.lse, rest.out, rest.lse, merged.out, args.lse ? args.lse : merged.lse},
               execution);
  result.nonfinite_replaced = write_out(p, merged.out_values);
  return result;
}

}  // namespace

Result forward(const KvCacheView& cache, const ForwardArgs& args, const Execution& execution) {
  require(!args.key && !args.value && args.cache == nullptr, "key", "keys beside the cache",
          "none: the cache has them");
  ForwardArgs cached = args;
  cached.cache = &cache.view();
  if (cache.window() >= 0) {
    int64_t& window_left = cached.options.window_left;
    if (window_left < 0) window_left = cache.window() - 1;
    require(window_left < cache.window(), "window_left", std::to_string(window_left),
            "at most " + std::to_string(cache.window() - 1) + " (the cache keeps " +
                std::to_string(cache.window()) + " keys)");
  }
  return cache.first_view() == nullptr ? forward(cached, execution)
                                       : forward_two_spans(cache, cached, execution);
}

Result forward(const KvCache& cache, const ForwardArgs& args, const Execution& execution) {
  return forward(cache.select(), args, execution);
}

}  // namespace attnspan
