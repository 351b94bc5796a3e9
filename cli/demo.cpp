// attnspan demo: attention over what a real model attended to, on every backend of this machine.

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <memory>

#include "arguments.hpp"
#include "attnspan/kv_cache.hpp"
#include "commands.hpp"
#include "core/dtype.hpp"
#include "io/tensor_file.hpp"
#include "print.hpp"

namespace attnspan::cli {
namespace {

using io::TensorBuffer;

constexpr const char* kLayers[] = {"layer00_early", "layer14_middle", "layer29_late"};
constexpr double kSecondsPerRow = 0.1;  // a call is repeated for so long, and the fastest one is printed
constexpr KvFormat kCacheFormats[] = {KvFormat::f16, KvFormat::q8, KvFormat::tbq4};

std::string layer_file(const std::string& folder, const char* layer) {
  return folder + "/smollm2_" + layer + ".safetensors";
}

// One attention layer: its inputs, and the reference's results.
struct Layer {
  TensorBuffer query, key, value;
  TensorBuffer out, lse, dq, dk, dv;
  std::vector<KvCache> caches;  // in the order of kCacheFormats

  Layer(const std::string& folder, const char* name);
};

TensorBuffer like(const TensorBuffer& buffer) { return {buffer.dtype(), buffer.shape()}; }

ForwardArgs forward_args(const Layer& layer, const TensorBuffer& out, const TensorBuffer& lse) {
  ForwardArgs args;
  args.query = layer.query.view();
  args.key = layer.key.view();
  args.value = layer.value.view();
  args.out = out.view();
  args.lse = lse.view();
  args.options.causal = true;
  return args;
}

// The gradient of half the sum of out^2: dout = out.
BackwardArgs backward_args(const Layer& layer, const TensorBuffer& dq, const TensorBuffer& dk,
                           const TensorBuffer& dv) {
  BackwardArgs args;
  args.query = layer.query.view();
  args.key = layer.key.view();
  args.value = layer.value.view();
  args.out = args.dout = layer.out.view();
  args.lse = layer.lse.view();
  args.dq = dq.view();
  args.dk = dk.view();
  args.dv = dv.view();
  args.options.causal = true;
  return args;
}

Tensor last_row(const TensorBuffer& buffer) {
  Tensor row = buffer.view();
  row.byte_offset += (row.shape[1] - 1) * row.stride[1] * size_of(row.dtype);
  row.shape[1] = 1;
  return row;
}

Layer::Layer(const std::string& folder, const char* name) {
  const auto read = [&](const char* tensor) {
    return io::read_tensor(io::parse_address(layer_file(folder, name) + ":" + tensor));
  };
  query = read("query");
  key = read("key");
  value = read("value");
  out = like(query);
  lse = TensorBuffer(DType::f32, {query.shape()[0], query.shape()[2], query.shape()[1]});
  dq = like(query);
  dk = like(key);
  dv = like(value);
  const Execution reference{.backend = "reference"};
  forward(forward_args(*this, out, lse), reference);
  backward(backward_args(*this, dq, dk, dv), reference);
  for (const KvFormat format : kCacheFormats) {
    KvCacheConfig config;
    config.kv_heads = key.shape()[2];
    config.head_dim = key.shape()[3];
    config.key_format = config.value_format = format;
    caches.emplace_back(config).append(key.view(), value.view());
  }
}

// Length of the difference over the length of `expected`. Both [1, rows, heads, dim] over dense memory.
double relative_error(const Tensor& found, const Tensor& expected) {
  double error = 0, length = 0;
  const auto data = [](const Tensor& t) { return static_cast<const char*>(t.data) + t.byte_offset; };
  for (int64_t i = 0; i < expected.numel(); ++i) {
    const double x = load_f32(data(expected), i, expected.dtype);
    error += std::pow(load_f32(data(found), i, found.dtype) - x, 2);
    length += x * x;
  }
  return std::sqrt(error / length);
}

template <typename Call>
double fastest(Call call) {
  double best = 0, spent = 0;
  while (spent < kSecondsPerRow) {
    const auto start = std::chrono::steady_clock::now();
    call();
    const double taken = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    best = best == 0 ? taken : std::min(best, taken);
    spent += taken;
  }
  return best;
}

class Demo {
 public:
  Demo(std::string folder, int threads) : folder_(std::move(folder)), threads_(threads) {
    for (const char* name : kLayers) layers_.emplace_back(folder_, name);
  }

  void run() {
    Progress progress;
    for (const BackendInfo& info : list_backends()) {
      if (!info.available) continue;
      execution_.backend = info.name;
      execution_.threads = threads_;
      progress.show(info.name + " forward");
      forward_row();
      progress.show(info.name + " backward");
      backward_row();
      for (size_t format = 0; format < std::size(kCacheFormats); ++format) {
        progress.show(info.name + " decode " + name_of(kCacheFormats[format]));
        decode_row(format);
      }
    }
  }

  void print() const {
    const auto& q = layers_[0].query.shape();
    std::printf(
        "SmolLM2-135M reads %lld tokens of the Declaration of Independence: queries, keys and values of\n"
        "%zu of its attention layers (%lld query heads over %lld KV heads, head_dim %lld, f16, causal).\n\n",
        static_cast<long long>(q[1]), layers_.size(), static_cast<long long>(q[2]),
        static_cast<long long>(layers_[0].key.shape()[2]), static_cast<long long>(q[3]));
    table_.print();
    std::printf(
        "\ntime: all %zu layers, the fastest call; on a GPU it includes the copies to and from the device.\n"
        "error: length of the difference from the reference (double precision over the f16 tensors, rounded "
        "once)\n"
        "over the length of its result, worst layer. q8 and tbq4 keep 8 and 4 bits a value: the reference's "
        "own\n"
        "rows show what that loses here.\n"
        "never written: the scores that plain attention keeps in memory, rows x keys x heads in f16.\n",
        layers_.size());
    for (const BackendInfo& info : list_backends()) {
      if (!info.available)
        std::printf("not here: %s: %s\n", info.name.c_str(), one_line(info.description).c_str());
    }
  }

 private:
  // The library's answer for all layers, or a row with its reason. `call` runs a layer; `error` judges it.
  template <typename Call, typename Error>
  void row(const char* phase, const std::string& problem, double scores, Call call, Error error) {
    const std::string& backend = execution_.backend;
    try {
      const double seconds = fastest([&] {
        for (Layer& layer : layers_) call(layer);
      });
      double worst = 0;
      for (Layer& layer : layers_) {
        call(layer);
        worst = std::max(worst, error(layer));
      }
      char text[32];
      std::snprintf(text, sizeof text, "%.1e", worst);
      table_.add({backend, phase, problem, text_of_seconds(seconds), text,
                  backend == "reference" ? "" : text_of_bytes(scores)});
    } catch (const attnspan::Error& refused) {
      table_.add({backend, phase, problem, "refused", "", one_line(refused.detail())});
    }
  }

  double score_bytes(int64_t rows) const {
    const auto& q = layers_[0].query.shape();
    const auto keys = static_cast<double>(layers_[0].key.shape()[1]);
    return static_cast<double>(layers_.size()) * static_cast<double>(q[0] * rows * q[2]) * keys * 2;
  }
  std::string size_text(int64_t rows) const {
    return std::to_string(rows) + " x " + std::to_string(layers_[0].key.shape()[1]);
  }

  void forward_row() {
    const int64_t rows = layers_[0].query.shape()[1];
    const TensorBuffer out = like(layers_[0].query), lse = like(layers_[0].lse);
    row(
        "forward", size_text(rows), score_bytes(rows),
        [&](Layer& layer) { forward(forward_args(layer, out, lse), execution_); },
        [&](Layer& layer) { return relative_error(out.view(), layer.out.view()); });
  }

  void backward_row() {
    const int64_t rows = layers_[0].query.shape()[1];
    const TensorBuffer dq = like(layers_[0].dq), dk = like(layers_[0].dk), dv = like(layers_[0].dv);
    row(
        "backward", size_text(rows), 2 * score_bytes(rows),  // probabilities and their gradients
        [&](Layer& layer) { backward(backward_args(layer, dq, dk, dv), execution_); },
        [&](Layer& layer) {
          return std::max({relative_error(dq.view(), layer.dq.view()),
                           relative_error(dk.view(), layer.dk.view()),
                           relative_error(dv.view(), layer.dv.view())});
        });
  }

  // The newest token against a cache that holds the whole text.
  void decode_row(size_t format) {
    const auto& q = layers_[0].query.shape();
    const TensorBuffer out(DType::f16, {q[0], 1, q[2], q[3]});
    row(
        "decode", size_text(1) + ", cache " + name_of(kCacheFormats[format]), score_bytes(1),
        [&](Layer& layer) {
          decode(last_row(layer.query), layer.caches[format].view(), out.view(), {}, {}, execution_);
        },
        [&](Layer& layer) { return relative_error(out.view(), last_row(layer.out)); });
  }

  std::string folder_;
  int threads_;
  Execution execution_;
  std::vector<Layer> layers_;
  Table table_{"lllrrr", {"backend", "phase", "rows x keys", "time", "error", "never written"}};
};

// How the user can call this program from here.
std::string program() {
  std::error_code error;
  const auto self = std::filesystem::read_symlink("/proc/self/exe", error);
  if (error) return "attnspan";
  const std::string here = std::filesystem::relative(self, error).string();
  return error || here.starts_with("..") ? "attnspan" : here;
}

void print_next(const std::string& folder) {
  const std::string self = program(), file = layer_file(folder, kLayers[1]);
  std::printf(
      "\nNext:\n"
      "  %s run --causal --q %s:query \\\n      --k %s:key --v %s:value \\\n      --out out.npy --lse "
      "lse.npy\n"
      "  %s check --quick\n"
      "  %s plan --layers 16 --kv-heads 4 --head-dim 256 --context 262144\n",
      self.c_str(), file.c_str(), file.c_str(), file.c_str(), self.c_str(), self.c_str());
}

struct DemoArguments {
  std::string folder = "examples/data";
  int64_t threads = 0;
};

int run_demo(const DemoArguments& a) {
  if (!std::filesystem::is_directory(a.folder)) {
    throw Error(
        ErrorCode::io, "--data " + a.folder,
        "is no folder; expected the examples/data of attnspan's sources (run this there, or name it)");
  }
  Demo demo(a.folder, static_cast<int>(a.threads));
  demo.run();
  demo.print();
  print_next(a.folder);
  return 0;
}

}  // namespace

Command add_demo(CLI::App& root) {
  CLI::App* app =
      root.add_subcommand("demo", "what a real model attended to, on every backend of this machine");
  const auto a = std::make_shared<DemoArguments>();
  app->add_option("--data", a->folder, "folder of the example tensors (default examples/data)")
      ->type_name("FOLDER");
  add_integer(*app, "--threads", a->threads, 0, "CPU threads; 0 = all (default)", 4096);
  return {app, [a] { return run_demo(*a); }};
}

}  // namespace attnspan::cli
