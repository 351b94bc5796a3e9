// attnspan check: every backend of this machine against the reference, over the grid of the tests.

#include <algorithm>
#include <cstdio>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>

#include "arguments.hpp"
#include "check/grid.hpp"
#include "check/run_case.hpp"
#include "commands.hpp"
#include "print.hpp"
#include "registry/registry.hpp"

namespace attnspan::cli {
namespace {

constexpr size_t kMissesShown = 5;  // of each backend and phase

struct CheckArguments {
  std::string backend = "auto";
  std::string phase = "every";
  bool quick = false;
  bool all = false;
  bool json = false;
  int64_t threads = 0;
};

// One backend in one phase.
struct Tally {
  std::string backend, phase;
  int64_t checked = 0, refused = 0, missed = 0;
  double worst = 0;  // error relative to its tolerance
  std::string worst_case;
  double seconds = 0;
  std::vector<std::string> misses;
  std::map<std::string, int64_t> refusals;  // reason -> problems
};

struct Phase {
  const char* name;
  std::vector<check::CaseSpec> (*grid)(check::GridSize);
  check::CaseResult (*run)(const check::Case&, const Execution&);
};
constexpr Phase kPhases[] = {{"forward", check::forward_grid, check::run_forward},
                             {"backward", check::backward_grid, check::run_backward},
                             {"decode", check::decode_grid, check::run_forward},
                             {"cache", check::cache_grid, check::run_forward}};

void count(Tally& tally, const check::CaseSpec& spec, const check::CaseResult& result) {
  if (result.verdict == check::Verdict::unsupported) {
    ++tally.refused;
    ++tally.refusals[result.message];
    return;
  }
  ++tally.checked;
  tally.seconds += result.seconds;
  if (result.error > tally.worst || tally.worst_case.empty()) {
    tally.worst = std::max(tally.worst, result.error);
    tally.worst_case = spec.name;
  }
  if (result.verdict == check::Verdict::miss) {
    ++tally.missed;
    tally.misses.push_back(spec.name + ": " + result.message);
  }
}

Tally check_phase(const std::string& backend, const Phase& phase, check::GridSize size, int threads,
                  Progress& progress) {
  Tally tally;
  tally.backend = backend;
  tally.phase = phase.name;
  Execution execution;
  execution.backend = backend;
  execution.threads = threads;
  const std::vector<check::CaseSpec> specs = phase.grid(size);
  for (size_t i = 0; i < specs.size(); ++i) {
    progress.show(backend + " " + phase.name + " " + std::to_string(i) + "/" + std::to_string(specs.size()) +
                  " " + specs[i].name);
    count(tally, specs[i], phase.run(check::Case(specs[i]), execution));
  }
  return tally;
}

void print_tables(const std::vector<Tally>& tallies) {
  Table table("llrrrrrl",
              {"backend", "phase", "checked", "refused", "missed", "worst error", "time", "worst case"});
  for (const Tally& t : tallies) {
    table.add({t.backend, t.phase, std::to_string(t.checked), std::to_string(t.refused),
               std::to_string(t.missed), t.checked > 0 ? text_of(t.worst, 2) : "-",
               t.checked > 0 ? text_of_seconds(t.seconds) : "-", t.worst_case});
  }
  table.print();
  std::printf(
      "\nworst error: relative to what is allowed, twice the error of a plain implementation in the same\n"
      "dtype and a rounding; both are measured against the reference, which computes in double. Over 1 is\n"
      "a miss.\n");
  for (const Tally& t : tallies) {
    for (const auto& [reason, problems] : t.refusals) {
      std::printf("refused: %s %s, %lld problems: %s\n", t.backend.c_str(), t.phase.c_str(),
                  static_cast<long long>(problems), one_line(reason).c_str());
    }
    for (size_t i = 0; i < std::min(kMissesShown, t.misses.size()); ++i) {
      std::printf("missed: %s %s %s\n", t.backend.c_str(), t.phase.c_str(), one_line(t.misses[i]).c_str());
    }
    if (t.misses.size() > kMissesShown) {
      std::printf("missed: %s %s and %zu more; --json lists them all\n", t.backend.c_str(), t.phase.c_str(),
                  t.misses.size() - kMissesShown);
    }
  }
}

void print_json(const std::vector<Tally>& tallies) {
  nlohmann::json report = nlohmann::json::array();
  for (const Tally& t : tallies) {
    report.push_back({{"backend", t.backend},
                      {"phase", t.phase},
                      {"checked", t.checked},
                      {"refused", t.refused},
                      {"missed", t.missed},
                      {"worst_error", t.worst},
                      {"worst_case", t.worst_case},
                      {"seconds", t.seconds},
                      {"refusals", t.refusals},
                      {"misses", t.misses}});
  }
  std::printf("%s\n", report.dump(2).c_str());
}

int run_check(const CheckArguments& a) {
  const check::GridSize size = a.all     ? check::GridSize::all
                               : a.quick ? check::GridSize::small
                                         : check::GridSize::standard;
  std::vector<Tally> tallies;
  bool found = false;
  for (const RegisteredBackend& entry : backends(a.backend)) {
    if (entry.backend == nullptr) {
      if (a.backend == "auto") continue;
      throw Error(ErrorCode::unavailable, "--backend " + entry.name, "is not available: " + entry.reason);
    }
    found = true;
    Progress progress;
    for (const Phase& phase : kPhases) {
      if (a.phase != "every" && a.phase != phase.name) continue;
      tallies.push_back(check_phase(entry.name, phase, size, static_cast<int>(a.threads), progress));
    }
  }
  if (!found) throw Error(ErrorCode::unavailable, "--backend", "no backend is available");
  a.json ? print_json(tallies) : print_tables(tallies);
  const bool missed =
      std::any_of(tallies.begin(), tallies.end(), [](const Tally& t) { return t.missed > 0; });
  return missed ? kMissed : 0;
}

}  // namespace

Command add_check(CLI::App& root) {
  CLI::App* app = root.add_subcommand(
      "check",
      "every backend of this machine against the reference, over a grid of problems; exit 1 on a miss");
  const auto a = std::make_shared<CheckArguments>();
  add_backend(*app, a->backend, "only this one (default: every available one)");
  add_choice(*app, "--phase", a->phase, {"every", "forward", "backward", "decode", "cache"},
             "only this one (default: every one)");
  CLI::Option* quick = app->add_flag("--quick", a->quick, "fewer and smaller problems");
  app->add_flag("--all", a->all, "thousands of problems")->excludes(quick);
  add_integer(*app, "--threads", a->threads, 0, "CPU threads; 0 = all (default)", 4096);
  app->add_flag("--json", a->json, "report as JSON");
  return {app, [a] { return run_check(*a); }};
}

}  // namespace attnspan::cli
