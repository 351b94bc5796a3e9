// The header and tables of a saved cache, behind their checksums: the input is a header whose magic, sizes
// and checksums are repaired, so that the search reaches what the numbers in the tables can do. A cache that
// is accepted is then used: read, appended to, forked, trimmed.

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "fuzz.hpp"
#include "kv/cache_file.hpp"
#include "kv/cache_state.hpp"
#include "kv/checksum.hpp"

using namespace attnspan;

namespace {

constexpr int64_t kMaxFile = 1 << 20;

int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// The length that the header's own numbers give; 0 if they give none within reason.
int64_t file_bytes_of(const CacheFileHeader& h, int64_t header_bytes) {
  KvCacheConfig config;
  config.kv_heads = h.kv_heads;
  config.head_dim = h.head_dim;
  config.head_dim_v = h.head_dim_v;
  config.page_size = h.page_size;
  config.key_format = static_cast<KvFormat>(h.key_format);
  config.value_format = static_cast<KvFormat>(h.value_format);
  config.first_key_format = static_cast<KvFormat>(h.first_key_format);
  config.first_value_format = static_cast<KvFormat>(h.first_value_format);
  config.value_is_key = h.value_is_key != 0;
  int64_t end = header_bytes;
  try {
    config = checked_config(config);
    for (const auto& [shape, pages] :
         {std::pair{rest_shape(config), h.pages}, {first_shape(config), h.first_pages}}) {
      for (int plane = 0; plane < kPlanes; ++plane) {
        const int64_t bytes = plane_page_bytes(shape, plane);
        // One page at least is reserved, so a large one is memory and no fault.
        if (pages < 0 || (bytes > 0 && std::max<int64_t>(1, pages) > kMaxFile / bytes)) return 0;
        end = round_up(end, kCacheFileAlignment) + pages * bytes;
      }
    }
  } catch (const Error&) {
    return 0;
  }
  return end <= kMaxFile ? end : 0;
}

void repair_header(std::vector<std::byte>& file, CacheFileHeader header) {
  std::memcpy(file.data(), &header, sizeof(header));
  header.header_checksum = header_checksum(std::span(file).first(header.header_bytes));
  std::memcpy(file.data(), &header, sizeof(header));
}

// Every page gets the checksum of the zeros that it consists of.
void repair_pages(std::vector<std::byte>& file, const CacheFileHeader& header, const CacheFile& parsed) {
  std::vector<uint64_t> sums;
  const auto add = [&](const SavedPool& pool) {
    const std::vector<std::byte> zeros(static_cast<size_t>(page_bytes(pool.shape)));
    Checksum checksum;
    checksum.update(zeros.data(), static_cast<int64_t>(zeros.size()));
    sums.insert(sums.end(), pool.checksums.size(), checksum.value());
  };
  add(parsed.rest_pool);
  if (parsed.first_pool) add(*parsed.first_pool);
  if (!sums.empty()) {
    std::memcpy(file.data() + header.header_bytes - sums.size() * 8, sums.data(), sums.size() * 8);
  }
  repair_header(file, header);
}

void use(KvCache cache) {
  const KvCacheConfig config = cache.config();
  std::vector<float> row(static_cast<size_t>(config.kv_heads * kMaxHeadDim), 1.0F);
  const Tensor key = contiguous(row.data(), DType::f32, {1, config.kv_heads, config.head_dim});
  const Tensor value = config.value_is_key
                           ? Tensor{}
                           : contiguous(row.data(), DType::f32, {1, config.kv_heads, config.head_dim_v});
  const int64_t batch = std::min<int64_t>(cache.batch(), 16);
  for (int64_t s = 0; s < batch; ++s) {
    fuzz::expect_result_or_error([&] {
      const int64_t child = cache.fork(s);
      cache.append(child, key, value);
      cache.read_key(s, cache.seqlen(s) - 1, row.data());
      cache.read_value(child, cache.seqlen(child) - 1, row.data());
      cache.trim(s, cache.seqlen(s) / 2);
      cache.append(s, key, value);
      cache.release(child);
    });
  }
  const KvCacheView view = cache.select(std::vector<int64_t>{});
  fuzz::check(view.view().batch == 0, "a view of no sequences");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  size = size / 8 * 8;
  if (size < sizeof(CacheFileHeader)) return 0;
  CacheFileHeader header;
  std::memcpy(&header, data, sizeof(header));
  std::memcpy(header.magic, kCacheFileMagic, sizeof(header.magic));
  header.version = kCacheFileVersion;
  header.header_bytes = size;
  const int64_t length = file_bytes_of(header, static_cast<int64_t>(size));
  header.file_bytes = length > 0 ? static_cast<uint64_t>(length) : size;
  std::vector<std::byte> file(header.file_bytes);
  std::memcpy(file.data(), data, size);
  repair_header(file, header);
  fuzz::expect_result_or_error([&] {
    const CacheFile parsed = parse_cache_file(file, "input");
    if (length == 0) return;
    repair_pages(file, header, parsed);
    const int memory = memfd_create("input", MFD_CLOEXEC);
    if (memory < 0 || write(memory, file.data(), file.size()) != static_cast<ssize_t>(file.size()))
      std::abort();
    const std::string path = "/proc/self/fd/" + std::to_string(memory);
    // A header that was accepted with right checksums makes a cache.
    KvCache cache = [&] {
      try {
        return KvCache::load(path, 1);
      } catch (...) {
        close(memory);
        throw;
      }
    }();
    close(memory);
    use(std::move(cache));
  });
  return 0;
}
