#include "run_arguments.hpp"

#include <limits>

#include "arguments.hpp"
#include "core/validation.hpp"

namespace attnspan::cli {
namespace {

constexpr int64_t kLowest = std::numeric_limits<int64_t>::min();
constexpr int64_t kHighest = std::numeric_limits<int64_t>::max();

Diagonal parse_diagonal(const std::string& text) {
  if (text == "bottom-right") return Diagonal::bottom_right();
  if (text == "top-left") return Diagonal::top_left();
  int64_t offset = 0;
  try {
    offset = parse_integer("--diagonal", text, kLowest, kHighest);
  } catch (const Error&) {
    refuse("--diagonal", "'" + text + "'", "bottom-right, top-left or an integer");
  }
  return Diagonal::at(offset);
}

void parse_window(const std::string& text, AttentionOptions& options) {
  const size_t comma = text.find(',');
  require(comma != std::string::npos, "--window", "'" + text + "'",
          "LEFT,RIGHT, each 0 or more, or -1 for unlimited");
  options.window_left = parse_integer("--window (left)", text.substr(0, comma), -1, kHighest);
  options.window_right = parse_integer("--window (right)", text.substr(comma + 1), -1, kHighest);
}

}  // namespace

void declare_mask(CLI::App& app, AttentionOptions& options) {
  app.add_flag("--causal", options.causal, "row i sees keys up to i + diagonal");
  app.add_option_function<std::string>(
         "--diagonal", [&options](const std::string& text) { options.diagonal = parse_diagonal(text); },
         "where row 0 sits on the key axis (default bottom-right: seqlen_k - seqlen_q)")
      ->type_name("bottom-right|top-left|N");
  app.add_option_function<std::string>(
         "--window", [&options](const std::string& text) { parse_window(text, options); },
         "keys from i + diagonal - L to i + diagonal + R, inclusive; -1 = unlimited")
      ->type_name("L,R");
}

void declare_scores(CLI::App& app, AttentionOptions& options) {
  app.add_option_function<std::string>(
         "--softcap",
         [&options](const std::string& text) {
           options.softcap = static_cast<float>(parse_number("--softcap", text));
         },
         "scores become C * tanh(score / C); 0 = off")
      ->type_name("C");
  app.add_option_function<std::string>(
         "--scale",
         [&options](const std::string& text) {
           options.softmax_scale = static_cast<float>(parse_number("--scale", text));
           require(options.softmax_scale != 0, "--scale", text, "another number than 0");
         },
         "softmax_scale (default 1 / sqrt(head_dim))")
      ->type_name("S");
}

std::string TensorFlag::text() const {
  std::string text = flag;
  if (!address) return text;
  text += " " + address->path;
  return address->tensor.empty() ? text : text + ":" + address->tensor;
}

std::vector<TensorFlag*> RunArguments::inputs() {
  return {&query,   &key,  &value, &cu_seqlens_q, &cu_seqlens_k, &seqused_k, &key_start,
          &key_end, &bias, &alibi, &sinks,        &dout,         &dlse};
}

std::vector<TensorFlag*> RunArguments::outputs() { return {&out, &lse, &probs, &dq, &dk, &dv, &d_sinks}; }

std::vector<TensorFlag*> RunArguments::flags() {
  std::vector<TensorFlag*> all = inputs();
  for (TensorFlag* flag : outputs()) all.push_back(flag);
  return all;
}

// The headings of --help.
static void group_flags(CLI::App& app) {
  const std::pair<const char*, std::vector<const char*>> groups[] = {
      {"Tensors", {"--q", "--k", "--v", "--out", "--lse", "--probs", "--layout"}},
      {"Which keys a row sees",
       {"--causal", "--diagonal", "--window", "--key-start", "--key-end", "--seqused-k", "--cu-seqlens-q",
        "--cu-seqlens-k"}},
      {"Scores", {"--scale", "--softcap", "--bias", "--alibi", "--sinks"}},
      {"Gradients", {"--dout", "--dlse", "--dq", "--dk", "--dv", "--d-sinks"}},
      {"Through a KV cache", {"--k-format", "--v-format"}},
  };
  for (const auto& [name, flags] : groups) {
    for (const char* flag : flags) app.get_option(flag)->group(name);
  }
}

void declare(CLI::App& app, RunArguments& a) {
  for (TensorFlag* flag : a.flags()) add_tensor(app, flag->flag, flag->address, flag->description);
  for (const char* needed : {"--q", "--k", "--v"}) app.get_option(needed)->required();
  add_choice(app, "--layout", a.layout, {"bshd", "bhsd"},
             "order of q, k, v, out, dout and gradients in their files (default bshd)");
  declare_mask(app, a.options);
  declare_scores(app, a.options);
  const std::vector<std::string> formats = {"f32", "f16", "bf16", "q8", "tbq4"};
  add_choice(app, "--k-format", a.k_format, formats,
             "go through a KV cache with keys in this format (default: none, or that of --v-format)");
  add_choice(app, "--v-format", a.v_format, formats,
             "and values in this one (default: none, or that of --k-format)");
  app.add_flag("--nan-guard", a.options.nan_guard,
               "replace non-finite values of out and gradients by 0, and count them");
  add_backend(app, a.backend, "default auto: ATTNSPAN_BACKEND, else the first that supports the problem");
  add_integer(app, "--threads", a.threads, 0, "CPU threads; 0 = all (default)", 4096);
  app.add_flag("--json", a.json, "report as JSON");
  group_flags(app);
}

void check_combinations(RunArguments& a) {
  bool writes = false;
  for (const TensorFlag* output : a.outputs()) writes = writes || *output;
  require(writes, "--out", "no output", "at least one of --out, --lse, --probs, --dq, --dk, --dv, --d-sinks");
  for (const TensorFlag* needs_dout : {&a.dlse, &a.dq, &a.dk, &a.dv, &a.d_sinks}) {
    require(!*needs_dout || a.backward(), needs_dout->text(), "no --dout", "one: gradients start from it");
  }
  require(!a.backward() || a.dq || a.dk || a.dv || a.d_sinks, a.dout.text(), "no gradient to write",
          "at least one of --dq, --dk, --dv, --d-sinks");
  require(!a.cached() || !a.backward(), a.k_format.empty() ? "--v-format" : "--k-format", "it beside --dout",
          "one of the two: gradients are those of exact keys and values");
  require(!a.cached() || !(a.cu_seqlens_q || a.cu_seqlens_k),
          a.k_format.empty() ? "--v-format" : "--k-format", "it beside cu-seqlens",
          "one of the two: a cache is made of [batch, seqlen, heads, dim]");
  require(!a.d_sinks || a.sinks, a.d_sinks.text(), "no --sinks", "one");
  require(a.layout == "bshd" || !(a.cu_seqlens_q || a.cu_seqlens_k), "--layout", a.layout,
          "none with cu-seqlens: packed tensors are [total, heads, dim]");
}

}  // namespace attnspan::cli
