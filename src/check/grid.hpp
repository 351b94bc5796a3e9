#pragma once
// The grid of problems on which every backend is checked against the reference: lengths around tile edges,
// head dims, GQA ratios, dtypes, layouts, each feature of the contract and products of them.

#include <vector>

#include "check/case.hpp"

namespace attnspan::check {

enum class GridSize {
  small,     // a few hundred keys at most and fewer products: for emulated devices
  standard,  // the default of the tests and of `attnspan check`
  all,       // ./dev test --all
};

std::vector<CaseSpec> forward_grid(GridSize size);
std::vector<CaseSpec> backward_grid(GridSize size);
std::vector<CaseSpec> decode_grid(GridSize size);  // 1..16 query rows over long keys, dense
std::vector<CaseSpec> cache_grid(GridSize size);   // every KV format, decode and prefill rows

}  // namespace attnspan::check
