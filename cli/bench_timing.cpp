#include "bench_timing.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <new>
#include <utility>
#include <vector>

namespace attnspan::cli {
namespace {

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

constexpr size_t kLargePage = size_t{2} << 20;

}  // namespace

Timing measure(const Effort& effort, const std::function<void()>& call, const std::function<void()>& before) {
  std::vector<double> seconds;
  if (before) before();
  call();
  const double start = now();
  while (static_cast<int>(seconds.size()) < effort.max_repeats &&
         (static_cast<int>(seconds.size()) < effort.min_repeats || now() - start < effort.seconds)) {
    if (before) before();
    const double begin = now();
    call();
    seconds.push_back(now() - begin);
  }
  std::sort(seconds.begin(), seconds.end());
  const auto quantile = [&](double q) {
    return seconds[static_cast<size_t>(q * static_cast<double>(seconds.size() - 1) + 0.5)];
  };
  Timing timing;
  timing.median = quantile(0.5);
  timing.best = seconds.front();
  timing.spread = timing.median > 0 ? (quantile(0.9) - quantile(0.1)) / timing.median : 0;
  timing.repeats = static_cast<int>(seconds.size());
  return timing;
}

LargeMemory::LargeMemory(size_t bytes) : bytes_(bytes + kLargePage) {
  mapping_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping_ == MAP_FAILED) {
    mapping_ = nullptr;
    throw std::bad_alloc();
  }
#ifdef MADV_HUGEPAGE
  madvise(mapping_, bytes_, MADV_HUGEPAGE);
#endif
  const auto address = reinterpret_cast<uintptr_t>(mapping_);
  data_ = reinterpret_cast<void*>((address + kLargePage - 1) / kLargePage * kLargePage);
}

LargeMemory::~LargeMemory() {
  if (mapping_ != nullptr) munmap(mapping_, bytes_);
}

LargeMemory::LargeMemory(LargeMemory&& other) noexcept
    : mapping_(std::exchange(other.mapping_, nullptr)), data_(other.data_), bytes_(other.bytes_) {}

}  // namespace attnspan::cli
