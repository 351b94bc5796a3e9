#include "registry/registry.hpp"

#include <gtest/gtest.h>

#include <cstdlib>
#include <vector>

namespace attnspan {
namespace {

struct SmallProblem {
  std::vector<float> q = std::vector<float>(8, 1.0F), out = std::vector<float>(8),
                     probs = std::vector<float>(4);
  ForwardArgs args() {
    ForwardArgs a;
    a.query = a.key = a.value = bshd(q.data(), DType::f32, 1, 2, 1, 4);
    a.out = bshd(out.data(), DType::f32, 1, 2, 1, 4);
    return a;
  }
};

TEST(Registry, AnUnavailableBackendSaysWhy) {
  for (const RegisteredBackend& entry : backends()) {
    EXPECT_NE(entry.backend == nullptr, entry.reason.empty()) << entry.name;
  }
}

TEST(Registry, AutoNamesWhatItChose) {
  SmallProblem problem;
  EXPECT_FALSE(forward(problem.args()).backend.empty());
}

TEST(Registry, TheReferenceKeepsProbabilities) {
  SmallProblem problem;
  ForwardArgs args = problem.args();
  args.probs = contiguous(problem.probs.data(), DType::f32, {1, 1, 2, 2});
  EXPECT_EQ(forward(args).backend, "reference");
  EXPECT_EQ(problem.probs, (std::vector<float>{0.5F, 0.5F, 0.5F, 0.5F}));
}

TEST(Registry, AnUnknownNameListsTheKnownOnes) {
  SmallProblem problem;
  try {
    forward(problem.args(), {.backend = "abacus"});
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
    EXPECT_NE(std::string(error.what()).find("found 'abacus', expected one of auto, cuda"), std::string::npos)
        << error.what();
  }
}

TEST(Registry, TheEnvironmentForcesABackend) {
  SmallProblem problem;
  setenv("ATTNSPAN_BACKEND", "reference", 1);
  EXPECT_EQ(forward(problem.args()).backend, "reference");
  setenv("ATTNSPAN_BACKEND", "abacus", 1);
  EXPECT_THROW(forward(problem.args()), Error);
  unsetenv("ATTNSPAN_BACKEND");
}

}  // namespace
}  // namespace attnspan
