// What this adapter can't hold: supports() says so before anything is allocated.

#include <algorithm>

#include "webgpu/backend.hpp"

namespace attnspan::webgpu {
namespace {

// A binding begins at an aligned offset before the tensor and ends on 16 bytes.
Support binds(const Capabilities& c, const char* name, int64_t bytes) {
  const uint64_t most = c.binding_bytes - std::min<uint64_t>(c.binding_bytes, c.offset_alignment + 16);
  if (bytes <= 0 || static_cast<uint64_t>(bytes) <= most) return Support::yes();
  return Support::no(std::string(name) + ": " + std::to_string(bytes) + " bytes, this adapter binds " +
                     std::to_string(most) + " at once");
}

Support tensors_fit(const Capabilities& c, const Problem& problem) {
  const int64_t batch = problem.packed() ? 1 : problem.batch, size = size_of(problem.dtype);
  const Extent q{batch, problem.heads, problem.seqlen_q, problem.head_dim};
  const Extent k{batch, problem.kv_heads, problem.seqlen_k, problem.head_dim};
  const Extent v{batch, problem.kv_heads, problem.seqlen_k, problem.head_dim_v};
  const Extent out{batch, problem.heads, problem.seqlen_q, problem.head_dim_v};
  const std::pair<const char*, int64_t> parts[] = {
      {"query", bytes_of(problem.query, q, size)},
      {"key", bytes_of(problem.key, k, size)},
      {"value", bytes_of(problem.value, v, size)},
      {"out", bytes_of(problem.out, out, size)},
      {"dout", bytes_of(problem.dout, out, size)},
      {"dq", bytes_of(problem.dq, q, size)},
      {"dk", bytes_of(problem.dk, k, size)},
      {"dv", bytes_of(problem.dv, v, size)},
      {"lse", 4 * batch * problem.heads * problem.seqlen_q},
      {"the row statistics of backward", problem.dout ? 8 * batch * problem.heads * problem.seqlen_q : 0},
      {"the side inputs (bias, spans, ...)", side_bytes(problem)}};
  for (const auto& [name, bytes] : parts) {
    if (const Support fits = binds(c, name, bytes); !fits) return fits;
  }
  return Support::yes();
}

Support cache_fits(const Capabilities& c, const Problem& problem) {
  const KvView& cache = *problem.cache;
  for (const KvRows* rows : {&cache.key, &cache.value}) {
    if (cache.num_pages == 0) continue;
    if (const Support fits = binds(c, "cache", code_bytes_of(cache, *rows)); !fits) return fits;
  }
  // The states of all splits are one binding.
  const int64_t rows = problem.batch * problem.seqlen_q * problem.heads,
                width = (problem.head_dim_v + 127) / 128 * 128;
  return binds(c, "the partial results of the splits", 4 * rows * width * most_splits(problem));
}

// Workgroups in each dimension: tiles of rows or keys, heads, batch.
Support grid_fits(const Capabilities& c, const Problem& problem) {
  const int64_t most = c.workgroups;
  const auto no = [&](const char* what, int64_t found) {
    return Support::no(std::string(what) + ": " + std::to_string(found) + ", this adapter takes " +
                       std::to_string(most) + " in one dispatch");
  };
  if (problem.heads > most) return no("heads", problem.heads);
  if (!problem.packed() && problem.batch > most) return no("batch", problem.batch);
  const ForwardTile& tile = forward_tile(c, problem.head_dim_v);
  const int64_t blocks = (problem.head_dim_v + tile.columns() - 1) / tile.columns();
  const int64_t tiles = problem.seqlen_q / tile.rows + (problem.packed() ? problem.batch : 1);
  if (tiles * blocks > most) return no("tiles of query rows", tiles * blocks);
  if (problem.phase == Phase::forward) return Support::yes();
  const int64_t widest = std::max(problem.head_dim, problem.head_dim_v);
  const ForwardTile& own = forward_tile(c, widest);
  const int64_t longest = std::max(problem.seqlen_q, problem.seqlen_k);
  const int64_t gradient_tiles = (longest / own.rows + (problem.packed() ? problem.batch : 1)) *
                                 ((widest + own.columns() - 1) / own.columns());
  return gradient_tiles > most ? no("tiles of rows or keys", gradient_tiles) : Support::yes();
}

}  // namespace

Support within_limits(const Capabilities& c, const Problem& problem) {
  if (const Support fits = tensors_fit(c, problem); !fits) return fits;
  if (problem.cache != nullptr) {
    if (const Support fits = cache_fits(c, problem); !fits) return fits;
  }
  return grid_fits(c, problem);
}

}  // namespace attnspan::webgpu
