// attnspan cache error: what each format does to the user's own tensors.

#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "arguments.hpp"
#include "cache.hpp"
#include "core/validation.hpp"
#include "kv/error_report.hpp"
#include "print.hpp"
#include "run_arguments.hpp"

namespace attnspan::cli {
namespace {

struct ErrorArguments {
  std::optional<io::TensorAddress> query, key, value;
  std::string layout = "bshd";
  std::string k_format, v_format;
  std::string encode = "quality";
  int64_t rows = 512, threads = 0;
  AttentionOptions options;
  bool json = false;
};

std::vector<ReportedFormat> formats_of(const ErrorArguments& a) {
  const EncodeMode mode = a.encode == "fast" ? EncodeMode::fast : EncodeMode::quality;
  if (!a.k_format.empty() || !a.v_format.empty()) {
    const std::string& k = a.k_format.empty() ? a.v_format : a.k_format;
    return {{format_named(k), format_named(a.v_format.empty() ? k : a.v_format), mode}};
  }
  return {{KvFormat::f16, KvFormat::f16},
          {KvFormat::bf16, KvFormat::bf16},
          {KvFormat::q8, KvFormat::q8},
          {KvFormat::q8, KvFormat::tbq4, mode},
          {KvFormat::tbq4, KvFormat::tbq4, mode}};
}

std::string scientific(double value) {
  char text[32];
  std::snprintf(text, sizeof text, value == 0 ? "0" : "%.2e", value);
  return text;
}

// One measure: a row per head, a column per format, all heads last.
void print_measure(const char* title, const std::vector<FormatError>& errors,
                   std::string (*cell)(const HeadError&)) {
  std::printf("%s\n", title);
  std::vector<std::string> head = {"head"};
  for (const FormatError& error : errors) head.push_back(error.format.name());
  Table table(std::string(head.size(), 'r'), head);
  for (size_t h = 0; h <= errors[0].heads.size(); ++h) {
    const bool all = h == errors[0].heads.size();
    std::vector<std::string> row = {all ? "all" : std::to_string(h)};
    for (const FormatError& error : errors) row.push_back(cell(all ? error.all : error.heads[h]));
    table.add(row);
  }
  table.print();
  std::printf("\n");
}

void print_report(const std::vector<FormatError>& errors) {
  print_measure("Keys: normalised MSE (of the KV head that each query head reads)", errors,
                [](const HeadError& e) { return scientific(e.key); });
  print_measure("Values: normalised MSE", errors, [](const HeadError& e) { return scientific(e.value); });
  print_measure("Attention output: normalised MSE", errors,
                [](const HeadError& e) { return scientific(e.output); });
  print_measure("Attention weights: the largest falls on the same key, % of query rows", errors,
                [](const HeadError& e) { return e.compared_rows == 0 ? "" : text_of(100 * e.same_top, 1); });
  print_measure("Attention weights: mean KL divergence, nats", errors,
                [](const HeadError& e) { return scientific(e.divergence); });
}

nlohmann::json json_of(const HeadError& e) {
  return {{"key_nmse", e.key},          {"value_nmse", e.value},         {"output_nmse", e.output},
          {"same_top_key", e.same_top}, {"kl_divergence", e.divergence}, {"compared_rows", e.compared_rows}};
}

nlohmann::json json_report(const std::vector<FormatError>& errors) {
  nlohmann::json report = nlohmann::json::array();
  for (const FormatError& error : errors) {
    nlohmann::json entry = {{"key_format", name_of(error.format.key)},
                            {"value_format", name_of(error.format.value)},
                            {"encode", error.format.mode == EncodeMode::fast ? "fast" : "quality"},
                            {"all", json_of(error.all)},
                            {"heads", nlohmann::json::array()}};
    for (const HeadError& head : error.heads) entry["heads"].push_back(json_of(head));
    report.push_back(entry);
  }
  return report;
}

int report(const ErrorArguments& a) {
  const io::TensorBuffer query = read_rows("--q", *a.query), key = read_rows("--k", *a.key),
                         value = read_rows("--v", *a.value);
  ErrorReportArgs args;
  args.query = as_bshd(query, a.layout);
  args.key = as_bshd(key, a.layout);
  args.value = as_bshd(value, a.layout);
  args.options = a.options;
  args.max_rows = a.rows;
  args.threads = static_cast<int>(a.threads);
  std::vector<FormatError> errors;
  try {
    Progress progress;
    progress.show("attending with every format ...");
    errors = report_errors(args, formats_of(a));
  } catch (const Error& error) {
    for (const auto& [name, flag, address] :
         {std::tuple{"query", "--q ", &a.query}, {"key", "--k ", &a.key}, {"value", "--v ", &a.value}}) {
      if (error.argument() == name) throw Error(error.code(), flag + text_of(**address), error.detail());
    }
    throw;
  }
  if (a.json) {
    std::printf("%s\n", json_report(errors).dump(2).c_str());
  } else {
    print_report(errors);
  }
  return 0;
}

}  // namespace

Command add_cache_error(CLI::App& cache) {
  CLI::App* app = cache.add_subcommand("error", "what each format does to given tensors, per head");
  const auto a = std::make_shared<ErrorArguments>();
  add_tensor(*app, "--q", a->query, "query [batch, seqlen_q, heads, head_dim]");
  add_tensor(*app, "--k", a->key, "key [batch, seqlen_k, kv_heads, head_dim]");
  add_tensor(*app, "--v", a->value, "value [batch, seqlen_k, kv_heads, head_dim_v]");
  for (const char* needed : {"--q", "--k", "--v"}) app->get_option(needed)->required();
  add_choice(*app, "--layout", a->layout, {"bshd", "bhsd"}, "of the tensors (default bshd)");
  declare_mask(*app, a->options);
  declare_scores(*app, a->options);
  add_choice(*app, "--k-format", a->k_format, kFormatNames, "only this format of keys (default: five pairs)");
  add_choice(*app, "--v-format", a->v_format, kFormatNames, "only this format of values");
  add_choice(*app, "--encode", a->encode, {"quality", "fast"},
             "how tbq4 chooses its codes (default quality)");
  add_integer(*app, "--rows", a->rows, 1, "query rows of a sequence to look at, evenly spread (default 512)");
  add_integer(*app, "--threads", a->threads, 0, "CPU threads; 0 = all (default)", 4096);
  app->add_flag("--json", a->json, "report as JSON");
  return {app, [a] { return report(*a); }};
}

}  // namespace attnspan::cli
