#pragma once
// What a bench found: as a table, as JSON, against an earlier JSON.

#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "bench_case.hpp"
#include "bench_machine.hpp"

namespace attnspan::cli {

struct BenchRow {
  BenchCase bench;
  CaseCheck check;
  CaseTiming timed;  // where check has nothing to say

  bool ok() const { return check.refused.empty() && check.wrong.empty(); }
};

struct BenchReport {
  std::string backend, description;
  const Machine* machine = nullptr;
  std::vector<BenchRow> rows;
};

// forward, backward: GFLOP/s; decode: GB/s of cache; append: million values/s.
struct Rate {
  double value = 0;
  const char* unit = "";
};
Rate rate_of(const BenchRow& row);
// Of this machine's FMA peak (forward, backward) or read bandwidth (decode); NaN where there is no ceiling:
// append, and backends that do not run on the CPU.
double share_of(const BenchReport& report, const BenchRow& row);
// Of sgemm, where OpenBLAS was found.
double sgemm_share_of(const BenchReport& report, const BenchRow& row);

void print_ceilings(const Machine& machine);
void print_rows(const BenchReport& report);
nlohmann::json to_json(const BenchReport& report);

// Rows of both, and how the median moved. Throws Error naming `path` where it is no report of a bench.
nlohmann::json load_report(const std::string& path);
void print_comparison(const BenchReport& report, const nlohmann::json& before, const std::string& path);

// One self-contained page with tables and plots.
std::string html_of(const BenchReport& report);

}  // namespace attnspan::cli
