#pragma once
// Work items over threads. Which thread runs an item never changes its result: each item owns what it writes.

#include <cstdint>
#include <functional>

namespace attnspan {

// Calls run(0) .. run(count - 1), started in that order (put the longest first), on `threads` threads (0:
// all).
void parallel_for_each(int threads, int64_t count, const std::function<void(int64_t)>& run);

// The number of threads that `threads` stands for.
int thread_count(int threads);

}  // namespace attnspan
