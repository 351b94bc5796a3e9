// attnspan bench: rates of every phase and their share of what this machine can do.

#include <algorithm>
#include <cstdio>
#include <memory>

#include "arguments.hpp"
#include "bench_report.hpp"
#include "bench_sweep.hpp"
#include "commands.hpp"
#include "core/parallel.hpp"
#include "core/validation.hpp"
#include "io/file.hpp"
#include "print.hpp"
#include "registry/registry.hpp"

namespace attnspan::cli {
namespace {

struct BenchArguments {
  std::vector<std::string> phases;
  std::string backend = "cpu";
  bool full = false;
  std::string lengths, head_dims, groups, formats, threads;
  std::string json, html, compare;
  double seconds = 0;
};

std::vector<std::string> split(const std::string& list) {
  std::vector<std::string> parts;
  for (size_t at = 0; at < list.size();) {
    const size_t comma = std::min(list.find(',', at), list.size());
    parts.push_back(list.substr(at, comma - at));
    at = comma + 1;
  }
  return parts;
}

template <typename T>
std::vector<T> integers(const char* flag, const std::string& list, int64_t most) {
  std::vector<T> values;
  for (const std::string& part : split(list))
    values.push_back(static_cast<T>(parse_integer(flag, part, 1, most)));
  return values;
}

BenchPhase phase_of(const std::string& name) {
  for (const BenchPhase phase :
       {BenchPhase::forward, BenchPhase::backward, BenchPhase::decode, BenchPhase::append}) {
    if (name == name_of(phase)) return phase;
  }
  refuse("bench", "'" + name + "'", "forward, backward, decode or append");
}

Sweep sweep_of(const BenchArguments& a) {
  Sweep sweep;
  for (const std::string& name : a.phases) sweep.phases.push_back(phase_of(name));
  sweep.full = a.full;
  sweep.lengths = integers<int64_t>("--lengths", a.lengths, int64_t{1} << 24);
  sweep.head_dims = integers<int64_t>("--head-dims", a.head_dims, kMaxHeadDim);
  sweep.groups = integers<int64_t>("--groups", a.groups, 256);
  sweep.formats = split(a.formats);
  sweep.threads = integers<int>("--threads", a.threads, 4096);
  sweep.all_threads = thread_count(0);
  return sweep;
}

RegisteredBackend backend_named(const std::string& name) {
  const std::string wanted = name == "auto" ? "cpu" : name;
  for (const RegisteredBackend& entry : backends(wanted)) {
    if (entry.backend != nullptr) return entry;
    throw Error(ErrorCode::unavailable, "--backend " + wanted, "is not available: " + entry.reason);
  }
  throw Error(ErrorCode::unavailable, "--backend " + wanted, "is not built in");
}

std::vector<int> distinct_threads(const std::vector<BenchCase>& cases) {
  std::vector<int> threads;
  for (const BenchCase& c : cases) {
    if (std::find(threads.begin(), threads.end(), c.threads) == threads.end()) threads.push_back(c.threads);
  }
  return threads;
}

BenchRow run_case(const BenchCase& bench, const std::string& backend, const Effort& effort) {
  BenchRow row;
  row.bench = bench;
  row.check = check_case(bench, backend);
  if (row.ok()) row.timed = time_case(bench, backend, effort);
  return row;
}

void write(const std::string& path, const std::string& text) {
  io::OutputFile file(path);
  file.write(text.data(), static_cast<int64_t>(text.size()));
  file.flush();
  file.commit();
}

int run_bench(const BenchArguments& a) {
  const std::vector<BenchCase> cases = bench_cases(sweep_of(a));
  const nlohmann::json before = a.compare.empty() ? nlohmann::json() : load_report(a.compare);
  const RegisteredBackend& backend = backend_named(a.backend);
  Effort effort;
  effort.seconds = a.seconds > 0 ? a.seconds : a.full ? 2.0 : 0.3;
  if (effort.seconds < 0.01) effort.min_repeats = 1;
  Progress progress;
  progress.show("what this machine can do");
  constexpr size_t kReadBytes = size_t{512} << 20;
  const Machine machine(distinct_threads(cases), effort, kReadBytes);
  progress.show("");
  print_ceilings(machine);
  BenchReport report{backend.name, backend.backend->description(), &machine, {}};
  for (const BenchCase& bench : cases) {
    progress.show(bench.key());
    report.rows.push_back(run_case(bench, backend.name, effort));
  }
  progress.show("");
  print_rows(report);
  if (!a.compare.empty()) print_comparison(report, before, a.compare);
  if (!a.json.empty()) write(a.json, to_json(report).dump(1) + "\n");
  if (!a.html.empty()) write(a.html, html_of(report));
  const auto wrong = [](const BenchRow& row) { return !row.check.wrong.empty(); };
  return std::any_of(report.rows.begin(), report.rows.end(), wrong) ? kMissed : 0;
}

}  // namespace

Command add_bench(CLI::App& root) {
  CLI::App* app = root.add_subcommand(
      "bench", "rates of forward, backward, decode and append, and their share of this machine's peak");
  const auto a = std::make_shared<BenchArguments>();
  app->add_option("phases", a->phases, "forward, backward, decode, append (default: all)");
  add_backend(*app, a->backend, "default: cpu");
  app->add_flag("--full", a->full, "more problems and longer timings: minutes instead of one");
  const auto list = [&](const char* flag, std::string& target, const char* description) {
    app->add_option(flag, target, description)->type_name("A,B,...");
  };
  list("--lengths", a->lengths, "tokens; lists make the product of their values instead of the usual table");
  list("--head-dims", a->head_dims, "head dims (default: 128)");
  list("--groups", a->groups, "query heads of each KV head (default: 1)");
  list("--formats", a->formats, "dtypes (forward, backward) or formats of the cache (decode, append)");
  list("--threads", a->threads, "CPU threads (default: all, and 1 for a few)");
  add_number(*app, "--seconds", a->seconds, "time for each problem (default: 0.3; with --full 2)");
  app->add_option("--json", a->json, "write every figure there")->type_name("FILE");
  app->add_option("--html", a->html, "write a page with plots there")->type_name("FILE");
  app->add_option("--compare", a->compare, "an earlier --json: print what moved")->type_name("FILE");
  return {app, [a] { return run_bench(*a); }};
}

}  // namespace attnspan::cli
