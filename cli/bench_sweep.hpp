#pragma once
// Which cases a bench times: a fixed list, quick or full, or the product of what the caller lists.

#include <vector>

#include "bench_case.hpp"

namespace attnspan::cli {

struct Sweep {
  std::vector<BenchPhase> phases;  // empty: every one
  bool full = false;
  // Where any of these is not empty, cases are their product; an empty one stands for one usual value.
  std::vector<int64_t> lengths, head_dims, groups;
  std::vector<std::string> formats;  // dtypes of forward and backward, formats of caches in decode and append
  std::vector<int> threads;          // empty: all_threads, and one thread for a few cases
  int all_threads = 1;

  bool has_lists() const {
    return !(lengths.empty() && head_dims.empty() && groups.empty() && formats.empty());
  }
  bool wants(BenchPhase phase) const;
};

std::vector<BenchCase> bench_cases(const Sweep& sweep);

}  // namespace attnspan::cli
