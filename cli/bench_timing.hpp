#pragma once
// Repeated timings, and memory to time on.

#include <cstddef>
#include <functional>

namespace attnspan::cli {

struct Timing {
  double median = 0, best = 0;  // seconds
  double spread = 0;            // (90th - 10th percentile) / median
  int repeats = 0;
};

// How long a measurement may take: at least min_repeats, then until `seconds` are over.
struct Effort {
  int min_repeats = 5;
  int max_repeats = 100;
  double seconds = 0.3;
};

// One call to warm up, then the timed ones. `before` runs untimed before each.
Timing measure(const Effort& effort, const std::function<void()>& call,
               const std::function<void()>& before = {});

// Zeroed memory in large pages where the system has them: with pages of 4 KiB a read of much memory waits for
// address translation. Aligned to 2 MiB.
class LargeMemory {
 public:
  explicit LargeMemory(size_t bytes);
  ~LargeMemory();
  LargeMemory(LargeMemory&& other) noexcept;
  LargeMemory& operator=(LargeMemory&&) = delete;

  void* data() const { return data_; }

 private:
  void* mapping_ = nullptr;
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace attnspan::cli
