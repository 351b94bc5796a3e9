#pragma once
// Random tensors and caches of the size of a case, made faster than one call of it takes.

#include <memory>
#include <vector>

#include "attnspan/kv_cache.hpp"
#include "bench_case.hpp"

namespace attnspan::cli {

class AttentionInputs {
 public:
  explicit AttentionInputs(const BenchCase& bench);

  ForwardArgs forward_args() const;
  BackwardArgs backward_args() const;  // reads what a forward pass wrote

 private:
  Tensor take(int64_t rows, int64_t heads);  // [batch, rows, heads, head_dim], random
  void make_cache();
  void make_pages(KvRows& rows);

  BenchCase bench_;
  std::vector<LargeMemory> memory_;
  Tensor query_, key_, value_, out_, lse_, dout_, dq_, dk_, dv_;
  KvView cache_;
  std::vector<int32_t> block_table_, seqlens_;
};

// Rows to append to a cache of one sequence.
class AppendInputs {
 public:
  explicit AppendInputs(const BenchCase& bench);

  std::unique_ptr<KvCache> make_cache() const;  // empty, with room for the rows
  void append(KvCache& cache) const;
  float key(int64_t index) const { return key_[static_cast<size_t>(index)]; }

 private:
  BenchCase bench_;
  std::vector<float> key_, value_;
};

}  // namespace attnspan::cli
