// The HTML report: one file, no scripts, nothing fetched.

#include <algorithm>
#include <cmath>
#include <map>

#include "bench_plot.hpp"
#include "bench_report.hpp"
#include "print.hpp"

namespace attnspan::cli {
namespace {

constexpr const char* kStyle = R"(
:root { color-scheme: light dark; --text: #222; --soft: #666; --line: #ddd; --page: #fff; }
@media (prefers-color-scheme: dark) { :root { --text: #e6e6e6; --soft: #aaa; --line: #444; --page: #1b1b1b; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--page);
       max-width: 1340px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.6em; margin-bottom: 0; } h2 { font-size: 1.2em; margin-top: 2em; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 520px), 1fr)); gap: 1.5em; }
svg { width: 100%; height: auto; font-size: 12px; align-self: start; } svg text { fill: var(--text); }
svg .title { font-size: 15px; font-weight: 600; }
svg .grid { stroke: var(--line); } svg .mark { stroke: var(--text); stroke-dasharray: 4 3; }
svg .over { paint-order: stroke; stroke: var(--page); stroke-width: 5px; }
.wide { overflow-x: auto; } table { border-collapse: collapse; }
th, td { padding: .2em .8em; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:nth-child(-n+2), td:nth-child(-n+2) { text-align: left; } .soft { color: var(--soft); }
)";

bool computes(const BenchRow& row) {
  return row.bench.phase == BenchPhase::forward || row.bench.phase == BenchPhase::backward;
}

int most_threads(const BenchReport& report) {
  int most = 1;
  for (const BenchRow& row : report.rows) most = std::max(most, row.bench.threads);
  return most;
}

std::vector<Series> sorted_series(std::map<std::string, Series> by_name) {
  std::vector<Series> series;
  for (auto& [name, s] : by_name) {
    s.name = name;
    std::sort(s.points.begin(), s.points.end());
    series.push_back(std::move(s));
  }
  return series;
}

// Rate over length, for dense forward and backward.
std::string rate_over_length(const BenchReport& report, int threads) {
  std::map<std::string, Series> by_name;
  for (const BenchRow& row : report.rows) {
    const BenchCase& c = row.bench;
    if (!row.ok() || !computes(row) || c.cache || c.window_left >= 0 || c.threads != threads) continue;
    if (c.seqlen_q != c.seqlen_k || !c.causal || c.batch != 1 || c.group != 1) continue;
    const std::string name = std::string(name_of(c.phase)) + " " + attnspan::name_of(c.dtype) +
                             ", head dim " + std::to_string(c.head_dim);
    by_name[name].points.emplace_back(c.seqlen_k, rate_of(row).value);
  }
  std::erase_if(by_name, [](const auto& entry) { return entry.second.points.size() < 2; });
  return line_plot("Causal attention: rate over length", {"tokens", true}, {"GFLOP/s", false},
                   sorted_series(std::move(by_name)));
}

// Tokens a second over the length of the cache, by format.
std::string decode_over_length(const BenchReport& report, int threads, int64_t group) {
  std::map<std::string, Series> by_name;
  for (const BenchRow& row : report.rows) {
    const BenchCase& c = row.bench;
    if (!row.ok() || c.phase != BenchPhase::decode || c.threads != threads || c.group != group) continue;
    if (c.kv_heads != 8 || c.head_dim != 128 || c.seqlen_q != 1) continue;
    by_name[attnspan::name_of(c.format)].points.emplace_back(c.seqlen_k,
                                                             row.timed.work.tokens / row.timed.timing.median);
  }
  return line_plot("Decode, 8 KV heads x " + std::to_string(group) +
                       (group == 1 ? " query head x 128" : " query heads x 128") + ": layers a second",
                   {"tokens in the cache", true}, {"tokens/s of one layer", true},
                   sorted_series(std::move(by_name)));
}

std::string shares(const BenchReport& report, int threads) {
  std::vector<Bar> bars;
  double end = 1;
  for (const BenchRow& row : report.rows) {
    if (!row.ok() || row.bench.threads != threads) continue;
    const double share = share_of(report, row);
    if (std::isnan(share)) continue;
    end = std::max(end, share);
    bars.push_back({std::string(name_of(row.bench.phase)) + " " + row.bench.problem(), share,
                    text_of(100 * share, 0) + "%", static_cast<size_t>(row.bench.phase)});
  }
  return bar_plot("Share of peak: multipliers, or memory in decode", bars, end, true);
}

// Work per byte of key and value against rate: what the memory allows, then what the multipliers allow.
std::string roofline(const BenchReport& report, int threads) {
  if (report.backend != "cpu") return "";
  const Ceilings& c = report.machine->ceilings(threads);
  std::map<std::string, Series> by_name;
  double least = c.fma_gflops / c.read_gb_per_s, most = least;
  for (const BenchRow& row : report.rows) {
    const Work& work = row.timed.work;
    if (!row.ok() || row.bench.phase == BenchPhase::append || row.bench.threads != threads) continue;
    const double flops = work.flops, intensity = flops / work.bytes;
    least = std::min(least, intensity);
    most = std::max(most, intensity);
    std::string name = name_of(row.bench.phase);
    if (row.bench.cache) name += std::string(", ") + attnspan::name_of(row.bench.format) + " cache";
    Series& s = by_name[name];
    s.line = false;
    s.points.emplace_back(intensity, flops / row.timed.timing.median / 1e9);
  }
  if (by_name.empty()) return "";
  const double knee = c.fma_gflops / c.read_gb_per_s;
  Series roof;
  roof.marks = false;
  roof.dashed = true;
  roof.points = {{least, least * c.read_gb_per_s}, {knee, c.fma_gflops}, {most, c.fma_gflops}};
  std::vector<Series> series = sorted_series(std::move(by_name));
  roof.name = "what memory and multipliers allow";
  series.push_back(roof);
  return line_plot("Roofline", {"FLOP per byte of keys and values", true}, {"GFLOP/s", true}, series);
}

std::string ceilings_table(const Machine& machine) {
  std::string html = "<div class='wide'><table><tr><th>threads<th>FMA f32<th>read memory<th>sgemm 2048</tr>";
  for (const auto& [threads, c] : machine.all()) {
    html += "<tr><td>" + std::to_string(threads) + "<td>" + text_of(c.fma_gflops, 1) + " GFLOP/s<td>" +
            text_of(c.read_gb_per_s, 1) + " GB/s<td>" +
            (c.sgemm_gflops ? text_of(*c.sgemm_gflops, 1) + " GFLOP/s" : std::string("-")) + "</tr>";
  }
  return html + "</table></div>\n";
}

std::string rows_table(const BenchReport& report) {
  std::string html =
      "<div class='wide'><table><tr><th>phase<th>problem<th>threads<th>median<th>spread<th>rate<th>of "
      "peak<th>of "
      "sgemm<th>tokens/s<th>values/s</tr>\n";
  const auto percent = [](double share) {
    return std::isnan(share) ? std::string("") : text_of(100 * share, 0) + "%";
  };
  for (const BenchRow& row : report.rows) {
    html += std::string("<tr><td>") + name_of(row.bench.phase) + "<td>" + escaped(row.bench.problem()) +
            "<td>" + std::to_string(row.bench.threads);
    if (!row.ok()) {
      const bool wrong = !row.check.wrong.empty();
      html += std::string("<td colspan='7'>") + (wrong ? "wrong, not timed: " : "refused: ") +
              escaped(wrong ? row.check.wrong : row.check.refused) + "</tr>\n";
      continue;
    }
    const Timing& t = row.timed.timing;
    const Rate rate = rate_of(row);
    html += "<td>" + text_of_seconds(t.median) + "<td>" + text_of(100 * t.spread, 0) + "%<td>" +
            text_of(rate.value, 1) + " " + rate.unit + "<td>" + percent(share_of(report, row)) + "<td>" +
            percent(sgemm_share_of(report, row)) + "<td>";
    if (!computes(row)) {
      html += text_of(row.timed.work.tokens / t.median, 0) + "<td>" +
              text_of(row.timed.work.values / t.median / 1e9, 2) + " G</tr>\n";
    } else {
      html += "<td></tr>\n";
    }
  }
  return html + "</table></div>\n";
}

}  // namespace

std::string html_of(const BenchReport& report) {
  const nlohmann::json machine = report.machine->to_json();
  const std::string commit = machine["commit"];
  const int threads = most_threads(report);
  std::string html =
      "<!doctype html>\n<html lang='en'><meta charset='utf-8'>\n"
      "<meta name='viewport' content='width=device-width, initial-scale=1'>\n"
      "<title>attnspan bench</title>\n<style>" +
      std::string(kStyle) + "</style>\n<h1>attnspan bench</h1>\n<p class='soft'>" + escaped(machine["cpu"]) +
      ", " + std::to_string(machine["cores"].get<int>()) + " cores, " +
      escaped(report.backend + ": " + report.description) + "<br>attnspan " ATTNSPAN_VERSION +
      (commit.empty() ? "" : ", commit " + escaped(commit)) + ", " + escaped(machine["date"]) +
      "</p>\n<h2>This machine</h2>\n" + ceilings_table(*report.machine) +
      "<h2>Plots</h2>\n<p class='soft'>Medians on " + std::to_string(threads) +
      (threads == 1 ? " thread" : " threads") + ".</p>\n<div class='plots'>\n";
  html += rate_over_length(report, threads);
  for (const int64_t group : {1, 4}) html += decode_over_length(report, threads, group);
  html += roofline(report, threads) + shares(report, threads);
  html +=
      "</div>\n<h2>Every case</h2>\n" + rows_table(report) +
      "<p class='soft'>Median of the repeats; spread: 10th to 90th percentile over the median. Of peak: of "
      "the FMA rate (forward, backward) or of the rate of reading memory (decode) at the same number of "
      "threads. Every kind of problem was compared with the reference at a small size before it was "
      "timed.</p>\n</html>\n";
  return html;
}

}  // namespace attnspan::cli
