#include "core/parallel.hpp"

#include <tbb/global_control.h>
#include <tbb/info.h>
#include <tbb/parallel_for.h>
#include <tbb/task_arena.h>

#include <algorithm>
#include <atomic>
#include <optional>

#ifdef __SANITIZE_THREAD__
#include <sanitizer/tsan_interface.h>
#endif

namespace attnspan {
namespace {

// oneTBB orders a call before the work of its threads and that work before the call's return, but its library
// is not built for ThreadSanitizer, which then sees neither. These say it.
#ifdef __SANITIZE_THREAD__
char call_to_work, work_to_call;
void leave(char& edge) { __tsan_release(&edge); }
void enter(char& edge) { __tsan_acquire(&edge); }
#else
constexpr char call_to_work = 0, work_to_call = 0;
void leave(const char&) {}
void enter(const char&) {}
#endif

}  // namespace

int thread_count(int threads) { return threads > 0 ? threads : tbb::this_task_arena::max_concurrency(); }

void parallel_for_each(int threads, int64_t count, const std::function<void(int64_t)>& run) {
  const int workers = static_cast<int>(std::min<int64_t>(thread_count(threads), count));
  if (workers <= 1) {
    for (int64_t item = 0; item < count; ++item) run(item);
    return;
  }
  std::atomic<int64_t> next{0};
  const auto work = [&](int) {
    enter(call_to_work);
    for (int64_t item = next++; item < count; item = next++) run(item);
    leave(work_to_call);
  };
  std::optional<tbb::global_control> more;
  if (workers > tbb::info::default_concurrency()) {  // the caller asks for more threads than cores
    more.emplace(tbb::global_control::max_allowed_parallelism, static_cast<size_t>(workers));
  }
  tbb::task_arena arena(workers);
  leave(call_to_work);
  arena.execute([&] { tbb::parallel_for(0, workers, work, tbb::simple_partitioner()); });
  enter(work_to_call);
}

}  // namespace attnspan
