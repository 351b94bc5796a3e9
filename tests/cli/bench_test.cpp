// attnspan bench at tiny sizes: what it writes, not how fast anything is.

#include <nlohmann/json.hpp>

#include "command.hpp"

namespace attnspan::cli_test {
namespace {

using testing::HasSubstr;

constexpr const char* kTiny = "bench --lengths 64 --head-dims 64 --threads 1 --seconds 0.001 ";

TEST(Bench, TimesEveryPhaseAndReportsWhatItMeasured) {
  const TempFolder folder;
  const Outcome outcome =
      run_command(folder, std::string(kTiny) + "--formats f16 --json %report.json --html %report.html");
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_THAT(outcome.out, HasSubstr("read memory"));
  const nlohmann::json report = nlohmann::json::parse(read_all(folder.file("report.json")));
  const nlohmann::json& ceilings = report["machine"]["ceilings"];
  ASSERT_EQ(ceilings.size(), 1u);
  EXPECT_GT(ceilings[0]["fma_gflops"], 0);
  EXPECT_GT(ceilings[0]["read_gb_per_s"], 0);
  EXPECT_FALSE(report["machine"]["cpu"].get<std::string>().empty());
  std::vector<std::string> phases;
  for (const nlohmann::json& row : report["results"]) {
    phases.push_back(row["phase"]);
    EXPECT_GT(row["median_s"], 0) << row;
    EXPECT_GE(row["median_s"], row["best_s"]) << row;
    EXPECT_EQ(row["threads"], 1);
  }
  EXPECT_THAT(phases, testing::ElementsAre("forward", "backward", "decode", "append"));
  // 64 x 64 causal: 2080 pairs, 8 heads, 4 x 64 operations each
  const nlohmann::json& forward = report["results"][0];
  EXPECT_NEAR(forward["gflops"].get<double>() * forward["median_s"].get<double>(), 2080 * 8 * 256 / 1e9,
              1e-9);
  // 64 tokens, 8 KV heads, K and V of 64 values in two bytes
  const nlohmann::json& decode = report["results"][2];
  EXPECT_NEAR(decode["gb_per_s"].get<double>() * decode["median_s"].get<double>(), 64 * 8 * 256 / 1e9, 1e-9);
  const std::string html = read_all(folder.file("report.html"));
  EXPECT_THAT(html, HasSubstr("<svg"));
  EXPECT_THAT(html, HasSubstr("</html>"));
  EXPECT_THAT(html, testing::Not(HasSubstr("nan")));
}

TEST(Bench, ComparesWithAnEarlierReport) {
  const TempFolder folder;
  const std::string decode = std::string(kTiny) + "decode --formats tbq4 ";
  ASSERT_EQ(run_command(folder, decode + "--json %before.json").status, 0);
  const Outcome outcome = run_command(folder, decode + "--compare %before.json");
  EXPECT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_THAT(outcome.out, HasSubstr("against "));
  EXPECT_THAT(outcome.out, HasSubstr("decode: 1 x 64, 8/8 heads, 64, f32, cache tbq4, threads 1"));
}

TEST(Bench, RefusesBadInputBeforeItMeasures) {
  const TempFolder folder;
  write_all(folder.file("foreign.json"), "{\"results\": 3}");
  const std::pair<const char*, const char*> cases[] = {
      {"bench sideways", "'sideways', expected forward, backward, decode or append"},
      {"bench --lengths 0", "--lengths: found '0'"},
      {"bench --lengths 64,x", "--lengths: found 'x'"},
      {"bench --head-dims 577", "--head-dims: found '577'"},
      {"bench forward --formats q8", "--formats: found 'q8', expected f32, f16 or bf16"},
      {"bench decode --formats q5", "--formats: found 'q5'"},
      {"bench --compare %missing.json", "missing.json: cannot be read"},
      {"bench --compare %foreign.json", "foreign.json: found no bench report"},
  };
  for (const auto& [arguments, message] : cases) {
    const Outcome outcome = run_command(folder, arguments);
    EXPECT_EQ(outcome.status, 2) << arguments;
    EXPECT_THAT(outcome.err, HasSubstr(message)) << arguments;
  }
}

}  // namespace
}  // namespace attnspan::cli_test
