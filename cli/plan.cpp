// attnspan plan: memory and traffic of a KV cache before anything is run.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "arguments.hpp"
#include "attnspan/attention.hpp"
#include "commands.hpp"
#include "core/validation.hpp"
#include "kv/page_pool.hpp"
#include "model_shape.hpp"
#include "print.hpp"

namespace attnspan::cli {
namespace {

constexpr double kGiga = 1e9;
constexpr int64_t kMostTokens = int64_t{1} << 40;

struct PlanArguments {
  std::string model;  // config.json or model.gguf; empty: the flags below
  int64_t layers = 0, kv_heads = 0, head_dim = 0, head_dim_v = 0, heads = 0, window = -1;
  int64_t context = 0, batch = 1;
  std::optional<double> weights_gb, bandwidth_gbs, memory_gb;
  std::string k_format, v_format;  // one more row
  bool json = false;
};

struct FormatPair {
  KvFormat key, value;
  std::string name() const {
    return key == value ? name_of(key) : std::string(name_of(key)) + " + " + name_of(value);
  }
};

// One row of the report. Bytes of one decode step of the whole batch.
struct Row {
  FormatPair format;
  double bytes_per_token = 0;  // of one sequence, while no window has filled
  double cache_bytes = 0;      // of all sequences at the context: also what one decode step reads
  double dequantise_first =
      0;  // bytes a step would move if the cache became an f16 copy first; 0: is no such format
  std::optional<double> share;  // of the cache in all bytes of a step, next to the weights
  std::optional<double> tokens_per_second;
  std::optional<int64_t> fits;           // tokens per sequence
  double flops_per_byte_and_ratio = 0;   // times query heads per KV head
  std::optional<double> flops_per_byte;  // of this model
};

// Bytes that one token takes in one layer: as KvCache lays its pages out.
double bytes_per_token(const LayerGroup& g, FormatPair format) {
  PoolShape shape;
  shape.kv_heads = g.kv_heads;
  shape.page_size = 1;
  shape.key_dim = g.head_dim;
  shape.value_dim = g.head_dim_v;
  shape.key_format = format.key;
  shape.value_format = format.value;
  shape.value_is_key = g.value_is_key;
  return static_cast<double>(page_bytes(shape));
}

int64_t kept_tokens(const LayerGroup& g, int64_t context) {
  return g.window < 0 ? context : std::min(context, g.window);
}

double cache_bytes(const ModelShape& model, FormatPair format, int64_t context) {
  double bytes = 0;
  for (const LayerGroup& g : model.groups) {
    bytes += static_cast<double>(g.layers * kept_tokens(g, context)) * bytes_per_token(g, format);
  }
  return bytes;
}

// Multiplications and additions of query . key and probability * value for one new token.
double decode_flops(const ModelShape& model, int64_t context, bool one_query_head_each) {
  double flops = 0;
  for (const LayerGroup& g : model.groups) {
    const int64_t heads = one_query_head_each ? g.kv_heads : g.heads;
    flops +=
        2.0 * static_cast<double>(g.layers * heads * (g.head_dim + g.head_dim_v) * kept_tokens(g, context));
  }
  return flops;
}

// The longest context whose caches fit into `bytes`; a window may make it endless.
int64_t longest_context(const ModelShape& model, FormatPair format, int64_t batch, double bytes) {
  int64_t low = 0, high = kMostTokens;
  while (low < high) {
    const int64_t middle = low + (high - low + 1) / 2;
    const bool fits = static_cast<double>(batch) * cache_bytes(model, format, middle) <= bytes;
    fits ? low = middle : high = middle - 1;
  }
  return low;
}

Row plan_row(const ModelShape& model, const PlanArguments& a, FormatPair format) {
  const auto batch = static_cast<double>(a.batch);
  Row row;
  row.format = format;
  row.bytes_per_token = cache_bytes(model, format, 1);
  row.cache_bytes = batch * cache_bytes(model, format, a.context);
  const double f16_bytes = batch * cache_bytes(model, {KvFormat::f16, KvFormat::f16}, a.context);
  const auto quantised = [](KvFormat f) { return f == KvFormat::q8 || f == KvFormat::tbq4; };
  if (quantised(format.key) && quantised(format.value))
    row.dequantise_first = row.cache_bytes + 2 * f16_bytes;
  if (row.cache_bytes > 0) {
    row.flops_per_byte_and_ratio = batch * decode_flops(model, a.context, true) / row.cache_bytes;
    const auto known = [](const LayerGroup& g) { return g.heads > 0; };
    if (std::all_of(model.groups.begin(), model.groups.end(), known)) {
      row.flops_per_byte = batch * decode_flops(model, a.context, false) / row.cache_bytes;
    }
  }
  const double step = row.cache_bytes + model.weight_bytes;
  if (model.weight_bytes > 0) row.share = row.cache_bytes / step;
  if (a.bandwidth_gbs && step > 0) row.tokens_per_second = batch * *a.bandwidth_gbs * kGiga / step;
  if (a.memory_gb) {
    row.fits = longest_context(model, format, a.batch, *a.memory_gb * kGiga - model.weight_bytes);
  }
  return row;
}

std::vector<Row> plan_rows(const ModelShape& model, const PlanArguments& a) {
  std::vector<FormatPair> formats;
  for (const KvFormat f : {KvFormat::f32, KvFormat::f16, KvFormat::bf16, KvFormat::q8})
    formats.push_back({f, f});
  const bool values_are_keys = std::all_of(model.groups.begin(), model.groups.end(),
                                           [](const LayerGroup& g) { return g.value_is_key; });
  if (!values_are_keys) formats.push_back({KvFormat::q8, KvFormat::tbq4});
  formats.push_back({KvFormat::tbq4, KvFormat::tbq4});
  if (!a.k_format.empty() || !a.v_format.empty()) {
    const KvFormat k = *parse_kv_format(a.k_format.empty() ? a.v_format : a.k_format);
    const FormatPair asked{k, a.v_format.empty() ? k : *parse_kv_format(a.v_format)};
    const auto same = [&](const FormatPair& f) { return f.key == asked.key && f.value == asked.value; };
    if (std::none_of(formats.begin(), formats.end(), same)) formats.push_back(asked);
  }
  std::vector<Row> rows;
  for (const FormatPair& format : formats) rows.push_back(plan_row(model, a, format));
  return rows;
}

ModelShape shape_of(PlanArguments& a) {
  ModelShape model;
  if (!a.model.empty()) {
    for (const auto& [flag, value] : {std::pair{"--layers", a.layers},
                                      {"--kv-heads", a.kv_heads},
                                      {"--head-dim", a.head_dim},
                                      {"--head-dim-v", a.head_dim_v},
                                      {"--heads", a.heads}}) {
      require(value == 0, flag, "it beside " + a.model, "one of the two");
    }
    require(a.window < 0, "--window", "it beside " + a.model, "one of the two");
    model = read_model_shape(a.model);
  } else {
    for (const auto& [flag, value] :
         {std::pair{"--layers", a.layers}, {"--kv-heads", a.kv_heads}, {"--head-dim", a.head_dim}}) {
      require(value > 0, flag, "nothing", "it, or a config.json or GGUF file");
    }
    require(a.heads == 0 || a.heads % a.kv_heads == 0, "--heads", std::to_string(a.heads),
            "a multiple of --kv-heads, " + std::to_string(a.kv_heads));
    model.source = "flags";
    model.groups = {{a.layers, a.heads, a.kv_heads, a.head_dim, a.head_dim_v == 0 ? a.head_dim : a.head_dim_v,
                     false, a.window}};
  }
  if (a.weights_gb) model.weight_bytes = *a.weights_gb * kGiga;
  if (a.context == 0) a.context = model.context;
  require(a.context > 0, "--context", "nothing", "it: the file names no longest context");
  return model;
}

// "17.2 GB": three digits while they say something.
std::string decimal_bytes(double bytes) {
  const char* const units[] = {"B", "kB", "MB", "GB", "TB", "PB"};
  size_t unit = 0;
  for (; bytes >= 999.5 && unit + 1 < std::size(units); ++unit) bytes /= 1000;
  return text_of(bytes, unit == 0 || bytes >= 20 ? 0 : 1) + " " + units[unit];
}

std::string text_of_tokens(int64_t tokens) { return tokens >= kMostTokens ? "any" : std::to_string(tokens); }

void print_model(const ModelShape& model, const PlanArguments& a) {
  std::printf("%s\n", one_line(model.source).c_str());
  for (const LayerGroup& g : model.groups) {
    std::string line = "  " + std::to_string(g.layers) + (g.layers == 1 ? " layer" : " layers") + " with " +
                       std::to_string(g.kv_heads) + (g.kv_heads == 1 ? " KV head" : " KV heads");
    if (g.heads > 0) line += " for " + std::to_string(g.heads) + " query heads";
    line += ", head_dim " + std::to_string(g.head_dim);
    if (g.value_is_key) {
      line += ", values are the first " + std::to_string(g.head_dim_v) + " of the keys";
    } else if (g.head_dim_v != g.head_dim) {
      line += ", of values " + std::to_string(g.head_dim_v);
    }
    if (g.window >= 0) line += ", window " + std::to_string(g.window);
    std::printf("%s\n", line.c_str());
  }
  if (model.layers_without_cache > 0) {
    std::printf("  %lld layers without a cache of their own\n",
                static_cast<long long>(model.layers_without_cache));
  }
  std::printf("  %lld tokens of context", static_cast<long long>(a.context));
  if (a.batch > 1) std::printf(", %lld sequences", static_cast<long long>(a.batch));
  if (model.weight_bytes > 0) std::printf(", %s of weights", decimal_bytes(model.weight_bytes).c_str());
  std::printf("\n\n");
}

void print_rows(const ModelShape& model, const PlanArguments& a, const std::vector<Row>& rows) {
  Table table("lrrrrrrr", {"K + V", "per token", "at the context", "a step reads",
                           model.weight_bytes > 0 ? "share" : "", a.bandwidth_gbs ? "tokens/s at most" : "",
                           a.memory_gb ? "longest context" : "", "if first made f16"});
  for (const Row& row : rows) {
    table.add(
        {row.format.name(), decimal_bytes(row.bytes_per_token), decimal_bytes(row.cache_bytes),
         decimal_bytes(row.cache_bytes + model.weight_bytes),
         row.share ? text_of(100 * *row.share, 0) + "%" : "",
         row.tokens_per_second ? text_of(*row.tokens_per_second, *row.tokens_per_second < 100 ? 1 : 0) : "",
         row.fits ? text_of_tokens(*row.fits) : "",
         row.dequantise_first > 0 ? decimal_bytes(row.dequantise_first) : ""});
  }
  table.print();
  std::printf("\n");
  if (model.weight_bytes > 0) {
    std::printf("share: of the cache in the bytes that a decode step reads, next to the weights.\n");
  }
  std::printf(
      "if first made f16: what a step would move if an f16 copy of the cache were written and read again;\n"
      "attnspan dequantises in registers and makes none.\n\n");
}

constexpr int kRatios[] = {1, 2, 4, 8, 16};

void print_intensity(const std::vector<Row>& rows) {
  std::printf("FLOPs of decode per byte of cache, by query heads per KV head:\n");
  Table table("lrrrrrr", {"K + V", "1", "2", "4", "8", "16", "this model"});
  for (const Row& row : rows) {
    std::vector<std::string> cells = {row.format.name()};
    for (const int ratio : kRatios) cells.push_back(text_of(ratio * row.flops_per_byte_and_ratio, 1));
    cells.push_back(row.flops_per_byte ? text_of(*row.flops_per_byte, 1) : "");
    table.add(cells);
  }
  table.print();
}

double score_bytes(const PlanArguments& a) {
  return 2.0 * static_cast<double>(a.context) * static_cast<double>(a.context);
}

void print_report(const ModelShape& model, const PlanArguments& a, const std::vector<Row>& rows) {
  print_model(model, a);
  print_rows(model, a, rows);
  print_intensity(rows);
  std::printf("\nScores of a whole prefill in f16, which attnspan never keeps: %s per head per layer.\n",
              text_of_bytes(score_bytes(a)).c_str());
}

nlohmann::json json_report(const ModelShape& model, const PlanArguments& a, const std::vector<Row>& rows) {
  nlohmann::json report = {{"source", model.source},
                           {"context", a.context},
                           {"batch", a.batch},
                           {"weight_bytes", model.weight_bytes},
                           {"layers_without_cache", model.layers_without_cache},
                           {"score_bytes_f16_per_head_per_layer", score_bytes(a)},
                           {"layers", nlohmann::json::array()},
                           {"formats", nlohmann::json::array()}};
  for (const LayerGroup& g : model.groups) {
    report["layers"].push_back({{"count", g.layers},
                                {"heads", g.heads},
                                {"kv_heads", g.kv_heads},
                                {"head_dim", g.head_dim},
                                {"head_dim_v", g.head_dim_v},
                                {"value_is_key", g.value_is_key},
                                {"window", g.window}});
  }
  for (const Row& row : rows) {
    nlohmann::json entry = {{"key_format", name_of(row.format.key)},
                            {"value_format", name_of(row.format.value)},
                            {"bytes_per_token", row.bytes_per_token},
                            {"cache_bytes", row.cache_bytes},
                            {"step_bytes", row.cache_bytes + model.weight_bytes},
                            {"flops_per_byte_per_gqa_ratio", row.flops_per_byte_and_ratio}};
    if (row.dequantise_first > 0) entry["step_bytes_if_made_f16_first"] = row.dequantise_first;
    if (row.share) entry["cache_share_of_step"] = *row.share;
    if (row.tokens_per_second) entry["tokens_per_second_at_most"] = *row.tokens_per_second;
    if (row.fits && *row.fits < kMostTokens) entry["longest_context"] = *row.fits;
    if (row.fits && *row.fits >= kMostTokens) entry["longest_context"] = nullptr;
    if (row.flops_per_byte) entry["flops_per_byte"] = *row.flops_per_byte;
    report["formats"].push_back(entry);
  }
  return report;
}

int plan(PlanArguments a) {
  const ModelShape model = shape_of(a);
  const std::vector<Row> rows = plan_rows(model, a);
  if (a.json) {
    std::printf(
        "%s\n",
        json_report(model, a, rows).dump(2, ' ', false, nlohmann::json::error_handler_t::replace).c_str());
  } else {
    print_report(model, a, rows);
  }
  return 0;
}

void add_positive(CLI::App& app, const std::string& flag, std::optional<double>& target,
                  const std::string& description) {
  app.add_option_function<std::string>(
         flag,
         [&target, flag](const std::string& text) {
           target = parse_number(flag, text);
           require(std::isfinite(*target) && *target > 0, flag, "'" + text + "'", "a number above 0");
         },
         description)
      ->type_name("X");
}

}  // namespace

Command add_plan(CLI::App& root) {
  CLI::App* app = root.add_subcommand("plan", "memory and traffic of a KV cache, before anything is run");
  const auto a = std::make_shared<PlanArguments>();
  constexpr int64_t kMost = 1 << 20;
  app->add_option("model", a->model, "config.json of a Hugging Face model, or a GGUF file");
  add_integer(*app, "--layers", a->layers, 1, "without a file: layers that attend", kMost);
  add_integer(*app, "--kv-heads", a->kv_heads, 1, "KV heads of a layer", kMost);
  add_integer(*app, "--head-dim", a->head_dim, 1, "of keys", kMaxHeadDim);
  add_integer(*app, "--head-dim-v", a->head_dim_v, 1, "of values; the same without it", kMaxHeadDim);
  add_integer(*app, "--heads", a->heads, 1, "query heads of a layer", kMost);
  add_integer(*app, "--window", a->window, 1, "keys that a token sees, itself included", kMostTokens);
  add_integer(*app, "--context", a->context, 1, "tokens; the model's longest without it", kMostTokens);
  add_integer(*app, "--batch", a->batch, 1, "sequences at once", kMost);
  add_positive(*app, "--weights-gb", a->weights_gb, "weights that a step reads, in GB (1e9 bytes)");
  add_positive(*app, "--bandwidth-gbs", a->bandwidth_gbs, "of the memory, in GB/s");
  add_positive(*app, "--memory-gb", a->memory_gb, "memory for weights and caches, in GB");
  const std::vector<std::string> formats = {"f32", "f16", "bf16", "q8", "tbq4"};
  add_choice(*app, "--k-format", a->k_format, formats, "one more row: the format of keys");
  add_choice(*app, "--v-format", a->v_format, formats, "and of values");
  app->add_flag("--json", a->json, "report as JSON");
  return {app, [a] { return plan(*a); }};
}

}  // namespace attnspan::cli
