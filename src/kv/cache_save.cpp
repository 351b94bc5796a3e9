// KvCache::save and KvCache::load.

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/parallel.hpp"
#include "io/file.hpp"
#include "io/mapped_file.hpp"
#include "kv/cache_file.hpp"
#include "kv/cache_state.hpp"
#include "kv/checksum.hpp"

namespace attnspan {
namespace {

int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// One plane of one page, with zeros behind its filled rows.
void copy_plane(const PagePool& pool, int plane, int32_t page, int64_t filled, std::vector<std::byte>& to) {
  const int64_t row_bytes = plane_row_bytes(pool.shape(), plane);
  const int64_t head_bytes = row_bytes * pool.shape().page_size;
  to.assign(static_cast<size_t>(head_bytes * pool.shape().kv_heads), std::byte{0});
  for (int64_t head = 0; row_bytes > 0 && head < pool.shape().kv_heads; ++head) {
    std::memcpy(to.data() + head * head_bytes, pool.row(plane, page, head, 0),
                static_cast<size_t>(filled * row_bytes));
  }
}

std::vector<uint64_t> checksums(const PagePool& pool, const PageOrder& order, int threads) {
  std::vector<uint64_t> sums(order.pages.size());
  parallel_for_each(threads, static_cast<int64_t>(sums.size()), [&](int64_t i) {
    Checksum checksum;
    std::vector<std::byte> bytes;
    for (int plane = 0; plane < kPlanes; ++plane) {
      copy_plane(pool, plane, order.pages[i], order.filled[i], bytes);
      checksum.update(bytes.data(), static_cast<int64_t>(bytes.size()));
    }
    sums[i] = checksum.value();
  });
  return sums;
}

// Appends values to a header, padded to 8 bytes.
template <typename T>
void put(std::vector<std::byte>& header, const T* values, size_t count) {
  const auto* from = reinterpret_cast<const std::byte*>(values);
  header.insert(header.end(), from, from + count * sizeof(T));
  header.resize((header.size() + 7) / 8 * 8);
}

void put_pages(std::vector<int32_t>& table, const SequencePages& sequence, const PageOrder& order) {
  for (const int32_t page : sequence.pages) table.push_back(order.numbers[page]);
}

CacheFileHeader fixed_header(const KvCacheConfig& c, int64_t saturated) {
  CacheFileHeader header{};
  std::memcpy(header.magic, kCacheFileMagic, sizeof(header.magic));
  header.version = kCacheFileVersion;
  header.kv_heads = static_cast<int32_t>(c.kv_heads);
  header.head_dim = static_cast<int32_t>(c.head_dim);
  header.head_dim_v = static_cast<int32_t>(c.head_dim_v);
  header.page_size = static_cast<int32_t>(c.page_size);
  header.key_format = static_cast<int32_t>(c.key_format);
  header.value_format = static_cast<int32_t>(c.value_format);
  header.first_key_format = static_cast<int32_t>(c.first_key_format);
  header.first_value_format = static_cast<int32_t>(c.first_value_format);
  header.encode_mode = static_cast<int32_t>(c.encode_mode);
  header.value_is_key = c.value_is_key ? 1 : 0;
  header.window = c.window;
  header.first_tokens = c.first_tokens;
  header.max_pages = c.max_pages;
  header.saturated_scales = saturated;
  return header;
}

// Where a file is being written, and zeros up to the next plane.
struct PlaneWriter {
  io::OutputFile& file;
  int64_t offset = 0;

  void write(const void* from, int64_t bytes) {
    file.write(from, bytes);
    offset += bytes;
  }
  void align() {
    const std::vector<std::byte> zeros(static_cast<size_t>(round_up(offset, kCacheFileAlignment) - offset));
    write(zeros.data(), static_cast<int64_t>(zeros.size()));
  }
  void planes(const PagePool& pool, const PageOrder& order) {
    std::vector<std::byte> bytes;
    for (int plane = 0; plane < kPlanes; ++plane) {
      align();
      for (size_t i = 0; i < order.pages.size(); ++i) {
        copy_plane(pool, plane, order.pages[i], order.filled[i], bytes);
        write(bytes.data(), static_cast<int64_t>(bytes.size()));
      }
    }
  }
};

int64_t end_of_planes(int64_t offset, const PoolShape& shape, size_t pages) {
  for (int plane = 0; plane < kPlanes; ++plane) {
    offset =
        round_up(offset, kCacheFileAlignment) + static_cast<int64_t>(pages) * plane_page_bytes(shape, plane);
  }
  return offset;
}

}  // namespace

void KvCache::save(const std::string& path) const {
  const State& state = *state_;
  const PageOrder rest = order_pages(state.rest);
  const PageOrder first = state.first ? order_pages(*state.first) : PageOrder{};
  std::vector<SavedSequence> sequences;
  std::vector<int32_t> table;
  for (int64_t i = 0; i < batch(); ++i) {
    const SequencePages& pages = state.rest.sequence(i);
    sequences.push_back({state.live[i] ? 1 : 0, pages.first, pages.length, 0});
    put_pages(table, pages, rest);
    if (!state.first) continue;
    sequences.back().first_length = state.first->sequence(i).length;
    put_pages(table, state.first->sequence(i), first);
  }
  const std::vector<uint64_t> rest_sums = checksums(state.rest.pool(), rest, state.config.threads);
  std::vector<uint64_t> first_sums;
  if (state.first) first_sums = checksums(state.first->pool(), first, state.config.threads);

  CacheFileHeader fixed = fixed_header(state.config, state.saturated);
  fixed.sequences = static_cast<int64_t>(sequences.size());
  fixed.table_entries = static_cast<int64_t>(table.size());
  fixed.pages = static_cast<int64_t>(rest.pages.size());
  fixed.first_pages = static_cast<int64_t>(first.pages.size());
  std::vector<std::byte> header;
  put(header, &fixed, 1);
  put(header, sequences.data(), sequences.size());
  put(header, table.data(), table.size());
  put(header, rest_sums.data(), rest_sums.size());
  put(header, first_sums.data(), first_sums.size());
  fixed.header_bytes = header.size();
  const int64_t rest_end =
      end_of_planes(static_cast<int64_t>(header.size()), state.rest.pool().shape(), rest.pages.size());
  fixed.file_bytes = end_of_planes(rest_end, first_shape(state.config), first.pages.size());
  std::memcpy(header.data(), &fixed, sizeof(fixed));
  fixed.header_checksum = header_checksum(header);
  std::memcpy(header.data(), &fixed, sizeof(fixed));

  io::OutputFile file(path);
  PlaneWriter writer{file};
  writer.write(header.data(), static_cast<int64_t>(header.size()));
  writer.planes(state.rest.pool(), rest);
  if (state.first) {
    writer.planes(state.first->pool(), first);
  } else {
    writer.align();
  }
  file.flush();
  file.commit();
}

namespace {

PagePool mapped_pool(const SavedPool& saved, const io::MappedFile& file) {
  // An empty pool has no planes in the file, and a view needs addresses.
  if (saved.references.empty()) return PagePool(saved.shape);
  std::array<std::shared_ptr<std::byte>, kPlanes> planes;
  for (int plane = 0; plane < kPlanes; ++plane) {
    if (plane_page_bytes(saved.shape, plane) != 0) planes[plane] = file.at(saved.plane_offsets[plane]);
  }
  return PagePool(saved.shape, std::move(planes), saved.references);
}

PagedStore mapped_store(const SavedPool& pool, const io::MappedFile& file, int64_t origin,
                        std::vector<SequencePages> sequences) {
  PagedStore store(mapped_pool(pool, file), origin);
  store.pool().reserve(1);
  store.adopt(std::move(sequences));
  return store;
}

}  // namespace

KvCache KvCache::load(const std::string& path, int threads) {
  const io::MappedFile mapped(path);
  CacheFile file = parse_cache_file(mapped.bytes(), path);
  verify_pages(file, mapped.bytes(), path, threads);
  file.config.threads = threads;
  std::optional<PagedStore> first;
  if (file.first_pool) first.emplace(mapped_store(*file.first_pool, mapped, 0, std::move(file.first)));
  auto state = std::make_unique<State>(
      file.config, mapped_store(file.rest_pool, mapped, file.config.first_tokens, std::move(file.rest)),
      std::move(first));
  state->live = file.live;
  state->saturated = file.saturated_scales;
  return KvCache(std::move(state));
}

}  // namespace attnspan
