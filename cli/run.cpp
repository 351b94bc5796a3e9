// attnspan run: attention over tensors in files.

#include <chrono>
#include <cstdio>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "attnspan/kv_cache.hpp"
#include "commands.hpp"
#include "core/problem.hpp"
#include "kv/format.hpp"
#include "print.hpp"
#include "run_arguments.hpp"

namespace attnspan::cli {
namespace {

using io::TensorBuffer;
using Shape = std::vector<int64_t>;

struct PhaseReport {
  const char* phase;
  Result result;
  double seconds;
};

class Run {
 public:
  explicit Run(RunArguments& arguments) : a_(arguments) {}

  int operator()();

 private:
  bool packed() const { return a_.cu_seqlens_q || a_.cu_seqlens_k; }
  bool bhsd() const { return a_.layout == "bhsd"; }

  void read_inputs();
  TensorBuffer read(const TensorFlag& flag) const;
  Tensor input(const TensorFlag& flag) const;  // not given: no tensor
  Tensor rows(const TensorBuffer& buffer) const;
  Tensor rows(const TensorFlag& flag) const;
  AttentionOptions options() const;

  void plan_outputs();
  Shape rows_shape(int64_t rows, int64_t heads, int64_t dim) const;
  Tensor make(const TensorFlag& flag, DType dtype, Shape shape);  // an output, or scratch for one
  ForwardArgs make_forward();
  void through_cache(ForwardArgs& args);
  BackwardArgs make_backward(const ForwardArgs& forward);

  template <typename Call>
  void phase(const char* name, Call call);
  // An error about an argument of the library as one about a flag and its file.
  [[noreturn]] void rethrow(const Error& error);

  void report() const;
  nlohmann::json json_report() const;
  void print_report() const;

  RunArguments& a_;
  std::map<std::string, TensorBuffer> buffers_;  // by the library's name
  io::OutputSet outputs_;
  std::optional<KvCache> cache_;
  std::vector<PhaseReport> phases_;
  ForwardArgs forward_;
};

TensorBuffer Run::read(const TensorFlag& flag) const {
  try {
    return io::read_tensor(*flag.address);
  } catch (const Error& error) {
    throw Error(error.code(), flag.text(), error.detail());
  }
}

void Run::read_inputs() {
  for (const TensorFlag* flag : a_.inputs()) {
    if (*flag) buffers_[flag->argument] = read(*flag);
  }
}

Tensor Run::input(const TensorFlag& flag) const {
  return flag ? buffers_.at(flag.argument).view() : Tensor{};
}

Tensor Run::rows(const TensorBuffer& buffer) const {
  return bhsd() && buffer.rank() == 4 ? transposed(buffer.view(), 1, 2) : buffer.view();
}

Tensor Run::rows(const TensorFlag& flag) const { return flag ? rows(buffers_.at(flag.argument)) : Tensor{}; }

// As NumPy broadcasts: missing leading dimensions are 1.
Tensor with_rank_4(Tensor tensor) {
  while (tensor && tensor.rank < kMaxRank) {
    for (int i = tensor.rank; i > 0; --i) {
      tensor.shape[i] = tensor.shape[i - 1];
      tensor.stride[i] = tensor.stride[i - 1];
    }
    tensor.shape[0] = 1;
    ++tensor.rank;
  }
  return tensor;
}

AttentionOptions Run::options() const {
  AttentionOptions options = a_.options;
  options.cu_seqlens_q = input(a_.cu_seqlens_q);
  options.cu_seqlens_k = input(a_.cu_seqlens_k);
  options.seqused_k = input(a_.seqused_k);
  options.key_start = input(a_.key_start);
  options.key_end = input(a_.key_end);
  options.bias = with_rank_4(input(a_.bias));
  options.alibi_slopes = input(a_.alibi);
  options.sinks = input(a_.sinks);
  return options;
}

// Before any work: an output that cannot be written is refused now.
void Run::plan_outputs() {
  const DType dtype = buffers_.at("query").dtype();
  for (const TensorFlag* flag : {&a_.out, &a_.dq, &a_.dk, &a_.dv, &a_.lse, &a_.probs, &a_.d_sinks}) {
    if (!*flag) continue;
    const bool f32 = flag == &a_.lse || flag == &a_.probs || flag == &a_.d_sinks;
    try {
      outputs_.add(*flag->address, f32 ? DType::f32 : dtype);
    } catch (const Error& error) {
      throw Error(error.code(), flag->text(), error.detail());
    }
  }
}

Shape Run::rows_shape(int64_t rows, int64_t heads, int64_t dim) const {
  if (packed()) return {rows, heads, dim};
  const int64_t batch = buffers_.at("query").shape()[0];
  return bhsd() ? Shape{batch, heads, rows, dim} : Shape{batch, rows, heads, dim};
}

Tensor Run::make(const TensorFlag& flag, DType dtype, Shape shape) {
  const TensorBuffer& buffer = buffers_[flag.argument] = TensorBuffer(dtype, std::move(shape));
  if (flag) outputs_.set(*flag.address, buffer);
  return buffer.view();
}

ForwardArgs Run::make_forward() {
  ForwardArgs args;
  args.query = rows(a_.query);
  args.key = rows(a_.key);
  args.value = rows(a_.value);
  args.options = options();
  const int rank = packed() ? 3 : 4;
  for (const auto& [tensor, name] :
       {std::pair{args.query, "query"}, {args.key, "key"}, {args.value, "value"}}) {
    if (tensor.rank != rank) {
      throw Error(ErrorCode::invalid_argument, name,
                  "found rank " + std::to_string(tensor.rank) + " " + tensor.shape_text() +
                      ", expected rank " + std::to_string(rank) +
                      (packed() ? " ([total, heads, dim], because cu-seqlens are given)"
                       : bhsd() ? " ([batch, heads, seqlen, dim])"
                                : " ([batch, seqlen, heads, dim])"));
    }
  }
  const int64_t seqlen_q = args.query.shape[rank - 3], heads = args.query.shape[rank - 2];
  const int64_t seqlen_k = args.key.shape[rank - 3], batch = packed() ? 1 : args.query.shape[0];
  const DType dtype = args.query.dtype;
  make(a_.out, dtype, rows_shape(seqlen_q, heads, args.value.shape[rank - 1]));
  args.out = rows(buffers_.at("out"));
  if (a_.lse || a_.backward()) {
    args.lse = make(a_.lse, DType::f32, packed() ? Shape{heads, seqlen_q} : Shape{batch, heads, seqlen_q});
  }
  if (a_.probs) args.probs = make(a_.probs, DType::f32, {batch, heads, seqlen_q, seqlen_k});
  return args;
}

// Puts keys and values into a cache, which takes their place. What a cache knows by itself are its lengths.
void Run::through_cache(ForwardArgs& args) {
  make_problem(args);  // wrong tensors are refused as those that they are
  KvCacheConfig config;
  config.kv_heads = args.key.shape[2];
  config.head_dim = args.key.shape[3];
  config.head_dim_v = args.value.shape[3];
  config.key_format = *parse_kv_format(a_.k_format.empty() ? a_.v_format : a_.k_format);
  config.value_format = *parse_kv_format(a_.v_format.empty() ? a_.k_format : a_.v_format);
  config.batch = args.key.shape[0];
  config.threads = static_cast<int>(a_.threads);
  KvCache& cache = cache_.emplace(config);
  cache.append(args.key, args.value);
  if (args.options.seqused_k) {
    const auto* lengths = static_cast<const int32_t*>(buffers_.at("seqused_k").data());
    for (int64_t b = 0; b < config.batch; ++b) cache.trim(b, lengths[b]);
    args.options.seqused_k = {};
  }
  args.key = args.value = {};
  args.cache = &cache.view();
}

BackwardArgs Run::make_backward(const ForwardArgs& forward) {
  BackwardArgs args;
  args.query = forward.query;
  args.key = forward.key;
  args.value = forward.value;
  args.out = forward.out;
  args.lse = forward.lse;
  args.dout = rows(a_.dout);
  args.dlse = input(a_.dlse);
  args.options = forward.options;
  const auto like = [&](const TensorFlag& flag, const char* name) {
    make(flag, forward.query.dtype, buffers_.at(name).shape());
    return rows(buffers_.at(flag.argument));
  };
  args.dq = like(a_.dq, "query");
  args.dk = like(a_.dk, "key");
  args.dv = like(a_.dv, "value");
  if (a_.d_sinks) args.d_sinks = make(a_.d_sinks, DType::f32, {forward.query.shape[packed() ? 1 : 2]});
  return args;
}

template <typename Call>
void Run::phase(const char* name, Call call) {
  Progress progress;
  progress.show(std::string(name) + " ...");
  const auto start = std::chrono::steady_clock::now();
  Result result = call();
  const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
  phases_.push_back({name, std::move(result), taken.count()});
}

void Run::rethrow(const Error& error) {
  const std::map<std::string, std::string> others = {
      {"window_left", "--window (left)"}, {"window_right", "--window (right)"},
      {"softmax_scale", "--scale"},       {"softcap", "--softcap"},
      {"diagonal", "--diagonal"},         {"backend", "--backend " + a_.backend}};
  std::string where = error.argument();
  std::string detail = error.detail();
  for (const TensorFlag* flag : a_.flags()) {
    if (where != flag->argument) continue;
    where = flag->text();
    if (bhsd() && detail.find('[') != std::string::npos)
      detail += "; shapes in the order [batch, seqlen, heads, dim]";
    throw Error(error.code(), where, detail);
  }
  if (const auto found = others.find(where); found != others.end()) where = found->second;
  throw Error(error.code(), where, detail);
}

int Run::operator()() {
  check_combinations(a_);
  read_inputs();
  try {
    plan_outputs();
    Execution execution;
    execution.backend = a_.backend;
    execution.threads = static_cast<int>(a_.threads);
    forward_ = make_forward();
    if (a_.cached()) through_cache(forward_);
    BackwardArgs backward_args;
    // Both phases are checked before the first one runs.
    make_problem(forward_);
    if (a_.backward()) make_problem(backward_args = make_backward(forward_));
    phase("forward", [&] { return forward(forward_, execution); });
    if (a_.backward()) phase("backward", [&] { return backward(backward_args, execution); });
  } catch (const Error& error) {
    rethrow(error);
  }
  outputs_.write();
  report();
  return 0;
}

nlohmann::json Run::json_report() const {
  const Problem p = make_problem(forward_);
  nlohmann::json report;
  report["problem"] = {{"dtype", name_of(p.dtype)}, {"batch", p.batch},
                       {"heads", p.heads},          {"kv_heads", p.kv_heads},
                       {"head_dim", p.head_dim},    {"head_dim_v", p.head_dim_v},
                       {"seqlen_q", p.seqlen_q},    {"seqlen_k", p.seqlen_k},
                       {"packed", p.packed()},      {"softmax_scale", p.softmax_scale}};
  if (cache_) {
    report["cache"] = {{"key_format", name_of(cache_->config().key_format)},
                       {"value_format", name_of(cache_->config().value_format)},
                       {"bytes_per_token", cache_->memory().bytes_per_token},
                       {"saturated_scales", cache_->saturated_scales()}};
  }
  report["phases"] = nlohmann::json::array();
  for (const PhaseReport& phase : phases_) {
    report["phases"].push_back({{"phase", phase.phase},
                                {"backend", phase.result.backend},
                                {"seconds", phase.seconds},
                                {"nonfinite_replaced", phase.result.nonfinite_replaced}});
  }
  report["outputs"] = nlohmann::json::array();
  for (const TensorFlag* flag : a_.outputs()) {
    if (!*flag) continue;
    const TensorBuffer& buffer = buffers_.at(flag->argument);
    nlohmann::json entry = {{"name", flag->argument},
                            {"file", flag->address->path},
                            {"dtype", name_of(buffer.dtype())},
                            {"shape", buffer.shape()}};
    if (!flag->address->tensor.empty()) entry["tensor"] = flag->address->tensor;
    report["outputs"].push_back(entry);
  }
  return report;
}

void Run::print_report() const {
  Table phases("llrr", {"phase", "backend", "time", a_.options.nan_guard ? "non-finite, now 0" : ""});
  for (const PhaseReport& phase : phases_) {
    phases.add({phase.phase, phase.result.backend, text_of_seconds(phase.seconds),
                a_.options.nan_guard ? std::to_string(phase.result.nonfinite_replaced) : ""});
  }
  phases.print();
  if (cache_) {
    std::printf("cache: K %s, V %s, %lld bytes per token, %lld saturated scales\n",
                name_of(cache_->config().key_format), name_of(cache_->config().value_format),
                static_cast<long long>(cache_->memory().bytes_per_token),
                static_cast<long long>(cache_->saturated_scales()));
  }
  std::printf("\n");
  Table written("llll", {"output", "dtype", "shape", "file"});
  for (const TensorFlag* flag : a_.outputs()) {
    if (!*flag) continue;
    const TensorBuffer& buffer = buffers_.at(flag->argument);
    const std::string file =
        flag->address->path + (flag->address->tensor.empty() ? "" : ":" + flag->address->tensor);
    written.add({flag->argument, name_of(buffer.dtype()), io::shape_text(buffer.shape()), one_line(file)});
  }
  written.print();
}

void Run::report() const {
  if (a_.json) {
    // Names of files need not be UTF-8; JSON is.
    std::printf("%s\n", json_report().dump(2, ' ', false, nlohmann::json::error_handler_t::replace).c_str());
  } else {
    print_report();
  }
}

}  // namespace

Command add_run(CLI::App& root) {
  CLI::App* app = root.add_subcommand("run", "attention over tensors in files, forward and backward");
  const auto arguments = std::make_shared<RunArguments>();
  declare(*app, *arguments);
  return {app, [arguments] { return Run(*arguments)(); }};
}

}  // namespace attnspan::cli
