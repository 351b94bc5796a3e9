#include "bench_machine.hpp"

#include <dlfcn.h>

#include <atomic>
#include <chrono>
#include <ctime>
#include <fstream>
#include <functional>
#include <thread>
#include <vector>

#include "bench_commit.hpp"
#include "bench_kernels.hpp"
#include "core/parallel.hpp"

namespace attnspan::cli {
namespace {

// `work(thread)` on that many threads that start together.
void on_threads(int threads, const std::function<void(int)>& work) {
  std::atomic<int> waiting{threads};
  std::vector<std::thread> pool;
  const auto start = [&](int thread) {
    --waiting;
    while (waiting > 0) std::this_thread::yield();
    work(thread);
  };
  for (int thread = 1; thread < threads; ++thread) pool.emplace_back(start, thread);
  start(0);
  for (std::thread& thread : pool) thread.join();
}

double fma_gflops(int threads, const Effort& effort) {
  constexpr int64_t kSteps = 2'000'000;  // about 10 ms
  double operations = 0;
  const Timing timing = measure(effort, [&] {
    on_threads(threads, [&](int thread) {
      const double done = fma_loop(kSteps);
      if (thread == 0) operations = done * threads;
    });
  });
  return operations / timing.median / 1e9;
}

double read_gb_per_s(int threads, const Effort& effort, const LargeMemory& memory, size_t bytes) {
  const float* floats = static_cast<const float*>(memory.data());
  const size_t share = bytes / sizeof(float) / static_cast<size_t>(threads);
  volatile float sink = 0;
  const Timing timing = measure(effort, [&] {
    on_threads(threads, [&](int thread) {
      const float sum = read_loop(floats + static_cast<size_t>(thread) * share, share);
      if (thread == 0) sink = sum;
    });
  });
  (void)sink;
  return static_cast<double>(bytes) / timing.median / 1e9;
}

// OpenBLAS's sgemm, loaded by name so that nothing depends on it.
struct Blas {
  using Sgemm = void (*)(int, int, int, int, int, int, float, const float*, int, const float*, int, float,
                         float*, int);
  using SetThreads = void (*)(int);
  Sgemm sgemm = nullptr;
  SetThreads set_threads = nullptr;

  Blas() {
    void* library = nullptr;
    for (const char* name : {"libopenblas.so.0", "libopenblas.so"}) {
      if (library == nullptr) library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    }
    if (library == nullptr) return;
    sgemm = reinterpret_cast<Sgemm>(dlsym(library, "cblas_sgemm"));
    set_threads = reinterpret_cast<SetThreads>(dlsym(library, "openblas_set_num_threads"));
  }
  explicit operator bool() const { return sgemm != nullptr && set_threads != nullptr; }
};

double sgemm_gflops(const Blas& blas, int threads, const Effort& effort) {
  constexpr int kSize = 2048;
  constexpr size_t kFloats = size_t{kSize} * kSize;
  const LargeMemory memory(3 * kFloats * sizeof(float));
  float* a = static_cast<float*>(memory.data());
  for (size_t i = 0; i < 2 * kFloats; ++i) a[i] = static_cast<float>(i % 7) - 3.0F;
  blas.set_threads(threads);
  constexpr int kRowMajor = 101, kNoTranspose = 111;
  const Timing timing = measure(effort, [&] {
    blas.sgemm(kRowMajor, kNoTranspose, kNoTranspose, kSize, kSize, kSize, 1.0F, a, kSize, a + kFloats, kSize,
               0.0F, a + 2 * kFloats, kSize);
  });
  return 2.0 * kSize * kSize * kSize / timing.median / 1e9;
}

}  // namespace

Machine::Machine(const std::vector<int>& threads, const Effort& effort, size_t read_bytes) {
  const LargeMemory memory(read_bytes);
  std::fill_n(static_cast<char*>(memory.data()), read_bytes, char{0});
  const Blas blas;
  for (const int n : threads) {
    Ceilings& c = ceilings_[n];
    c.fma_gflops = fma_gflops(n, effort);
    c.read_gb_per_s = read_gb_per_s(n, effort, memory, read_bytes);
    if (blas) c.sgemm_gflops = sgemm_gflops(blas, n, effort);
  }
}

std::string cpu_name() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    const size_t colon = line.find(':');
    if (line.starts_with("model name") && colon != std::string::npos) return line.substr(colon + 2);
  }
  return "unknown";
}

std::string commit_name() { return ATTNSPAN_COMMIT; }

nlohmann::json Machine::to_json() const {
  const std::time_t time = std::chrono::system_clock::to_time_t(std::chrono::system_clock::now());
  char date[32];
  std::strftime(date, sizeof date, "%Y-%m-%dT%H:%M:%SZ", std::gmtime(&time));
  nlohmann::json json = {
      {"cpu", cpu_name()}, {"cores", thread_count(0)}, {"date", date}, {"commit", commit_name()}};
  for (const auto& [threads, c] : ceilings_) {
    nlohmann::json row = {
        {"threads", threads}, {"fma_gflops", c.fma_gflops}, {"read_gb_per_s", c.read_gb_per_s}};
    if (c.sgemm_gflops) row["sgemm_gflops"] = *c.sgemm_gflops;
    json["ceilings"].push_back(row);
  }
  return json;
}

}  // namespace attnspan::cli
