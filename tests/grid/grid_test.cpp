// Every available backend over the grid of src/check. The reference itself is compared with the plain
// implementation's yardstick too, which checks the grid and the rule.

#include <gtest/gtest.h>

#include <cstdlib>

#include "check/grid.hpp"
#include "check/run_case.hpp"
#include "registry/registry.hpp"

namespace attnspan::check {
namespace {

struct GridParam {
  std::string phase;
  std::string backend;
  CaseSpec spec;
};

void PrintTo(const GridParam& param, std::ostream* os) { *os << param.spec.name << " on " << param.backend; }

// ATTNSPAN_TEST_GRID=small|standard|all; else standard, but small for devices that this machine may emulate.
GridSize grid_size(const std::string& backend) {
  const char* asked = std::getenv("ATTNSPAN_TEST_GRID");
  const std::string size = asked != nullptr ? asked : "";
  if (size == "all") return GridSize::all;
  if (size == "standard") return GridSize::standard;
  if (size == "small") return GridSize::small;
  return backend == "webgpu" || backend == "metal" ? GridSize::small : GridSize::standard;
}

// Stands for the whole grid of a backend that found no device, so that a run of it says so.
constexpr const char* kNoDevice = "no_device";
GridParam absent(const std::string& phase, const std::string& backend) {
  CaseSpec spec;
  spec.name = kNoDevice;
  return {phase, backend, spec};
}

std::vector<GridParam> params() {
  std::vector<GridParam> list;
  for (const RegisteredBackend& entry : backends()) {
    if (entry.backend == nullptr) {
      for (const char* phase : {"forward", "backward", "decode", "cache"})
        list.push_back(absent(phase, entry.name));
      continue;
    }
    const GridSize size = grid_size(entry.name);
    const std::pair<const char*, std::vector<CaseSpec>> phases[] = {{"forward", forward_grid(size)},
                                                                    {"backward", backward_grid(size)},
                                                                    {"decode", decode_grid(size)},
                                                                    {"cache", cache_grid(size)}};
    for (const auto& [phase, specs] : phases) {
      for (const CaseSpec& spec : specs) list.push_back({phase, entry.name, spec});
    }
  }
  return list;
}

class GridTest : public testing::TestWithParam<GridParam> {};

TEST_P(GridTest, AgreesWithReference) {
  const GridParam& param = GetParam();
  if (param.spec.name == kNoDevice) {
    // WebGPU runs on a software driver, which belongs to every CI machine; CUDA and Metal need their
    // hardware.
    const char* ci = std::getenv("CI");
    ASSERT_FALSE(param.backend == "webgpu" && ci != nullptr && std::string(ci) == "true")
        << "CI has no WebGPU adapter";
    GTEST_SKIP() << "no device";
  }
  const Case c(param.spec);
  Execution execution;
  execution.backend = param.backend;
  const CaseResult result =
      param.phase == "backward" ? run_backward(c, execution) : run_forward(c, execution);
  EXPECT_EQ(result.verdict, Verdict::pass) << param.spec.name << ": " << result.message;
}

INSTANTIATE_TEST_SUITE_P(Grid, GridTest, testing::ValuesIn(params()), [](const auto& info) {
  return info.param.phase + "_" + info.param.backend + "_" + info.param.spec.name;
});

}  // namespace
}  // namespace attnspan::check
