// attnspan cache, and attnspan run through a cache.

#include <cmath>
#include <nlohmann/json.hpp>

#include "command.hpp"

namespace attnspan::cli_test {
namespace {

using nlohmann::json;
using testing::HasSubstr;

json json_of(const TempFolder& folder, const std::string& arguments) {
  const Outcome outcome = run_command(folder, arguments);
  EXPECT_EQ(outcome.status, 0) << outcome.err;
  return json::parse(outcome.out, nullptr, false);
}

void save_key_value(const TempFolder& folder) {
  save(folder.file("k.npy"), random_tensor(DType::f32, {2, 90, 2, 64}, 1));
  save(folder.file("v.npy"), random_tensor(DType::f32, {2, 90, 2, 32}, 2));
}

TEST(Cache, BuildsInspectsVerifiesAndConverts) {
  const TempFolder folder;
  save_key_value(folder);
  save(folder.file("lengths.safetensors:l"), int_tensor({90, 17}));
  const json built =
      json_of(folder,
              "cache build --k %k.npy --v %v.npy --seqlens %lengths.safetensors:l --k-format q8 "
              "--v-format tbq4 --page-size 16 --first-tokens 3 --first-k-format f32 --out %a.kv --json");
  EXPECT_EQ(built["key_format"], "q8");
  EXPECT_EQ(built["head_dim_v"], 32);
  EXPECT_EQ(built["first_tokens"], 16);  // a whole page
  EXPECT_EQ(built["first_key_format"], "f32");
  EXPECT_EQ(built["bytes_per_token"], 2 * (64 + 2 * 2 + 32 + 2));  // tbq4 pads 32 values to a block of 64
  EXPECT_EQ(built["sequences"][0]["tokens"], 90);
  EXPECT_EQ(built["sequences"][1]["tokens"], 17);
  EXPECT_EQ(json_of(folder, "cache inspect %a.kv --json"), built);
  EXPECT_THAT(run_command(folder, "cache inspect %a.kv").out, HasSubstr("K q8, V tbq4"));
  EXPECT_THAT(run_command(folder, "cache verify %a.kv").out, HasSubstr("have their checksums"));

  const json converted = json_of(folder, "cache convert %a.kv --k-format f16 --out %a.kv --json");
  EXPECT_EQ(converted["key_format"], "f16");
  EXPECT_EQ(converted["value_format"], "tbq4");
  EXPECT_EQ(converted["sequences"], built["sequences"]);
}

TEST(Cache, ValuesThatAreTheStartOfTheKeys) {
  const TempFolder folder;
  save_key_value(folder);
  const json built = json_of(
      folder, "cache build --k %k.npy --value-is-key 48 --layout bhsd --k-format tbq4 --out %a.kv --json");
  EXPECT_EQ(built["value_is_key"], true);
  EXPECT_EQ(built["head_dim_v"], 48);
  EXPECT_EQ(built["kv_heads"], 90);  // bhsd: the second dimension
  EXPECT_EQ(built["bytes_per_token"], 90 * (32 + 2));
}

TEST(Cache, VerifyFindsADamagedPage) {
  const TempFolder folder;
  save_key_value(folder);
  EXPECT_EQ(run_command(folder, "cache build --k %k.npy --v %v.npy --out %a.kv").status, 0);
  std::string bytes = read_all(folder.file("a.kv"));
  bytes[bytes.size() - 4] ^= 1;
  write_all(folder.file("a.kv"), bytes);
  const Outcome outcome = run_command(folder, "cache verify %a.kv");
  EXPECT_EQ(outcome.status, 2);
  EXPECT_THAT(outcome.err, HasSubstr("a.kv: page 3 of 4 is damaged"));
  EXPECT_EQ(run_command(folder, "cache inspect %a.kv").status, 0);
}

TEST(Cache, BadInputIsOneLineThatNamesIt) {
  const TempFolder folder;
  save_key_value(folder);
  save(folder.file("q3.npy"), random_tensor(DType::f32, {90, 2, 64}, 3));
  save(folder.file("lengths.safetensors:l"), int_tensor({91, 17}));
  const auto expect = [&](const std::string& arguments, const std::string& what) {
    const Outcome outcome = run_command(folder, "cache " + arguments);
    EXPECT_EQ(outcome.status, 2) << arguments;
    EXPECT_THAT(outcome.err, HasSubstr(what));
    EXPECT_EQ(std::count(outcome.err.begin(), outcome.err.end(), '\n'), 1) << outcome.err;
    EXPECT_EQ(outcome.out, "");
  };
  expect("", "subcommand");
  expect("build --k %k.npy --v %v.npy", "--out");
  expect("build --k %k.npy --out %a.kv", "--v: found nothing, expected it, or --value-is-key N");
  expect("build --k %k.npy --v %v.npy --value-is-key 3 --out %a.kv", "--v: found it and --value-is-key");
  expect("build --k %q3.npy --v %v.npy --out %a.kv", "q3.npy: found rank 3 [90, 2, 64]");
  expect("build --k %k.npy --v %v.npy --page-size 24 --out %a.kv",
         "page_size: found 24, expected a power of two");
  expect("build --k %k.npy --v %v.npy --seqlens %lengths.safetensors:l --out %a.kv",
         "found 91, expected 0 to 90");
  expect("build --k %k.npy --v %v.npy --k-format q5 --out %a.kv", "--k-format: found 'q5'");
  expect("build --k %k.npy --v %v.npy --out %no/folder/a.kv", "a.kv: cannot be written");
  expect("inspect %k.npy", "k.npy: is no saved cache: found '?NUMPY?\?' at its start");
  expect("convert %nowhere.kv --out %b.kv", "nowhere.kv: cannot be read");
  expect("error --q %q3.npy --k %k.npy --v %v.npy", "--q ");
  expect("error --q %v.npy --k %k.npy --v %v.npy", "head_dim");
  EXPECT_THAT(folder.names(),
              testing::UnorderedElementsAre("k.npy", "v.npy", "q3.npy", "lengths.safetensors"));
}

// Three layers of a real model, whose attention a framework computed too.
class ExampleData : public testing::TestWithParam<const char*> {
 protected:
  std::string tensor(const std::string& name) const {
    return std::string("'") + ATTNSPAN_EXAMPLES_DATA + "/" + GetParam() + "':" + name;
  }
  std::string tensors() const {
    return "--causal --q " + tensor("query") + " --k " + tensor("key") + " --v " + tensor("value");
  }
};

TEST_P(ExampleData, ErrorsAreOrderedAsTheFormatsAre) {
  const json report = json_of(TempFolder(), "cache error --json " + tensors());
  ASSERT_EQ(report.size(), 5U);
  const auto all = [&](int i) { return report[i]["all"]; };
  EXPECT_EQ(report[0]["key_format"], "f16");
  EXPECT_EQ(all(0)["output_nmse"], 0);  // the data is f16
  EXPECT_EQ(all(0)["same_top_key"], 1);
  EXPECT_EQ(all(0)["compared_rows"], 9 * 400);  // the first row sees one key
  for (int i = 1; i < 5; ++i) {
    EXPECT_GT(all(i)["output_nmse"], all(i - 1)["output_nmse"]) << i;
    EXPECT_LE(all(i)["same_top_key"], all(i - 1)["same_top_key"]) << i;
    EXPECT_EQ(report[i]["heads"].size(), 9U);
  }
  EXPECT_LT(all(2)["key_nmse"], 2e-4);  // q8, with the outlier channels of real keys
  EXPECT_LT(all(4)["key_nmse"], 1e-2);  // tbq4
  EXPECT_GT(all(4)["key_nmse"],
            3.9e-3);  // below the bound of theory for Gaussian data would be a wrong measurement
  EXPECT_GT(all(4)["same_top_key"], 0.75);
  EXPECT_EQ(all(3)["key_nmse"], all(2)["key_nmse"]);      // q8 keys
  EXPECT_EQ(all(3)["value_nmse"], all(4)["value_nmse"]);  // tbq4 values
}

TEST_P(ExampleData, RunThroughACacheHasTheErrorThatTheReportSays) {
  const TempFolder folder;
  const json report =
      json_of(folder, "cache error --json --k-format q8 --v-format tbq4 --rows 401 " + tensors());
  EXPECT_EQ(run_command(folder, "run " + tensors() + " --out %exact.npy").status, 0);
  const json run =
      json_of(folder, "run --json --k-format q8 --v-format tbq4 " + tensors() + " --out %cached.npy");
  EXPECT_EQ(run["cache"]["key_format"], "q8");
  EXPECT_EQ(run["cache"]["bytes_per_token"], 3 * (64 + 4 + 32 + 2));
  EXPECT_EQ(run["cache"]["saturated_scales"], 0);
  const std::vector<float> exact = load(folder.file("exact.npy")), cached = load(folder.file("cached.npy"));
  double error = 0, energy = 0;
  for (size_t i = 0; i < exact.size(); ++i) {
    error += std::pow(static_cast<double>(cached[i]) - exact[i], 2);
    energy += std::pow(static_cast<double>(exact[i]), 2);
  }
  EXPECT_NEAR(error / energy, report[0]["all"]["output_nmse"].get<double>(), 0.02 * error / energy);
  EXPECT_THAT(run_command(folder, "run --v-format q8 " + tensors() + " --out %o.npy").out,
              HasSubstr("K q8, V q8"));
}

INSTANTIATE_TEST_SUITE_P(SmolLM2, ExampleData,
                         testing::Values("smollm2_layer00_early.safetensors",
                                         "smollm2_layer14_middle.safetensors",
                                         "smollm2_layer29_late.safetensors"));

TEST(RunThroughACache, KeepsLengthsAndRefusesWhatACacheCannotDo) {
  const TempFolder folder;
  save_key_value(folder);
  save(folder.file("q.npy"), random_tensor(DType::f32, {2, 3, 4, 64}, 4));
  save(folder.file("n.npy"), int_tensor({90, 17}));
  const std::string tensors = "--q %q.npy --k %k.npy --v %v.npy ";
  // An f32 cache changes nothing: the same answer, with the same lengths.
  EXPECT_EQ(
      run_command(folder, "run " + tensors + "--causal --seqused-k %n.npy --out %a.npy --lse %al.npy").status,
      0);
  EXPECT_EQ(run_command(folder, "run " + tensors +
                                    "--causal --seqused-k %n.npy --k-format f32 --out %b.npy --lse %bl.npy")
                .status,
            0);
  for (const auto& [a, b] : {std::pair{"a.npy", "b.npy"}, {"al.npy", "bl.npy"}}) {
    const std::vector<float> dense = load(folder.file(a)), cached = load(folder.file(b));
    ASSERT_EQ(dense.size(), cached.size());
    for (size_t i = 0; i < dense.size(); ++i) EXPECT_NEAR(dense[i], cached[i], 1e-5);
  }
  save(folder.file("do.npy"), random_tensor(DType::f32, {2, 3, 4, 32}, 5));
  const Outcome backward =
      run_command(folder, "run " + tensors + "--k-format q8 --dout %do.npy --dq %dq.npy");
  EXPECT_EQ(backward.status, 2);
  EXPECT_THAT(backward.err, HasSubstr("--k-format: found it beside --dout"));
}

}  // namespace
}  // namespace attnspan::cli_test
