#pragma once
// Saved caches (docs/cache-file.md): a header with every shape and table, then the planes of the pages, laid
// out as in memory so that a file can be mapped and used in place.

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "attnspan/kv_cache.hpp"
#include "kv/paged_store.hpp"

namespace attnspan {

inline constexpr char kCacheFileMagic[] = "ATTNSPKV";  // 8 bytes, without the terminator
inline constexpr uint32_t kCacheFileVersion = 1;
inline constexpr int64_t kCacheFileAlignment = 4096;  // of every plane

// The fixed part of the header: little-endian, no padding.
struct CacheFileHeader {
  char magic[8];
  uint32_t version;
  uint32_t reserved;      // 0
  uint64_t header_bytes;  // this and the tables
  uint64_t file_bytes;
  uint64_t header_checksum;  // XXH3-64 of header_bytes bytes with this field 0
  int32_t kv_heads, head_dim, head_dim_v, page_size;
  int32_t key_format, value_format, first_key_format, first_value_format;
  int32_t encode_mode, value_is_key;
  int64_t window, first_tokens, max_pages, saturated_scales;
  int64_t sequences;      // SavedSequence each
  int64_t table_entries;  // int32 page numbers: of every sequence behind its first tokens, then of its first
  int64_t pages, first_pages;  // in each pool: one 8-byte checksum each, behind the page numbers
};
static_assert(sizeof(CacheFileHeader) == 144);

struct SavedSequence {
  int64_t live;          // 0: released
  int64_t first;         // position where the stored pages begin
  int64_t length;        // positions [first, length) are in pages
  int64_t first_length;  // tokens within first_tokens
};

// A pool as it lies in the file.
struct SavedPool {
  PoolShape shape;
  std::vector<uint64_t> checksums;               // of each page: its planes in order
  std::vector<int32_t> references;               // of each page, by the tables
  std::array<int64_t, kPlanes> plane_offsets{};  // in the file
};

struct CacheFile {
  KvCacheConfig config;  // batch is the number of sequences
  int64_t saturated_scales = 0;
  int64_t file_bytes = 0;
  std::vector<bool> live;
  std::vector<SequencePages> rest, first;
  SavedPool rest_pool;
  std::optional<SavedPool> first_pool;
};

// `bytes` is the whole file; `name` stands in messages. Reads the header and the tables only. Throws
// Error(io).
CacheFile parse_cache_file(std::span<const std::byte> bytes, const std::string& name);
// Compares every page with its checksum. Throws Error(io) that names the first page that differs.
void verify_pages(const CacheFile& file, std::span<const std::byte> bytes, const std::string& name,
                  int threads);

uint64_t header_checksum(std::span<const std::byte> header);  // as stored in header_checksum

}  // namespace attnspan
