// attnspan plan: the figures of the design, and models as files describe them.

#include <nlohmann/json.hpp>

#include "command.hpp"

namespace attnspan::cli_test {
namespace {

using nlohmann::json;
using testing::HasSubstr;

json plan(const TempFolder& folder, const std::string& arguments) {
  const Outcome outcome = run_command(folder, "plan --json " + arguments);
  EXPECT_EQ(outcome.status, 0) << outcome.err;
  return json::parse(outcome.out, nullptr, false);
}

json row_of(const json& report, const std::string& key_format, const std::string& value_format) {
  for (const json& row : report["formats"]) {
    if (row["key_format"] == key_format && row["value_format"] == value_format) return row;
  }
  ADD_FAILURE() << "no row " << key_format << " + " << value_format;
  return {};
}

constexpr const char* kLongContext =
    "--layers 16 --kv-heads 4 --head-dim 256 --context 262144 --weights-gb 17 ";

TEST(Plan, TheFiveFiguresOfTheDesign) {
  const TempFolder folder;
  // 32768 tokens: 2 GiB of f16 scores per head and layer.
  EXPECT_EQ(
      plan(folder,
           "--layers 1 --kv-heads 1 --head-dim 64 --context 32768")["score_bytes_f16_per_head_per_layer"],
      2.0 * 1024 * 1024 * 1024);
  const json report = plan(folder, std::string(kLongContext) + "--heads 4");
  const json f16 = row_of(report, "f16", "f16"), tbq4 = row_of(report, "tbq4", "tbq4");
  // 17.2 GB in f16, 4.4 GB in tbq4; 39 GB through a separate pass.
  EXPECT_EQ(f16["cache_bytes"], 262144.0 * 32768 * 2);
  EXPECT_EQ(tbq4["cache_bytes"], 262144.0 * 32768 * 4.125 / 8);
  EXPECT_NEAR(tbq4["step_bytes_if_made_f16_first"], 39e9, 0.5e9);
  // Next to 17 GB of weights: 21% in tbq4, half in f16.
  EXPECT_NEAR(tbq4["cache_share_of_step"], 0.21, 0.005);
  EXPECT_NEAR(f16["cache_share_of_step"], 0.50, 0.005);
  // One FLOP per byte, times the GQA ratio.
  EXPECT_EQ(f16["flops_per_byte"], 1);
  EXPECT_EQ(row_of(plan(folder, std::string(kLongContext) + "--heads 24"), "f16", "f16")["flops_per_byte"],
            6);
  // As printed.
  const std::string text = run_command(folder, std::string("plan ") + kLongContext + "--heads 24").out;
  EXPECT_THAT(text, testing::ContainsRegex("f16 +66 kB +17\\.2 GB +34 GB +50%"));
  EXPECT_THAT(text, testing::ContainsRegex("tbq4 +16\\.9 kB +4\\.4 GB +21 GB +21% +39 GB"));
  EXPECT_THAT(text, testing::ContainsRegex("f16 +1\\.0 +2\\.0 +4\\.0 +8\\.0 +16\\.0 +6\\.0"));
  EXPECT_THAT(run_command(folder, "plan --layers 1 --kv-heads 1 --head-dim 64 --context 32768").out,
              HasSubstr("2.00 GiB per head per layer"));
}

TEST(Plan, WhatFitsAndHowFastItMayRun) {
  const TempFolder folder;
  const json report = plan(folder, std::string(kLongContext) + "--memory-gb 24 --bandwidth-gbs 1000");
  const json f16 = row_of(report, "f16", "f16");
  EXPECT_EQ(f16["longest_context"], static_cast<int64_t>(7e9 / 65536));
  EXPECT_NEAR(f16["tokens_per_second_at_most"], 1000 / (17 + 17.179869184), 1e-9);
  // Two sequences read the weights once.
  const json two =
      row_of(plan(folder, std::string(kLongContext) + "--bandwidth-gbs 1000 --batch 2"), "f16", "f16");
  EXPECT_NEAR(two["tokens_per_second_at_most"], 2000 / (17 + 2 * 17.179869184), 1e-9);
  // A window bounds the cache: any context fits.
  const std::string window =
      "--layers 2 --kv-heads 1 --head-dim 64 --context 100000 --window 1000 --memory-gb 1";
  const json windowed = row_of(plan(folder, window), "f16", "f16");
  EXPECT_EQ(windowed["cache_bytes"], 2 * 1000 * 256);
  EXPECT_TRUE(windowed["longest_context"].is_null());
}

TEST(Plan, OneMoreRowForTheFormatsThatWereAskedFor) {
  const TempFolder folder;
  const json row =
      row_of(plan(folder, std::string(kLongContext) + "--k-format bf16 --v-format q8"), "bf16", "q8");
  EXPECT_EQ(row["bytes_per_token"], 16 * 4 * (512 + 256 + 16));
}

TEST(Plan, HuggingFaceConfigs) {
  const TempFolder folder;
  const auto layers_of = [&](const std::string& config) {
    write_all(folder.file("config.json"), config);
    return plan(folder, "%config.json");
  };
  json report = layers_of(R"({"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
      "hidden_size": 576, "max_position_embeddings": 8192, "model_type": "llama"})");
  EXPECT_EQ(report["context"], 8192);
  EXPECT_EQ(report["layers"], json::parse(R"([{"count": 30, "heads": 9, "kv_heads": 3, "head_dim": 64,
      "head_dim_v": 64, "value_is_key": false, "window": -1}])"));

  // A language model inside another; layers by kind; a checkpoint beside it.
  write_all(folder.file("model.safetensors.index.json"), R"({"metadata": {"total_size": 123456}})");
  report = layers_of(R"({"model_type": "x", "text_config": {"num_hidden_layers": 4, "num_attention_heads": 8,
      "num_key_value_heads": 2, "head_dim": 256, "hidden_size": 1024, "max_position_embeddings": 1000,
      "sliding_window": 512, "layer_types":
      ["linear_attention", "sliding_attention", "sliding_attention", "full_attention"]}})");
  EXPECT_EQ(report["layers_without_cache"], 1);
  EXPECT_EQ(report["weight_bytes"], 123456);
  ASSERT_EQ(report["layers"].size(), 2U);
  EXPECT_EQ(report["layers"][0]["window"], 512);
  EXPECT_EQ(report["layers"][0]["count"], 2);
  EXPECT_EQ(row_of(report, "f16", "f16")["cache_bytes"], 2 * 2 * 256 * 2 * (2 * 512 + 1000));

  // MLA: one shared row of 512 + 64.
  report = layers_of(R"({"num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
      "hidden_size": 7168, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "max_position_embeddings": 163840})");
  EXPECT_EQ(row_of(report, "bf16", "bf16")["bytes_per_token"], 61 * 576 * 2);
  EXPECT_EQ(report["layers"][0]["kv_heads"], 1);

  // Every sixth layer sees everything; a window that is switched off.
  report = layers_of(R"({"model_type": "gemma3_text", "num_hidden_layers": 12, "num_attention_heads": 4,
      "num_key_value_heads": 1, "head_dim": 256, "sliding_window": 512, "max_position_embeddings": 32768})");
  EXPECT_EQ(report["layers"][0]["count"], 10);
  EXPECT_EQ(report["layers"][1]["count"], 2);
  report = layers_of(R"({"num_hidden_layers": 12, "num_attention_heads": 4, "hidden_size": 256,
      "sliding_window": 512, "use_sliding_window": false, "max_position_embeddings": 32768})");
  EXPECT_EQ(report["layers"][0]["window"], -1);
  EXPECT_EQ(report["layers"][0]["kv_heads"], 4);
}

// A GGUF file of version 3 as its writers make it.
class GgufFile {
 public:
  GgufFile& add(const std::string& key, uint32_t value) {
    start(key, 4);
    put(value);
    return *this;
  }
  GgufFile& add(const std::string& key, const std::string& value) {
    start(key, 8);
    put_text(value);
    return *this;
  }
  GgufFile& add(const std::string& key, const std::vector<int32_t>& values) {
    start(key, 9);
    put<uint32_t>(5);
    put<uint64_t>(values.size());
    for (const int32_t value : values) put(value);
    return *this;
  }
  // One tensor of f32 [8], whose 32 bytes follow at a multiple of 32.
  std::string bytes() const {
    GgufFile whole;
    whole.body_ = "GGUF";
    whole.put<uint32_t>(3);
    whole.put<uint64_t>(1);
    whole.put<uint64_t>(count_);
    whole.body_ += body_;
    whole.put_text("token_embd.weight");
    whole.put<uint32_t>(1);
    whole.put<uint64_t>(8);
    whole.put<uint32_t>(0);
    whole.put<uint64_t>(0);
    whole.body_.resize((whole.body_.size() + 31) / 32 * 32 + 32, '\0');
    return whole.body_;
  }

 private:
  template <typename T>
  void put(T value) {
    body_.append(reinterpret_cast<const char*>(&value), sizeof(value));
  }
  void put_text(const std::string& text) {
    put<uint64_t>(text.size());
    body_ += text;
  }
  void start(const std::string& key, uint32_t type) {
    put_text(key);
    put(type);
    ++count_;
  }

  std::string body_;
  uint64_t count_ = 0;
};

GgufFile small_model() {
  GgufFile file;
  file.add("general.architecture", std::string("qwen3next"))
      .add("qwen3next.block_count", 8)
      .add("qwen3next.context_length", 4096)
      .add("qwen3next.attention.head_count", 16)
      .add("qwen3next.attention.head_count_kv", 2)
      .add("qwen3next.attention.key_length", 256)
      .add("qwen3next.attention.value_length", 128)
      .add("tokenizer.ggml.tokens", std::vector<int32_t>(10000, 7));
  return file;
}

TEST(Plan, GgufHeaders) {
  const TempFolder folder;
  write_all(folder.file("model.gguf"), small_model().add("qwen3next.full_attention_interval", 4).bytes());
  json report = plan(folder, "%model.gguf");
  EXPECT_EQ(report["context"], 4096);
  EXPECT_EQ(report["weight_bytes"], 32);
  EXPECT_EQ(report["layers_without_cache"], 6);
  EXPECT_EQ(row_of(report, "f16", "f16")["bytes_per_token"], 2 * 2 * (256 + 128) * 2);

  // KV heads by layer, and windows by layer.
  GgufFile by_layer;
  by_layer.add("general.architecture", std::string("x"))
      .add("x.block_count", 3)
      .add("x.context_length", 1000)
      .add("x.embedding_length", 512)
      .add("x.attention.head_count", 8)
      .add("x.attention.head_count_kv", std::vector<int32_t>{2, 0, 4})
      .add("x.attention.sliding_window", 100)
      .add("x.attention.sliding_window_pattern", std::vector<int32_t>{1, 0, 0});
  write_all(folder.file("model.gguf"), by_layer.bytes());
  report = plan(folder, "%model.gguf");
  EXPECT_EQ(report["layers_without_cache"], 1);
  EXPECT_EQ(row_of(report, "f16", "f16")["cache_bytes"], 2 * 64 * 2 * (2 * 100 + 4 * 1000));
}

TEST(Plan, BadInputIsOneLineThatNamesIt) {
  const TempFolder folder;
  const std::string good = small_model().bytes();
  const auto expect = [&](const std::string& arguments, const std::string& what) {
    const Outcome outcome = run_command(folder, "plan " + arguments);
    EXPECT_EQ(outcome.status, 2) << arguments;
    EXPECT_THAT(outcome.err, HasSubstr(what));
    EXPECT_EQ(std::count(outcome.err.begin(), outcome.err.end(), '\n'), 1) << outcome.err;
    EXPECT_EQ(outcome.out, "");
  };
  expect("", "--layers: found nothing");
  expect("--layers 2 --kv-heads 1 --head-dim 64", "--context: found nothing");
  expect("--layers 0 --kv-heads 1 --head-dim 64", "--layers: found '0'");
  expect("--layers 2 --kv-heads 3 --head-dim 64 --heads 4 --context 1",
         "--heads: found 4, expected a multiple");
  expect("--layers 2 --kv-heads 3 --head-dim 64 --context 1 --weights-gb -1", "--weights-gb: found '-1'");
  expect("--layers 2 --kv-heads 3 --head-dim 64 --context 1 --k-format q4", "--k-format: found 'q4'");
  expect("%nowhere.json", "nowhere.json: cannot be read");
  write_all(folder.file("config.json"), "[1, 2]");
  expect("%config.json", "config.json: is neither a GGUF file nor a JSON object");
  write_all(folder.file("config.json"), "{}");
  expect("%config.json", "config.json: has no 'num_hidden_layers'");
  write_all(folder.file("config.json"), R"({"num_hidden_layers": -3, "num_attention_heads": 2})");
  expect("%config.json", "found -3 under 'num_hidden_layers'");
  write_all(folder.file("config.json"),
            R"({"num_hidden_layers": 3, "num_attention_heads": 1, "hidden_size": 4096, "n_ctx": 9})");
  expect("%config.json", "found head dims 4096 and 4096, expected 1 to 576");
  expect("%config.json --layers 3", "--layers: found it beside");
  write_all(folder.file("a.gguf"), good.substr(0, good.size() / 2));
  expect("%a.gguf", "a.gguf: is torn");
  std::string version = good;
  version[4] = 9;
  write_all(folder.file("a.gguf"), version);
  expect("%a.gguf", "found version 9 of GGUF, expected 2 or 3");
  std::string huge = good;
  for (int i = 16; i < 24; ++i) huge[i] = '\x7f';  // metadata entries
  write_all(folder.file("a.gguf"), huge);
  expect("%a.gguf", "a.gguf: ");
}

}  // namespace
}  // namespace attnspan::cli_test
