// The other subcommands, and the command line itself.

#include <nlohmann/json.hpp>

#include "command.hpp"

namespace attnspan::cli_test {
namespace {

using testing::HasSubstr;

TEST(Command, WithoutArgumentsSaysWhatItCanDo) {
  const Outcome outcome = run_command(TempFolder(), "");
  EXPECT_EQ(outcome.status, 2);
  EXPECT_THAT(outcome.err, HasSubstr("attention over tensors in files"));
}

TEST(Command, HelpAndVersion) {
  EXPECT_EQ(run_command(TempFolder(), "--help").status, 0);
  EXPECT_THAT(run_command(TempFolder(), "run --help").out, HasSubstr("--key-start"));
  EXPECT_THAT(run_command(TempFolder(), "--version").out, HasSubstr("attnspan 0."));
}

TEST(Command, NamesAnUnknownSubcommand) {
  const Outcome outcome = run_command(TempFolder(), "rum");
  EXPECT_EQ(outcome.status, 2);
  EXPECT_THAT(outcome.err, HasSubstr("'rum'"));
}

TEST(Info, ListsEveryBackendWithDeviceOrReason) {
  const Outcome outcome = run_command(TempFolder(), "info --json");
  EXPECT_EQ(outcome.status, 0);
  std::vector<std::string> names;
  const nlohmann::json report = nlohmann::json::parse(outcome.out);
  for (const auto& entry : report["backends"]) {
    names.push_back(entry["name"]);
    EXPECT_FALSE(entry[entry["available"] ? "description" : "reason"].get<std::string>().empty()) << entry;
  }
  EXPECT_THAT(names, testing::UnorderedElementsAre("cuda", "metal", "webgpu", "cpu", "reference"));
  EXPECT_THAT(run_command(TempFolder(), "info").out, HasSubstr("reference"));
}

TEST(Demo, RunsEveryPhaseOnTheExamples) {
  const Outcome outcome = run_command(TempFolder(), "demo --data '" ATTNSPAN_EXAMPLES_DATA "'");
  EXPECT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_EQ(outcome.err, "");  // no progress in a pipe
  for (const char* text : {"cpu", "reference", "forward", "backward", "cache tbq4", "Next:"}) {
    EXPECT_THAT(outcome.out, HasSubstr(text));
  }
  EXPECT_THAT(outcome.out, testing::Not(HasSubstr("nan")));
  EXPECT_THAT(outcome.out, testing::Not(HasSubstr("refused")));
}

TEST(Demo, SaysWhereTheDataShouldBe) {
  const Outcome outcome = run_command(TempFolder(), "demo --data /nowhere");
  EXPECT_EQ(outcome.status, 2);
  EXPECT_THAT(outcome.err, HasSubstr("--data /nowhere: is no folder"));
}

TEST(Check, CountsProblemsAndSucceeds) {
  const Outcome outcome =
      run_command(TempFolder(), "check --quick --backend reference --phase decode --json");
  EXPECT_EQ(outcome.status, 0) << outcome.out;
  const nlohmann::json tallies = nlohmann::json::parse(outcome.out);
  ASSERT_EQ(tallies.size(), 1u);
  EXPECT_GT(tallies[0]["checked"], 50);
  EXPECT_EQ(tallies[0]["missed"], 0);
  EXPECT_LT(tallies[0]["worst_error"], 1);
}

TEST(Check, SaysWhyABackendIsNotThere) {
  const Outcome outcome = run_command(TempFolder(), "check --backend metal");
  EXPECT_EQ(outcome.status, 2);
  EXPECT_THAT(outcome.err, HasSubstr("--backend metal: is not available: "));
}

TEST(Check, RefusesContradictingSizes) {
  const Outcome outcome = run_command(TempFolder(), "check --quick --all");
  EXPECT_EQ(outcome.status, 2);
  EXPECT_THAT(outcome.err, HasSubstr("--quick"));
}

}  // namespace
}  // namespace attnspan::cli_test
