// The kernels of every instruction set that this machine can run, not only of the best one.

#include "core/simd_targets.hpp"

#include <gtest/gtest.h>
#include <hwy/highway.h>

#include "check/grid.hpp"
#include "check/run_case.hpp"
#include "registry/registry.hpp"

namespace attnspan::check {
namespace {

struct Param {
  int64_t target;
  std::string phase;
};

void PrintTo(const Param& param, std::ostream* os) {
  *os << param.phase << " on " << hwy::TargetName(param.target);
}

std::vector<Param> params() {
  std::vector<Param> list;
  for (const int64_t target : hwy::SupportedAndGeneratedTargets()) {
    for (const char* phase : {"forward", "backward", "decode", "cache"}) list.push_back({target, phase});
  }
  return list;
}

std::vector<CaseSpec> cases_of(const std::string& phase) {
  if (phase == "forward") return forward_grid(GridSize::small);
  if (phase == "backward") return backward_grid(GridSize::small);
  return phase == "decode" ? decode_grid(GridSize::small) : cache_grid(GridSize::small);
}

class TargetTest : public testing::TestWithParam<Param> {
 protected:
  void SetUp() override { hwy::GetChosenTarget().Update(GetParam().target); }
  void TearDown() override { hwy::GetChosenTarget().DeInit(); }
};

TEST_P(TargetTest, AgreesWithReference) {
  Execution execution;
  execution.backend = "cpu";
  const std::string target = hwy::TargetName(GetParam().target);
  ASSERT_TRUE(select_backend(Device::cpu, "cpu").description().starts_with(target + ","))
      << "another target would run";
  for (const CaseSpec& spec : cases_of(GetParam().phase)) {
    const Case c(spec);
    const CaseResult result =
        GetParam().phase == "backward" ? run_backward(c, execution) : run_forward(c, execution);
    EXPECT_EQ(result.verdict, Verdict::pass) << spec.name << ": " << result.message;
  }
}

INSTANTIATE_TEST_SUITE_P(Cpu, TargetTest, testing::ValuesIn(params()), [](const auto& info) {
  return info.param.phase + "_" + hwy::TargetName(info.param.target);
});

}  // namespace
}  // namespace attnspan::check
