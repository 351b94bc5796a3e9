// attnspan run on good input: what the files then hold.

#include <cmath>
#include <nlohmann/json.hpp>

#include "command.hpp"
#include "io/safetensors.hpp"

namespace attnspan::cli_test {
namespace {

using testing::ElementsAre;
using testing::FloatNear;
using testing::HasSubstr;
using testing::Pointwise;

class RunTest : public testing::Test {
 protected:
  RunTest() {
    save(folder_.file("q.npy"), random_tensor(DType::f32, {2, 5, 4, 8}, 1));
    save(folder_.file("k.npy"), random_tensor(DType::f32, {2, 7, 2, 8}, 2));
    save(folder_.file("v.npy"), random_tensor(DType::f32, {2, 7, 2, 6}, 3));
    save(folder_.file("do.npy"), random_tensor(DType::f32, {2, 5, 4, 6}, 4));
  }

  void expect_success(const std::string& arguments) {
    outcome_ = run_command(folder_, "run " + arguments);
    EXPECT_EQ(outcome_.status, 0) << arguments;
    EXPECT_EQ(outcome_.err, "");
  }
  std::vector<float> loaded(const std::string& name) const { return load(folder_.file(name)); }
  std::vector<int64_t> shape(const std::string& name) const {
    return io::read_tensor(io::parse_address(folder_.file(name))).shape();
  }
  // [batch, a, b, dim] -> [batch, b, a, dim]
  void save_exchanged(const std::string& from, const std::string& to) const {
    const TensorBuffer in = io::read_tensor(io::parse_address(folder_.file(from)));
    const auto& s = in.shape();
    TensorBuffer out(in.dtype(), {s[0], s[2], s[1], s[3]});
    for (int64_t i = 0; i < out.bytes() / 4; ++i) {
      const int64_t d = i % s[3], a = i / s[3] % s[1], b = i / s[3] / s[1] % s[2],
                    batch = i / s[3] / s[1] / s[2];
      store_f32(out.data(), i, DType::f32,
                load_f32(in.data(), ((batch * s[1] + a) * s[2] + b) * s[3] + d, DType::f32));
    }
    save(folder_.file(to), out);
  }

  TempFolder folder_;
  Outcome outcome_;
};

const char* const kInputs = "--q %q.npy --k %k.npy --v %v.npy ";

TEST_F(RunTest, AgreesWithTheReference) {
  const std::string options =
      std::string(kInputs) + "--causal --window 3,-1 --softcap 5 --scale 0.5 --diagonal 1 ";
  expect_success(options + "--out %o.npy --lse %l.npy --backend cpu --threads 1");
  expect_success(options + "--out %ro.npy --lse %rl.npy --backend reference");
  EXPECT_THAT(loaded("o.npy"), Pointwise(FloatNear(1e-5F), loaded("ro.npy")));
  EXPECT_THAT(loaded("l.npy"), Pointwise(FloatNear(1e-5F), loaded("rl.npy")));
  EXPECT_THAT(shape("o.npy"), ElementsAre(2, 5, 4, 6));
  EXPECT_THAT(shape("l.npy"), ElementsAre(2, 4, 5));
}

TEST_F(RunTest, RealModel) {
  for (const char* layer : {"layer00_early", "layer14_middle", "layer29_late"}) {
    const std::string file = std::string(ATTNSPAN_EXAMPLES_DATA) + "/smollm2_" + layer + ".safetensors:";
    expect_success("--causal --q " + file + "query --k " + file + "key --v " + file + "value --out %o.npy");
    // The model's own out was computed in f32 and rounded to f16, as ours is.
    const std::vector<float> found = loaded("o.npy"), expected = load(file + "out");
    ASSERT_EQ(found.size(), expected.size());
    for (size_t i = 0; i < found.size(); ++i) {
      ASSERT_NEAR(found[i], expected[i], 2e-3 * std::max(1.0F, std::abs(expected[i]))) << layer << " " << i;
    }
  }
}

TEST_F(RunTest, LayoutCoversInputsAndOutputs) {
  for (const char* name : {"q", "k", "v", "do"})
    save_exchanged(name + std::string(".npy"), name + std::string("_t.npy"));
  expect_success(std::string(kInputs) +
                 "--causal --out %o.npy --dout %do.npy --dq %dq.npy --dk %dk.npy --dv %dv.npy");
  expect_success(
      "--layout bhsd --q %q_t.npy --k %k_t.npy --v %v_t.npy --causal --out %o_t.npy --dout %do_t.npy --dq "
      "%dq_t.npy "
      "--dk %dk_t.npy --dv %dv_t.npy");
  for (const std::string name : {"o", "dq", "dk", "dv"}) {
    save_exchanged(name + "_t.npy", name + "_tt.npy");
    EXPECT_EQ(loaded(name + ".npy"), loaded(name + "_tt.npy")) << name;
  }
  EXPECT_THAT(shape("o_t.npy"), ElementsAre(2, 4, 5, 6));
  EXPECT_THAT(shape("dv_t.npy"), ElementsAre(2, 2, 7, 6));
}

TEST_F(RunTest, PackedIsTheSameAsABatch) {
  // The batch of two, laid out as packed sequences of equal length, is the same memory.
  for (const auto& [name, shape] : {std::pair<std::string, std::vector<int64_t>>{"q", {10, 4, 8}},
                                    {"k", {14, 2, 8}},
                                    {"v", {14, 2, 6}}}) {
    TensorBuffer in = io::read_tensor(io::parse_address(folder_.file(name + ".npy"))),
                 packed(DType::f32, shape);
    std::copy_n(static_cast<char*>(in.data()), in.bytes(), static_cast<char*>(packed.data()));
    save(folder_.file(name + "_p.npy"), packed);
  }
  save(folder_.file("cuq.npy"), int_tensor({0, 5, 10}));
  save(folder_.file("cuk.npy"), int_tensor({0, 7, 14}));
  expect_success(std::string(kInputs) + "--causal --out %o.npy");
  expect_success(
      "--q %q_p.npy --k %k_p.npy --v %v_p.npy --cu-seqlens-q %cuq.npy --cu-seqlens-k %cuk.npy --causal --out "
      "%o_p.npy "
      "--lse %l_p.npy");
  EXPECT_EQ(loaded("o.npy"), loaded("o_p.npy"));
  EXPECT_THAT(shape("l_p.npy"), ElementsAre(4, 10));
}

TEST_F(RunTest, ProbsSumToOneAndExplainOut) {
  expect_success(std::string(kInputs) + "--causal --out %o.npy --probs %p.npy");
  EXPECT_THAT(shape("p.npy"), ElementsAre(2, 4, 5, 7));
  const std::vector<float> probs = loaded("p.npy"), value = loaded("v.npy"), out = loaded("o.npy");
  for (int row = 0; row < 2 * 4 * 5; ++row) {
    const int batch = row / 20, head = row / 5 % 4, i = row % 5;
    double sum = 0, first = 0;
    for (int j = 0; j < 7; ++j) {
      sum += probs[row * 7 + j];
      first += probs[row * 7 + j] * value[((batch * 7 + j) * 2 + head / 2) * 6];
      if (j > i + 2) {
        EXPECT_EQ(probs[row * 7 + j], 0);
      }
    }
    EXPECT_NEAR(sum, 1, 1e-6);
    EXPECT_NEAR(first, out[((batch * 5 + i) * 4 + head) * 6], 1e-6);
  }
}

TEST_F(RunTest, OutputsShareASafetensorsFile) {
  save(folder_.file("sinks.npy"), random_tensor(DType::f32, {4}, 5));
  expect_success(
      std::string(kInputs) +
      "--sinks %sinks.npy --dout %do.npy --out %all.safetensors:out --lse %all.safetensors:lse --dq "
      "%all.safetensors:dq --dk %all.safetensors:dk --dv %all.safetensors:dv --d-sinks %all.safetensors:ds");
  EXPECT_EQ(io::read_safetensors_header(folder_.file("all.safetensors")).names(),
            "'dk', 'dq', 'ds', 'dv', 'lse', 'out'");
  EXPECT_THAT(shape("all.safetensors:ds"), ElementsAre(4));
}

TEST_F(RunTest, Bf16StaysBf16) {
  const std::string file = folder_.file("b.safetensors");
  io::OutputSet outputs;
  const TensorBuffer q = random_tensor(DType::bf16, {1, 3, 2, 8}, 1),
                     k = random_tensor(DType::bf16, {1, 4, 1, 8}, 2);
  for (const auto& [name, buffer] : {std::pair<const char*, const TensorBuffer*>{":q", &q}, {":k", &k}}) {
    outputs.add(io::parse_address(file + name), DType::bf16);
    outputs.set(io::parse_address(file + name), *buffer);
  }
  outputs.write();
  expect_success("--q %b.safetensors:q --k %b.safetensors:k --v %b.safetensors:k --out %c.safetensors:o");
  EXPECT_EQ(io::read_safetensors_header(folder_.file("c.safetensors")).tensors.at("o").type, "BF16");
}

TEST_F(RunTest, BiasBroadcastsAsInNumPy) {
  TensorBuffer bias(DType::f32, {5, 7});
  for (int i = 0; i < 35; ++i) store_f32(bias.data(), i, DType::f32, i % 7 > i / 7 ? -1e30F : 0.0F);
  save(folder_.file("bias.npy"), bias);
  expect_success(std::string(kInputs) + "--bias %bias.npy --out %o.npy");
  expect_success(std::string(kInputs) + "--causal --diagonal top-left --out %c.npy");
  EXPECT_THAT(loaded("o.npy"), Pointwise(FloatNear(1e-6F), loaded("c.npy")));
}

TEST_F(RunTest, JsonNamesBackendsAndCountsGuardedValues) {
  TensorBuffer v = random_tensor(DType::f32, {2, 7, 2, 6}, 1);
  store_f32(v.data(), 0, DType::f32, std::nanf(""));  // seen by every row of heads 0 and 1 of sequence 0
  save(folder_.file("nan.npy"), v);
  expect_success("--q %q.npy --k %k.npy --v %nan.npy --out %o.npy --nan-guard --json");
  const nlohmann::json report = nlohmann::json::parse(outcome_.out);
  EXPECT_NE(report["phases"][0]["backend"], "auto");
  EXPECT_GE(report["phases"][0]["nonfinite_replaced"], 2 * 5);
  EXPECT_EQ(report["outputs"][0]["shape"], nlohmann::json({2, 5, 4, 6}));
  EXPECT_EQ(report["problem"]["kv_heads"], 2);
  for (const float x : loaded("o.npy")) EXPECT_TRUE(std::isfinite(x));
}

TEST_F(RunTest, EmptySequencesAreOrdinary) {
  save(folder_.file("k0.npy"), random_tensor(DType::f32, {2, 0, 2, 8}, 2));
  save(folder_.file("v0.npy"), random_tensor(DType::f32, {2, 0, 2, 6}, 3));
  expect_success("--q %q.npy --k %k0.npy --v %v0.npy --out %o.npy --lse %l.npy");
  for (const float x : loaded("o.npy")) EXPECT_EQ(x, 0);
  for (const float x : loaded("l.npy")) EXPECT_EQ(x, -INFINITY);
}

TEST_F(RunTest, ReplacesTheInputOnlyAfterReadingIt) {
  expect_success(std::string(kInputs) + "--out %o.npy");
  expect_success("--q %q.npy --k %k.npy --v %v.npy --out %q.npy");
  EXPECT_EQ(loaded("q.npy"), loaded("o.npy"));
}

TEST_F(RunTest, TheEnvironmentForcesABackend) {
  setenv("ATTNSPAN_BACKEND", "reference", 1);
  expect_success(std::string(kInputs) + "--out %o.npy --json");
  setenv("ATTNSPAN_BACKEND", "nonsense", 1);
  const Outcome outcome = run_command(folder_, std::string("run ") + kInputs + "--out %n.npy");
  unsetenv("ATTNSPAN_BACKEND");
  EXPECT_EQ(nlohmann::json::parse(outcome_.out)["phases"][0]["backend"], "reference");
  EXPECT_EQ(outcome.status, 2);
  EXPECT_THAT(outcome.err, HasSubstr("found 'nonsense', expected one of auto, "));
}

}  // namespace
}  // namespace attnspan::cli_test
