// Device time of the WebGPU kernels by timestamp queries, one JSON line a measurement.
//   webgpu_bench forward|decode|backward [--only f32|f16|bf16|q8|tbq4] [--sweep] [--quick] [--repeats N]
// A measurement is the best of N submissions after a warm-up; a submission repeats its call until it lasts
// some milliseconds.
// --sweep tries every tile that the adapter's limits allow, not only the table's choice.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "attnspan/attention.hpp"
#include "core/dtype.hpp"
#include "core/problem.hpp"
#include "kv/format.hpp"
#include "webgpu/backend.hpp"

namespace attnspan::webgpu {
namespace {

constexpr double kWarmUpSeconds = 0.2;

struct Options {
  std::string what;
  std::string only;  // a dtype, or a format of the cache; empty: all
  bool sweep = false, quick = false;
  int repeats = 5;
};

class Bench {
 public:
  explicit Bench(GpuDevice& device, const Options& options)
      : device_(device), pipelines_(device), context_{device, pipelines_}, options_(options) {}
  ~Bench() {
    for (void* buffer : buffers_) device_.release(buffer);
  }

  ForcedTiles& forced() { return context_.forced; }
  const Options& options() const { return options_; }
  bool wants(const std::string& type) const { return options_.only.empty() || options_.only == type; }
  const Capabilities& capabilities() const { return device_.capabilities(); }

  // Random values of the dtype, on the device.
  void* random_buffer(int64_t elements, DType dtype) {
    std::vector<char> host(static_cast<size_t>(elements * size_of(dtype)));
    for (int64_t i = 0; i < elements; ++i) {
      seed_ = seed_ * 1664525U + 1013904223U;
      store_f32(host.data(), i, dtype, static_cast<float>(static_cast<int32_t>(seed_) * 0x1p-31));
    }
    void* buffer = empty_buffer(static_cast<int64_t>(host.size()));
    device_.upload(buffer, host.data(), host.size());
    return buffer;
  }
  // Random bytes below `limit`: codes, whose value does not matter for the time.
  void* random_bytes(int64_t bytes, uint32_t mask) {
    std::vector<uint32_t> host(static_cast<size_t>((bytes + 3) / 4));
    for (uint32_t& word : host) {
      seed_ = seed_ * 1664525U + 1013904223U;
      word = (seed_ ^ (seed_ >> 15)) & mask;
    }
    void* buffer = empty_buffer(bytes);
    device_.upload(buffer, host.data(), host.size() * 4);
    return buffer;
  }
  void* empty_buffer(int64_t bytes) {
    buffers_.push_back(device_.allocate(static_cast<size_t>(bytes)));
    return buffers_.back();
  }
  void* int_buffer(const std::vector<int32_t>& values) {
    void* buffer = empty_buffer(static_cast<int64_t>(values.size() * 4));
    device_.upload(buffer, values.data(), values.size() * 4);
    return buffer;
  }
  void free_buffers() {
    device_.wait_idle();
    for (void* buffer : buffers_) device_.release(buffer);
    buffers_.clear();
  }

  // Seconds of one call.
  double seconds(const std::function<void(Context&, Commands&)>& record) {
    const auto time = [&](int calls) {
      Commands commands(device_);
      commands.measure();
      for (int i = 0; i < calls; ++i) record(context_, commands);
      commands.submit();
      return commands.measured_seconds() / calls;
    };
    // Compiles, then keeps the device busy: one that was idle runs at a fifth of its clock for a tenth of a
    // second.
    time(1);
    const auto start = std::chrono::steady_clock::now();
    do {
      time(std::clamp(static_cast<int>(4e-3 / std::max(time(1), 1e-7)), 1, 32));
    } while (std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() <
             kWarmUpSeconds);
    const int calls = std::clamp(static_cast<int>(4e-3 / std::max(time(1), 1e-7)), 1, 32);
    double best = 1e30;
    for (int i = 0; i < options_.repeats; ++i) best = std::min(best, time(calls));
    return best;
  }

 private:
  GpuDevice& device_;
  Pipelines pipelines_;
  Context context_;
  Options options_;
  std::vector<void*> buffers_;
  uint32_t seed_ = 1;
};

struct Shape {
  int64_t heads, kv_heads, seqlen, dim;
  bool causal;
  DType dtype;
};

void print_forward(Bench& bench, const Shape& s, const char* tile, double seconds, double products,
                   const char* phase) {
  const double pairs = s.causal ? 0.5 * static_cast<double>(s.seqlen) * static_cast<double>(s.seqlen + 1)
                                : static_cast<double>(s.seqlen) * static_cast<double>(s.seqlen);
  const double flops = 4 * pairs * static_cast<double>(s.dim * s.heads) * products;
  std::printf(
      "{\"phase\": \"%s\", \"dtype\": \"%s\", \"heads\": %ld, \"kv_heads\": %ld, \"seqlen\": %ld, "
      "\"head_dim\": %ld, \"causal\": %s, \"tile\": \"%s\", \"ms\": %.4f, \"tflops\": %.2f}\n",
      phase, name_of(s.dtype), s.heads, s.kv_heads, s.seqlen, s.dim, s.causal ? "true" : "false", tile,
      1e3 * seconds, 1e-12 * flops / seconds);
  std::fflush(stdout);
  (void)bench;
}

ForwardArgs forward_args(Bench& bench, const Shape& s) {
  const auto tensor = [&](int64_t heads, bool random) {
    const int64_t n = s.seqlen * heads * s.dim;
    return bshd(random ? bench.random_buffer(n, s.dtype) : bench.empty_buffer(n * size_of(s.dtype)), s.dtype,
                1, s.seqlen, heads, s.dim, Device::webgpu);
  };
  ForwardArgs args;
  args.query = tensor(s.heads, true);
  args.key = tensor(s.kv_heads, true);
  args.value = tensor(s.kv_heads, true);
  args.out = tensor(s.heads, false);
  args.lse = contiguous(bench.empty_buffer(4 * s.heads * s.seqlen), DType::f32, {1, s.heads, s.seqlen},
                        Device::webgpu);
  args.options.causal = s.causal;
  return args;
}

void time_forward(Bench& bench, const Problem& problem, const Shape& s, const std::string& tile) {
  try {
    const double t =
        bench.seconds([&](Context& c, Commands& commands) { record_forward(c, commands, problem); });
    print_forward(bench, s, tile.c_str(), t, 1, "forward");
  } catch (const Error& error) {
    std::printf("{\"phase\": \"forward\", \"tile\": \"%s\", \"error\": \"%.200s\"}\n", tile.c_str(),
                error.what());
  }
}

std::string text(std::initializer_list<uint32_t> numbers) {
  std::string t;
  for (const uint32_t n : numbers) t += (t.empty() ? "" : "x") + std::to_string(n);
  return t;
}

// Tiles beside the table's own, for --sweep.
std::vector<ForwardTile> forward_candidates(int64_t dim) {
  std::vector<ForwardTile> tiles;
  for (const uint32_t side : {32U, 64U}) {
    for (const uint32_t columns : {1U, 2U, 4U}) {
      const ForwardTile tile{side, side, side / 8, side / 2 / columns, columns};
      if (tile.loads_in_fours() && tile.columns() <= dim) tiles.push_back(tile);
    }
  }
  return tiles;
}

void bench_forward(Bench& bench) {
  const Capabilities& c = bench.capabilities();
  std::vector<Shape> shapes;
  const int64_t n = bench.options().quick ? 512 : 4096;
  for (const DType dtype : {DType::f32, DType::f16}) {
    for (const int64_t dim : {64, 128}) {
      for (const bool causal : {true, false}) shapes.push_back({16, 16, n, dim, causal, dtype});
    }
  }
  shapes.push_back({32, 8, n, 128, true, DType::f16});
  shapes.push_back({16, 16, n, 128, true, DType::bf16});
  for (const Shape& s : shapes) {
    if (!bench.wants(name_of(s.dtype))) continue;
    const Problem problem = make_problem(forward_args(bench, s));
    time_forward(bench, problem, s, "table");
    if (bench.options().sweep && s.causal && s.heads == s.kv_heads) {
      if (s.dtype == DType::f32) {
        for (const ForwardTile& tile : forward_candidates(s.dim)) {
          if (tile.storage_bytes() > c.workgroup_storage || tile.threads() > c.workgroup_threads) continue;
          bench.forced().forward = &tile;
          time_forward(bench, problem, s,
                       text({tile.rows, tile.keys, tile.dim_quads, tile.value_keys, tile.column_vecs}));
        }
        bench.forced().forward = nullptr;
      }
      if (s.dtype == DType::f16 && c.matrix > 0) {
        bench.forced().no_matrix = true;
        time_forward(bench, problem, s, "core");
        bench.forced().no_matrix = false;
        for (const MatrixTile& tile : {MatrixTile{128, 1}, {128, 2}, {128, 4}, {128, 8}}) {
          const auto dim = static_cast<uint32_t>(s.dim);
          if (tile.storage_bytes(c.matrix, c.subgroup_min, dim, dim) > c.workgroup_storage ||
              tile.subgroups * c.subgroup_min > c.workgroup_threads)
            continue;
          bench.forced().matrix = &tile;
          time_forward(bench, problem, s, "matrix" + text({tile.subgroups}));
        }
        bench.forced().matrix = nullptr;
      }
    }
    bench.free_buffers();
  }
}

void bench_backward(Bench& bench) {
  for (const DType dtype : {DType::f32, DType::f16}) {
    if (!bench.wants(name_of(dtype))) continue;
    for (const int64_t dim : {64, 128}) {
      const Shape s{16, 16, bench.options().quick ? 256 : 4096, dim, true, dtype};
      const ForwardArgs forward = forward_args(bench, s);
      BackwardArgs args;
      args.query = forward.query, args.key = forward.key, args.value = forward.value;
      args.out = forward.out, args.lse = forward.lse, args.options = forward.options;
      args.dout = forward_args(bench, s).query;
      const ForwardArgs gradients = forward_args(bench, s);
      args.dq = gradients.out, args.dk = gradients.key, args.dv = gradients.value;
      const Problem first = make_problem(forward), problem = make_problem(args);
      bench.seconds([&](Context& c, Commands& commands) { record_forward(c, commands, first); });
      const double t =
          bench.seconds([&](Context& c, Commands& commands) { record_backward(c, commands, problem); });
      print_forward(bench, s, "table", t, 2.5, "backward");
      bench.free_buffers();
    }
  }
}

// A dense cache of one sequence with random codes.
KvRows cache_rows(Bench& bench, KvFormat format, int64_t tokens, int64_t kv_heads, int64_t dim) {
  const KvFormatOps& ops = ops_of(format);
  KvRows rows;
  rows.format = format;
  rows.dim = dim;
  rows.token_stride = ops.row_code_bytes(dim);
  rows.head_stride = tokens * rows.token_stride;  // planes [kv_head][token][row], as KvCache lays them
  rows.page_stride = kv_heads * rows.head_stride;
  // f32 and f16 codes: small exponents, no NaN
  const uint32_t mask = format == KvFormat::f32   ? 0xbfffffffU
                        : format == KvFormat::f16 ? 0xbbffbbffU
                                                  : 0xffffffffU;
  rows.codes = bench.random_bytes(rows.page_stride, mask & (format == KvFormat::f32 ? 0xbf8fffffU : ~0U));
  const int64_t scales = ops.row_scales(dim);
  if (scales > 0) {
    rows.scale_token_stride = scales;
    rows.scale_head_stride = tokens * scales;
    rows.scale_page_stride = kv_heads * rows.scale_head_stride;
    rows.scales = bench.random_bytes(2 * rows.scale_page_stride, 0x3bff3bffU);
  }
  return rows;
}

void bench_decode_shape(Bench& bench, KvFormat format, int64_t heads, int64_t kv_heads, int64_t tokens,
                        DType dtype) {
  constexpr int64_t kDim = 128;
  KvView cache;
  cache.device = Device::webgpu;
  cache.batch = cache.num_pages = 1;
  cache.kv_heads = kv_heads;
  cache.page_size = cache.max_seqlen = tokens;
  cache.key = cache_rows(bench, format, tokens, kv_heads, kDim);
  cache.value = cache_rows(bench, format, tokens, kv_heads, kDim);
  cache.seqlens =
      contiguous(bench.int_buffer({static_cast<int32_t>(tokens)}), DType::i32, {1}, Device::webgpu);
  ForwardArgs args;
  args.query = bshd(bench.random_buffer(heads * kDim, dtype), dtype, 1, 1, heads, kDim, Device::webgpu);
  args.out =
      bshd(bench.empty_buffer(heads * kDim * size_of(dtype)), dtype, 1, 1, heads, kDim, Device::webgpu);
  args.cache = &cache;
  args.options.causal = true;
  const Problem problem = make_problem(args);
  const KvFormatOps& ops = ops_of(format);
  const double bytes = 2.0 * static_cast<double>(tokens * kv_heads) *
                       static_cast<double>(ops.row_code_bytes(kDim) + 2 * ops.row_scales(kDim));
  const auto run = [&](const std::string& tile) {
    try {
      const double t =
          bench.seconds([&](Context& c, Commands& commands) { record_forward(c, commands, problem); });
      std::printf(
          "{\"phase\": \"decode\", \"format\": \"%s\", \"heads\": %ld, \"kv_heads\": %ld, \"tokens\": %ld, "
          "\"tile\": \"%s\", \"us\": %.2f, \"cache_gbs\": %.1f, \"values_per_ns\": %.1f}\n",
          ops.name, heads, kv_heads, tokens, tile.c_str(), 1e6 * t, 1e-9 * bytes / t,
          2e-9 * static_cast<double>(tokens * kv_heads * kDim) / t);
      std::fflush(stdout);
    } catch (const Error& error) {
      std::printf("{\"phase\": \"decode\", \"tile\": \"%s\", \"error\": \"%.200s\"}\n", tile.c_str(),
                  error.what());
    }
  };
  run("table");
  if (bench.options().sweep) {
    for (const DecodeTile& tile :
         {DecodeTile{128, 8, 8}, {128, 8, 4}, {128, 8, 2}, {256, 8, 2}, {64, 8, 8}}) {
      bench.forced().decode = &tile;
      for (const uint32_t busy : {512U, 1024U, 2048U}) {
        bench.forced().busy_workgroups = busy;
        run(text({tile.threads, tile.rows, tile.step_tiles}) + "@" + std::to_string(busy));
      }
    }
    bench.forced().decode = nullptr;
    bench.forced().busy_workgroups = 0;
  }
  bench.free_buffers();
}

void bench_decode(Bench& bench) {
  const int64_t tokens = bench.options().quick ? 4096 : 131072;
  for (const KvFormat format : {KvFormat::f32, KvFormat::f16, KvFormat::bf16, KvFormat::q8, KvFormat::tbq4}) {
    if (!bench.wants(ops_of(format).name)) continue;
    // about 256 MB in f16: 131072 tokens x 4 KV heads x 128 x 2
    const int64_t n = format == KvFormat::f32 ? tokens / 2 : tokens;
    bench_decode_shape(bench, format, 4, 4, n, DType::f32);
    bench_decode_shape(bench, format, 16, 4, n, DType::f32);
  }
}

int run(const Options& options) {
  std::string reason;
  const std::unique_ptr<GpuDevice> device = GpuDevice::open(reason);
  if (device == nullptr) {
    std::fprintf(stderr, "webgpu: %s\n", reason.c_str());
    return 2;
  }
  const Capabilities& c = device->capabilities();
  std::printf(
      "{\"adapter\": \"%s\", \"driver\": \"%s\", \"library\": \"%s\", \"workgroup_storage\": %u, "
      "\"threads\": %u, "
      "\"binding_bytes\": %lu, \"subgroups\": [%u, %u], \"matrix\": %u, \"f16\": %d, \"timestamps\": %d}\n",
      c.adapter.c_str(), c.driver.c_str(), device->api().library.c_str(), c.workgroup_storage,
      c.workgroup_threads, c.binding_bytes, c.subgroup_min, c.subgroup_max, c.matrix, c.f16, c.timestamps);
  std::fflush(stdout);
  if (!c.timestamps) {
    std::fprintf(stderr, "webgpu: this adapter has no timestamp queries\n");
    return 2;
  }
  Bench bench(*device, options);
  if (options.what == "forward") bench_forward(bench);
  if (options.what == "decode") bench_decode(bench);
  if (options.what == "backward") bench_backward(bench);
  return 0;
}

}  // namespace
}  // namespace attnspan::webgpu

int main(int argc, char** argv) {
  attnspan::webgpu::Options options;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--sweep") == 0) {
      options.sweep = true;
    } else if (std::strcmp(argv[i], "--quick") == 0) {
      options.quick = true;
    } else if (std::strcmp(argv[i], "--only") == 0 && i + 1 < argc) {
      options.only = argv[++i];
    } else if (std::strcmp(argv[i], "--repeats") == 0 && i + 1 < argc) {
      options.repeats = std::atoi(argv[++i]);
    } else {
      options.what = argv[i];
    }
  }
  if (options.what != "forward" && options.what != "decode" && options.what != "backward") {
    std::fprintf(stderr,
                 "usage: webgpu_bench forward|decode|backward [--only TYPE] [--sweep] [--quick] "
                 "[--repeats N]\n");
    return 2;
  }
  try {
    return attnspan::webgpu::run(options);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "webgpu_bench: %s\n", error.what());
    return 1;
  }
}
