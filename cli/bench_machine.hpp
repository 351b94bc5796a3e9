#pragma once
// This machine and its ceilings.

#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "bench_timing.hpp"

namespace attnspan::cli {

// Medians, for one number of threads.
struct Ceilings {
  double fma_gflops = 0;
  double read_gb_per_s = 0;
  std::optional<double> sgemm_gflops;  // where OpenBLAS is found
};

class Machine {
 public:
  // Measures for every number of threads in `threads`.
  Machine(const std::vector<int>& threads, const Effort& effort, size_t read_bytes);

  const Ceilings& ceilings(int threads) const { return ceilings_.at(threads); }
  const std::map<int, Ceilings>& all() const { return ceilings_; }
  // cpu, threads, date, commit, ceilings
  nlohmann::json to_json() const;

 private:
  std::map<int, Ceilings> ceilings_;
};

std::string cpu_name();
std::string commit_name();  // empty where the build does not come from git

}  // namespace attnspan::cli
