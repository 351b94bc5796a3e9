#include "bench_report.hpp"

#include <cmath>
#include <cstdio>
#include <fstream>
#include <map>

#include "attnspan/error.hpp"
#include "print.hpp"

namespace attnspan::cli {
namespace {

constexpr double kNone = std::numeric_limits<double>::quiet_NaN();
constexpr int kVersion = 1;

std::string percent(double share) { return std::isnan(share) ? "-" : text_of(100 * share, 0) + "%"; }

bool computes(BenchPhase phase) { return phase == BenchPhase::forward || phase == BenchPhase::backward; }

// "spread 8%": how much repeats differ
std::string spread_text(const Timing& timing) { return text_of(100 * timing.spread, 0) + "%"; }

}  // namespace

Rate rate_of(const BenchRow& row) {
  const Work& work = row.timed.work;
  const double seconds = row.timed.timing.median;
  if (computes(row.bench.phase)) return {work.flops / seconds / 1e9, "GFLOP/s"};
  if (row.bench.phase == BenchPhase::decode) return {work.bytes / seconds / 1e9, "GB/s"};
  return {work.values / seconds / 1e6, "M values/s"};
}

double share_of(const BenchReport& report, const BenchRow& row) {
  if (report.backend != "cpu" || row.bench.phase == BenchPhase::append) return kNone;
  const Ceilings& c = report.machine->ceilings(row.bench.threads);
  return rate_of(row).value / (computes(row.bench.phase) ? c.fma_gflops : c.read_gb_per_s);
}

double sgemm_share_of(const BenchReport& report, const BenchRow& row) {
  if (report.backend != "cpu" || !computes(row.bench.phase)) return kNone;
  const Ceilings& c = report.machine->ceilings(row.bench.threads);
  return c.sgemm_gflops ? rate_of(row).value / *c.sgemm_gflops : kNone;
}

void print_ceilings(const Machine& machine) {
  std::printf("%s\n\n", cpu_name().c_str());
  Table table("rrrr", {"threads", "FMA f32", "read memory", "sgemm 2048"});
  for (const auto& [threads, c] : machine.all()) {
    table.add({std::to_string(threads), text_of(c.fma_gflops, 1) + " GFLOP/s",
               text_of(c.read_gb_per_s, 1) + " GB/s",
               c.sgemm_gflops ? text_of(*c.sgemm_gflops, 1) + " GFLOP/s" : "no OpenBLAS"});
  }
  table.print();
}

void print_rows(const BenchReport& report) {
  std::printf("\n%s: %s\n\n", report.backend.c_str(), one_line(report.description).c_str());
  Table table("llrrrrrrrr", {"phase", "problem", "threads", "median", "spread", "rate", "of peak", "of sgemm",
                             "tokens/s", "values/s"});
  for (const BenchRow& row : report.rows) {
    if (!row.ok()) continue;
    const Work& work = row.timed.work;
    const double seconds = row.timed.timing.median;
    const Rate rate = rate_of(row);
    const bool cached = !computes(row.bench.phase);
    table.add({name_of(row.bench.phase), row.bench.problem(), std::to_string(row.bench.threads),
               text_of_seconds(seconds), spread_text(row.timed.timing),
               text_of(rate.value, 1) + " " + rate.unit, percent(share_of(report, row)),
               percent(sgemm_share_of(report, row)), cached ? text_of(work.tokens / seconds, 0) : "",
               cached ? text_of(work.values / seconds / 1e9, 2) + " G" : ""});
  }
  table.print();
  std::printf(
      "\nmedian of the repeats; spread: 10th to 90th percentile over the median. of peak: of the FMA rate "
      "(forward,\nbackward) or of the rate of reading memory (decode) at the same number of threads.\n");
  for (const BenchRow& row : report.rows) {
    if (!row.check.refused.empty()) {
      std::printf("refused: %s: %s\n", row.bench.key().c_str(), one_line(row.check.refused).c_str());
    }
    if (!row.check.wrong.empty()) {
      std::printf("wrong, not timed: %s: %s\n", row.bench.key().c_str(), one_line(row.check.wrong).c_str());
    }
  }
}

nlohmann::json to_json(const BenchReport& report) {
  nlohmann::json json = {{"attnspan_bench", kVersion},
                         {"version", ATTNSPAN_VERSION},
                         {"backend", report.backend},
                         {"description", report.description},
                         {"machine", report.machine->to_json()},
                         {"results", nlohmann::json::array()}};
  for (const BenchRow& row : report.rows) {
    const BenchCase& c = row.bench;
    nlohmann::json entry = {{"key", c.key()},
                            {"phase", name_of(c.phase)},
                            {"problem", c.problem()},
                            {"batch", c.batch},
                            {"seqlen_q", c.seqlen_q},
                            {"seqlen_k", c.seqlen_k},
                            {"heads", c.kv_heads * c.group},
                            {"kv_heads", c.kv_heads},
                            {"head_dim", c.head_dim},
                            {"dtype", attnspan::name_of(c.dtype)},
                            {"threads", c.threads}};
    if (c.cache) entry["format"] = attnspan::name_of(c.format);
    if (!row.check.refused.empty()) entry["refused"] = row.check.refused;
    if (!row.check.wrong.empty()) entry["wrong"] = row.check.wrong;
    if (row.ok()) {
      const Timing& t = row.timed.timing;
      const Work& work = row.timed.work;
      entry["median_s"] = t.median;
      entry["best_s"] = t.best;
      entry["spread"] = t.spread;
      entry["repeats"] = t.repeats;
      if (computes(c.phase)) entry["gflops"] = work.flops / t.median / 1e9;
      if (!computes(c.phase)) {
        entry["gb_per_s"] = work.bytes / t.median / 1e9;
        entry["values_per_s"] = work.values / t.median;
        entry["tokens_per_s"] = work.tokens / t.median;
      }
      if (const double share = share_of(report, row); !std::isnan(share)) entry["share_of_peak"] = share;
      if (const double share = sgemm_share_of(report, row); !std::isnan(share))
        entry["share_of_sgemm"] = share;
    }
    json["results"].push_back(entry);
  }
  return json;
}

nlohmann::json load_report(const std::string& path) {
  std::ifstream file(path);
  if (!file) throw Error(ErrorCode::io, "--compare " + path, "cannot be read");
  const nlohmann::json json = nlohmann::json::parse(file, nullptr, false);
  const bool is_report = json.is_object() && json.value("attnspan_bench", 0) == kVersion &&
                         json.contains("results") && json["results"].is_array() && json.contains("machine");
  if (!is_report) {
    throw Error(ErrorCode::io, "--compare " + path, "found no bench report, expected one made by --json");
  }
  return json;
}

void print_comparison(const BenchReport& report, const nlohmann::json& before, const std::string& path) {
  std::map<std::string, double> medians;
  for (const auto& entry : before["results"]) {
    if (entry.is_object() && entry.contains("median_s") && entry["median_s"].is_number()) {
      medians[entry.value("key", "")] = entry["median_s"];
    }
  }
  const auto& machine = before["machine"];
  std::printf("\nagainst %s (commit %s, %s, %s)\n\n", path.c_str(),
              one_line(machine.value("commit", "unknown")).c_str(),
              one_line(machine.value("cpu", "unknown")).c_str(),
              one_line(machine.value("date", "unknown")).c_str());
  Table table("lrrrl", {"case", "before", "now", "rate", ""});
  for (const BenchRow& row : report.rows) {
    const auto found = medians.find(row.bench.key());
    if (!row.ok() || found == medians.end()) continue;
    const Timing& now = row.timed.timing;
    const double ratio = found->second / now.median;
    // Beyond what the repeats differ by, and beyond 3%.
    const bool moved = std::abs(ratio - 1) > std::max(0.03, now.spread);
    table.add({row.bench.key(), text_of_seconds(found->second), text_of_seconds(now.median),
               "x " + text_of(ratio, 2),
               !moved      ? ""
               : ratio > 1 ? "faster"
                           : "slower"});
  }
  table.print();
}

}  // namespace attnspan::cli
