// Saved KV caches. They are mapped, so the input becomes a file without a place on any disk.

#include <sys/mman.h>
#include <unistd.h>

#include <vector>

#include "attnspan/kv_cache.hpp"
#include "fuzz.hpp"

using namespace attnspan;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const int file = memfd_create("input", MFD_CLOEXEC);
  if (file < 0 || write(file, data, size) != static_cast<ssize_t>(size)) std::abort();
  fuzz::expect_result_or_error([&] {
    const KvCache cache = KvCache::load("/proc/self/fd/" + std::to_string(file), 1);
    // An accepted cache can be read to its last row.
    const KvCacheConfig& config = cache.config();
    std::vector<float> row(
        static_cast<size_t>(config.kv_heads * std::max(config.head_dim, config.head_dim_v)));
    for (int64_t sequence = 0; sequence < cache.batch(); ++sequence) {
      if (cache.seqlen(sequence) == 0) continue;
      cache.read_key(sequence, cache.seqlen(sequence) - 1, row.data());
      cache.read_value(sequence, cache.seqlen(sequence) - 1, row.data());
    }
  });
  close(file);
  return 0;
}
