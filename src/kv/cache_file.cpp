// Reading saved caches: what a header may claim, and the checksums. Nothing in a file is trusted before it is
// compared with the file's own size.

#include "kv/cache_file.hpp"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>

#include "attnspan/error.hpp"
#include "core/parallel.hpp"
#include "kv/cache_state.hpp"
#include "kv/checksum.hpp"

namespace attnspan {
namespace {

static_assert(std::endian::native == std::endian::little, "saved caches are little-endian");

[[noreturn]] void refuse(const std::string& name, const std::string& what) {
  throw Error(ErrorCode::io, name, what);
}

std::string text(int64_t number) { return std::to_string(number); }

int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// What the first bytes are, for a message.
std::string printable(std::span<const std::byte> bytes) {
  std::string text = "'";
  for (size_t i = 0; i < std::min<size_t>(8, bytes.size()); ++i) {
    const auto c = static_cast<unsigned char>(bytes[i]);
    text += c >= 0x20 && c < 0x7f ? static_cast<char>(c) : '?';
  }
  return text + "'";
}

// Magic, version and size, in the order that gives the plainest message.
CacheFileHeader read_header(std::span<const std::byte> bytes, const std::string& name) {
  CacheFileHeader header{};
  constexpr size_t kMagic = sizeof(header.magic);
  if (bytes.size() < kMagic || std::memcmp(bytes.data(), kCacheFileMagic, kMagic) != 0) {
    refuse(name, "is no saved cache: found " + printable(bytes) + " at its start, expected '" +
                     std::string(kCacheFileMagic) + "'");
  }
  if (bytes.size() < sizeof(header)) {
    refuse(name,
           "is torn: found " + text(bytes.size()) + " bytes, expected at least " + text(sizeof(header)));
  }
  std::memcpy(&header, bytes.data(), sizeof(header));
  if (header.version != kCacheFileVersion) {
    refuse(name, "found version " + text(header.version) + " of the cache file, expected " +
                     text(kCacheFileVersion) +
                     (header.version > kCacheFileVersion ? " (a newer attnspan wrote it)" : ""));
  }
  if (header.file_bytes != bytes.size()) {
    refuse(name,
           std::string(header.file_bytes > bytes.size() ? "is torn" : "is longer than its header says") +
               ": found " + text(bytes.size()) + " bytes, expected " + std::to_string(header.file_bytes));
  }
  if (header.header_bytes < sizeof(header) || header.header_bytes > bytes.size()) {
    refuse(name, "found a header of " + std::to_string(header.header_bytes) + " bytes, expected " +
                     text(sizeof(header)) + " to " + text(bytes.size()));
  }
  if (header_checksum(bytes.first(header.header_bytes)) != header.header_checksum) {
    refuse(name, "its header is damaged: it does not have the checksum that it names");
  }
  return header;
}

KvCacheConfig read_config(const CacheFileHeader& header, const std::string& name) {
  KvCacheConfig config;
  config.kv_heads = header.kv_heads;
  config.head_dim = header.head_dim;
  config.head_dim_v = header.head_dim_v;
  config.key_format = static_cast<KvFormat>(header.key_format);
  config.value_format = static_cast<KvFormat>(header.value_format);
  config.value_is_key = header.value_is_key != 0;
  config.encode_mode = static_cast<EncodeMode>(header.encode_mode);
  config.page_size = header.page_size;
  config.batch = header.sequences;
  config.max_pages = header.max_pages;
  config.window = header.window;
  config.first_tokens = header.first_tokens;
  config.first_key_format = static_cast<KvFormat>(header.first_key_format);
  config.first_value_format = static_cast<KvFormat>(header.first_value_format);
  try {
    const KvCacheConfig checked = checked_config(config);
    if (header.head_dim_v == 0 || checked.first_tokens != header.first_tokens) {
      refuse(name, "its header has fields that no cache has");
    }
    return checked;
  } catch (const Error& error) {
    if (error.code() == ErrorCode::io) throw;
    refuse(name, "its header has " + error.argument() + ": " + error.detail());
  }
}

// Hands out the tables behind the fixed header; refuses before reading past header_bytes.
class TableReader {
 public:
  TableReader(std::span<const std::byte> header, const std::string& name)
      : header_(header), offset_(sizeof(CacheFileHeader)), name_(name) {}

  template <typename T>
  std::vector<T> take(int64_t count, const char* what) {
    const auto left = static_cast<int64_t>(header_.size()) - offset_;
    if (count < 0 || count > left / static_cast<int64_t>(sizeof(T))) {
      refuse(name_, "its header claims " + text(count) + " " + what + ", more than it has room for");
    }
    std::vector<T> values(static_cast<size_t>(count));
    if (count > 0) std::memcpy(values.data(), header_.data() + offset_, values.size() * sizeof(T));
    offset_ += count * static_cast<int64_t>(sizeof(T));
    offset_ = round_up(offset_, 8);
    return values;
  }

  void finish() const {
    if (offset_ != static_cast<int64_t>(header_.size())) {
      refuse(name_, "its header is " + text(header_.size()) + " bytes, expected " + text(offset_) +
                        " by its tables");
    }
  }

 private:
  std::span<const std::byte> header_;
  int64_t offset_;
  const std::string& name_;
};

// Where a sequence may lie: what KvCache itself could have written.
void check_sequence(const SavedSequence& s, const KvCacheConfig& c, int64_t index, const std::string& name) {
  const int64_t origin = c.first_tokens;
  const bool stored = s.length > s.first;
  const bool in_order = origin <= s.first && s.first <= s.length && s.length <= INT32_MAX &&
                        s.first % c.page_size == 0 && 0 <= s.first_length && s.first_length <= origin;
  const bool recycled_rightly =
      s.first == origin || (stored && c.window >= 0 && s.first <= s.length - c.window);
  const bool empty_if_released = s.live == 1 || (s.live == 0 && !stored && s.first_length == 0);
  if (!in_order || !recycled_rightly || !empty_if_released || (stored && s.first_length != origin)) {
    refuse(name, "its sequence " + text(index) + " has positions " + text(s.first) + " to " + text(s.length) +
                     " and " + text(s.first_length) + " first tokens, which no cache of this shape has");
  }
}

// Takes the page numbers of one sequence off the front of the table.
SequencePages take_pages(std::span<const int32_t>& table, int64_t first, int64_t length, SavedPool& pool,
                         const std::string& name) {
  const int64_t count = (length - first + pool.shape.page_size - 1) / pool.shape.page_size;
  if (count > static_cast<int64_t>(table.size())) refuse(name, "its page table is too short");
  SequencePages pages{first, length, {table.begin(), table.begin() + count}};
  table = table.subspan(static_cast<size_t>(count));
  for (const int32_t page : pages.pages) {
    if (page < 0 || page >= static_cast<int64_t>(pool.references.size())) {
      refuse(name, "found page " + text(page) + " in its table, expected 0 to " +
                       text(static_cast<int64_t>(pool.references.size()) - 1));
    }
    ++pool.references[page];
  }
  return pages;
}

// Puts the planes of a pool at `offset`; returns where they end.
int64_t place_planes(SavedPool& pool, int64_t offset, int64_t file_bytes, const std::string& name) {
  const auto pages = static_cast<int64_t>(pool.checksums.size());
  for (int plane = 0; plane < kPlanes; ++plane) {
    const int64_t bytes = plane_page_bytes(pool.shape, plane);
    offset = round_up(offset, kCacheFileAlignment);
    pool.plane_offsets[plane] = offset;
    if (bytes != 0 && pages > (file_bytes - offset) / bytes) {
      refuse(name, "found " + text(file_bytes) + " bytes, expected more for " + text(pages) + " pages");
    }
    offset += pages * bytes;
  }
  return offset;
}

uint64_t page_checksum(const SavedPool& pool, std::span<const std::byte> bytes, int64_t page) {
  Checksum checksum;
  for (int plane = 0; plane < kPlanes; ++plane) {
    const int64_t size = plane_page_bytes(pool.shape, plane);
    checksum.update(bytes.data() + pool.plane_offsets[plane] + page * size, size);
  }
  return checksum.value();
}

void verify_pool(const SavedPool& pool, std::span<const std::byte> bytes, const char* which,
                 const std::string& name, int threads) {
  const auto pages = static_cast<int64_t>(pool.checksums.size());
  std::atomic<int64_t> damaged{pages};
  parallel_for_each(threads, pages, [&](int64_t page) {
    if (page_checksum(pool, bytes, page) == pool.checksums[page]) return;
    int64_t lowest = damaged;
    while (page < lowest && !damaged.compare_exchange_weak(lowest, page)) {
    }
  });
  if (damaged < pages) {
    refuse(name, std::string(which) + text(damaged) + " of " + text(pages) +
                     " is damaged: it does not have the checksum that the header names");
  }
}

}  // namespace

uint64_t header_checksum(std::span<const std::byte> header) {
  constexpr int64_t kField = offsetof(CacheFileHeader, header_checksum);
  constexpr int64_t kBehind = kField + static_cast<int64_t>(sizeof(uint64_t));
  constexpr uint64_t kZero = 0;
  Checksum checksum;
  checksum.update(header.data(), kField);
  checksum.update(&kZero, sizeof(kZero));
  checksum.update(header.data() + kBehind, static_cast<int64_t>(header.size()) - kBehind);
  return checksum.value();
}

CacheFile parse_cache_file(std::span<const std::byte> bytes, const std::string& name) {
  const CacheFileHeader header = read_header(bytes, name);
  TableReader tables(bytes.first(header.header_bytes), name);
  const auto sequences = tables.take<SavedSequence>(header.sequences, "sequences");
  const auto numbers = tables.take<int32_t>(header.table_entries, "page numbers");
  CacheFile file;
  file.config = read_config(header, name);
  file.file_bytes = static_cast<int64_t>(bytes.size());
  file.saturated_scales = header.saturated_scales;
  file.rest_pool.shape = rest_shape(file.config);
  file.rest_pool.checksums = tables.take<uint64_t>(header.pages, "pages");
  file.rest_pool.references.assign(file.rest_pool.checksums.size(), 0);
  SavedPool first_pool{
      first_shape(file.config), tables.take<uint64_t>(header.first_pages, "first pages"), {}, {}};
  first_pool.references.assign(first_pool.checksums.size(), 0);
  tables.finish();

  std::span<const int32_t> table = numbers;
  for (size_t i = 0; i < sequences.size(); ++i) {
    const SavedSequence& s = sequences[i];
    check_sequence(s, file.config, static_cast<int64_t>(i), name);
    file.live.push_back(s.live == 1);
    file.rest.push_back(take_pages(table, s.first, s.length, file.rest_pool, name));
    file.first.push_back(take_pages(table, 0, s.first_length, first_pool, name));
  }
  if (!table.empty()) refuse(name, "its page table has " + text(table.size()) + " entries too many");

  int64_t end =
      place_planes(file.rest_pool, static_cast<int64_t>(header.header_bytes), file.file_bytes, name);
  end = place_planes(first_pool, end, file.file_bytes, name);
  if (end != file.file_bytes) {
    refuse(name, "found " + text(file.file_bytes) + " bytes, expected " + text(end) + " by its header");
  }
  if (file.config.first_tokens > 0) file.first_pool = std::move(first_pool);
  return file;
}

void verify_pages(const CacheFile& file, std::span<const std::byte> bytes, const std::string& name,
                  int threads) {
  verify_pool(file.rest_pool, bytes, "page ", name, threads);
  if (file.first_pool) verify_pool(*file.first_pool, bytes, "page of first tokens ", name, threads);
}

}  // namespace attnspan
