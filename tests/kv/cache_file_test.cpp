// Saved caches: the same cache comes back; anything else is refused by name; a killed save harms nothing.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <thread>

#include "attnspan/error.hpp"
#include "kv/cache_file.hpp"
#include "saved_versions.hpp"
#include "temp_folder.hpp"

namespace attnspan {
namespace {

using io::TempFolder;
using kv_test::append;
using kv_test::Random;
using kv_test::random_tokens;
using kv_test::stored_bytes;

std::vector<char> bytes_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void write_bytes(const std::string& path, const std::vector<char>& bytes) {
  std::ofstream(path, std::ios::binary).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

// A cache with everything that a file has to keep: first tokens, a window, a fork, a released sequence.
KvCache rich_cache() {
  Random random(1);
  KvCache cache({.kv_heads = 2,
                 .head_dim = 64,
                 .head_dim_v = 40,
                 .key_format = KvFormat::q8,
                 .value_format = KvFormat::tbq4,
                 .encode_mode = EncodeMode::fast,
                 .page_size = 16,
                 .batch = 3,
                 .max_pages = 1000,
                 .window = 40,
                 .first_tokens = 16,
                 .first_key_format = KvFormat::f32,
                 .first_value_format = KvFormat::bf16});
  for (int64_t t = 0; t < 150; ++t) append(cache, 0, random_tokens(random, cache.config(), 1));
  append(cache, 1, random_tokens(random, cache.config(), 9));
  append(cache, 2, random_tokens(random, cache.config(), 30));
  const int64_t child = cache.fork(0);
  append(cache, child, random_tokens(random, cache.config(), 3));
  cache.release(2);
  return cache;
}

void expect_equal(const KvCache& a, const KvCache& b) {
  ASSERT_EQ(a.batch(), b.batch());
  EXPECT_EQ(a.saturated_scales(), b.saturated_scales());
  EXPECT_EQ(a.memory().pages_used, b.memory().pages_used);
  EXPECT_EQ(a.memory().pages_shared, b.memory().pages_shared);
  for (int64_t s = 0; s < a.batch(); ++s) {
    bool released = false;
    try {
      a.seqlen(s);
    } catch (const Error&) {
      released = true;
    }
    if (released) {
      EXPECT_THROW(b.seqlen(s), Error);
      continue;
    }
    EXPECT_EQ(a.seqlen(s), b.seqlen(s));
    EXPECT_EQ(a.first_position(s), b.first_position(s));
    EXPECT_EQ(stored_bytes(a, s), stored_bytes(b, s));
  }
}

std::string error_of(const std::string& path) {
  try {
    KvCache::load(path);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::io);
    EXPECT_EQ(error.argument(), path);
    return error.detail();
  }
  return "no error";
}

TEST(CacheFile, TheSameCacheComesBackAndGoesOn) {
  const TempFolder folder;
  const std::string path = folder.file("cache.kv");
  KvCache cache = rich_cache();
  cache.save(path);
  KvCache loaded = KvCache::load(path);
  expect_equal(cache, loaded);
  const KvCacheConfig& config = loaded.config();
  EXPECT_EQ(config.encode_mode, EncodeMode::fast);
  EXPECT_EQ(config.max_pages, 1000);
  EXPECT_EQ(config.window, 40);
  EXPECT_EQ(config.first_key_format, KvFormat::f32);

  // Both go on as one; the file does not.
  const std::vector<char> file = bytes_of(path);
  Random random(2);
  const auto tokens = random_tokens(random, config, 60);
  for (KvCache* c : {&cache, &loaded}) {
    append(*c, 0, tokens);
    c->trim(1, 4);
    append(*c, 1, tokens);
    append(*c, c->fork(1), tokens);
  }
  expect_equal(cache, loaded);
  EXPECT_EQ(bytes_of(path), file);
  // Saving over the file that is mapped is fine: the mapping keeps the old one.
  loaded.save(path);
  expect_equal(KvCache::load(path), loaded);
  expect_equal(cache, loaded);
}

TEST(CacheConversion, ChangesFormatsAndKeepsTheRest) {
  const KvCache cache = rich_cache();
  const KvCache same = cache.converted({.encode_mode = EncodeMode::fast});
  expect_equal(cache, same);
  const KvCache other = cache.converted({.key = KvFormat::f32, .first_value = KvFormat::q8});
  EXPECT_EQ(other.memory().pages_shared, cache.memory().pages_shared);
  EXPECT_EQ(other.config().key_format, KvFormat::f32);
  EXPECT_EQ(other.config().value_format, KvFormat::tbq4);
  for (const int64_t s : {0, 1, 3}) {
    ASSERT_EQ(other.seqlen(s), cache.seqlen(s));
    for (int64_t p = 0; p < cache.seqlen(s); ++p) {
      const bool first = p < 16;
      if (!first && p < cache.first_position(s)) continue;
      EXPECT_EQ(kv_test::cached_row(other, s, p, KvSide::key), kv_test::cached_row(cache, s, p, KvSide::key));
      const std::vector<float> before = kv_test::cached_row(cache, s, p, KvSide::value);
      const std::vector<float> after = kv_test::cached_row(other, s, p, KvSide::value);
      for (size_t i = 0; i < before.size(); ++i) ASSERT_NEAR(after[i], before[i], first ? 0.03 : 0) << p;
    }
  }
  KvCache mla({.kv_heads = 1, .head_dim = 64, .head_dim_v = 32, .value_is_key = true});
  EXPECT_THROW(mla.converted({.value = KvFormat::q8}), Error);
  EXPECT_EQ(mla.converted({.key = KvFormat::q8}).config().value_format, KvFormat::q8);
}

TEST(CacheFile, EqualCachesGiveEqualFiles) {
  // Whatever happened to them before, and however their pools have grown.
  const TempFolder folder;
  Random random(3);
  const KvCacheConfig config{.kv_heads = 2, .head_dim = 33, .key_format = KvFormat::tbq4, .page_size = 16};
  const auto tokens = random_tokens(random, config, 70);
  KvCache straight(config), wandering(config);
  append(straight, 0, tokens, 0, 50);
  append(wandering, 0, tokens);
  wandering.trim(0, 20);
  append(wandering, 0, tokens, 20, 45);
  wandering.trim(0, 50);
  straight.save(folder.file("a"));
  wandering.save(folder.file("b"));
  EXPECT_EQ(bytes_of(folder.file("a")), bytes_of(folder.file("b")));
}

TEST(CacheFile, EmptyCachesAreCachesToo) {
  const TempFolder folder;
  for (const int64_t batch : {0, 2}) {
    for (const int64_t first : {0, 16}) {
      KvCache cache({.head_dim = 8, .page_size = 16, .batch = batch, .first_tokens = first});
      cache.save(folder.file("empty"));
      KvCache loaded = KvCache::load(folder.file("empty"));
      expect_equal(cache, loaded);
      if (batch == 0) continue;
      Random random(4);
      append(loaded, 1, random_tokens(random, loaded.config(), 40));
      EXPECT_EQ(loaded.seqlen(1), 40);
    }
  }
}

TEST(CacheFile, TornForeignAndNewerFilesAreRefusedByName) {
  const TempFolder folder;
  const std::string path = folder.file("cache.kv");
  rich_cache().save(path);
  const std::vector<char> good = bytes_of(path);
  const auto size = std::to_string(good.size());

  EXPECT_TRUE(error_of(folder.file("nowhere")).starts_with("cannot be read: No such file"));
  EXPECT_TRUE(error_of(folder.file("")).starts_with("is no regular file"));
  write_bytes(path, {});
  EXPECT_EQ(error_of(path), "is no saved cache: found '' at its start, expected 'ATTNSPKV'");
  write_bytes(path, {'\x93', 'N', 'U', 'M', 'P', 'Y', '\x01', '\0', 'v'});
  EXPECT_EQ(error_of(path), "is no saved cache: found '?NUMPY?\?' at its start, expected 'ATTNSPKV'");
  for (const size_t length : {size_t{8}, size_t{100}, size_t{143}}) {
    write_bytes(path, {good.begin(), good.begin() + length});
    EXPECT_EQ(error_of(path), "is torn: found " + std::to_string(length) + " bytes, expected at least 144");
  }
  for (const size_t length : {size_t{144}, size_t{4096}, good.size() - 1}) {
    write_bytes(path, {good.begin(), good.begin() + length});
    EXPECT_EQ(error_of(path), "is torn: found " + std::to_string(length) + " bytes, expected " + size);
  }
  std::vector<char> bytes = good;
  bytes.push_back(0);
  write_bytes(path, bytes);
  EXPECT_EQ(error_of(path), "is longer than its header says: found " + std::to_string(bytes.size()) +
                                " bytes, expected " + size);
  bytes = good;
  bytes[offsetof(CacheFileHeader, version)] = 2;
  write_bytes(path, bytes);
  EXPECT_EQ(error_of(path), "found version 2 of the cache file, expected 1 (a newer attnspan wrote it)");
}

TEST(CacheFile, EveryFlippedBitIsNoticed) {
  const TempFolder folder;
  const std::string path = folder.file("cache.kv");
  rich_cache().save(path);
  const std::vector<char> good = bytes_of(path);
  const CacheFile parsed = parse_cache_file(std::as_bytes(std::span(good)), path);
  // Every byte of the header, and bytes all over the pages; zeros between planes belong to nothing.
  CacheFileHeader header;
  std::memcpy(&header, good.data(), sizeof(header));
  std::vector<size_t> places;
  for (size_t i = 0; i < header.header_bytes; ++i) places.push_back(i);
  for (const SavedPool* pool : {&parsed.rest_pool, &*parsed.first_pool}) {
    for (int plane = 0; plane < kPlanes; ++plane) {
      const int64_t bytes =
          plane_page_bytes(pool->shape, plane) * static_cast<int64_t>(pool->checksums.size());
      for (int64_t i = 0; i < bytes; i += 1 + bytes / 30) places.push_back(pool->plane_offsets[plane] + i);
    }
  }
  for (const size_t place : places) {
    std::vector<char> bytes = good;
    bytes[place] = static_cast<char>(bytes[place] ^ (1 << (place % 8)));
    write_bytes(path, bytes);
    ASSERT_NE(error_of(path), "no error") << "byte " << place;
  }
  std::vector<char> bytes = good;
  bytes[parsed.rest_pool.plane_offsets[0] + 2 * plane_page_bytes(parsed.rest_pool.shape, 0)] ^= 1;
  write_bytes(path, bytes);
  EXPECT_EQ(error_of(path), "page 2 of " + std::to_string(parsed.rest_pool.checksums.size()) +
                                " is damaged: it does not have the checksum that the header names");
}

// Changes a field and repairs the checksum of the header, as a wrong writer would leave it.
template <typename Change>
std::string error_after(const std::vector<char>& good, const std::string& path, Change change) {
  std::vector<char> bytes = good;
  CacheFileHeader header;
  std::memcpy(&header, bytes.data(), sizeof(header));
  change(header);
  std::memcpy(bytes.data(), &header, sizeof(header));
  if (header.header_bytes <= bytes.size() && header.header_bytes >= sizeof(header)) {
    header.header_checksum = header_checksum(std::as_bytes(std::span(bytes)).first(header.header_bytes));
  }
  std::memcpy(bytes.data(), &header, sizeof(header));
  write_bytes(path, bytes);
  return error_of(path);
}

TEST(CacheFile, HeadersThatContradictThemselvesAreRefused) {
  const TempFolder folder;
  const std::string path = folder.file("cache.kv");
  rich_cache().save(path);
  const std::vector<char> good = bytes_of(path);
  EXPECT_EQ(error_after(good, path, [](CacheFileHeader&) {}), "no error");
  const auto expect = [&](const char* start, const std::function<void(CacheFileHeader&)>& change) {
    const std::string error = error_after(good, path, change);
    EXPECT_TRUE(error.starts_with(start)) << error;
  };
  expect("its header has page_size: found 17", [](auto& h) { h.page_size = 17; });
  expect("its header has head_dim: found 577", [](auto& h) { h.head_dim = 577; });
  expect("its header has format: found 77", [](auto& h) { h.key_format = 77; });
  expect("its header has encode_mode: found 3", [](auto& h) { h.encode_mode = 3; });
  expect("its header has fields that no cache has", [](auto& h) { h.head_dim_v = 0; });
  expect("its header has fields that no cache has", [](auto& h) { h.first_tokens = 15; });
  expect("its header claims", [](auto& h) { h.sequences = int64_t{1} << 60; });
  expect("its header claims -1", [](auto& h) { h.table_entries = -1; });
  expect("its header claims", [](auto& h) { h.pages = INT64_MAX; });
  expect("its header is", [](auto& h) { h.pages -= 1; });
  expect("its header is", [](auto& h) { h.first_pages = 0; });
  expect("found a header of 8 bytes", [](auto& h) { h.header_bytes = 8; });
  expect("found ", [](auto& h) { h.kv_heads = 4; });  // more bytes than the file has
  expect("found ", [](auto& h) { h.kv_heads = 1; });
  expect("its sequence 0 has positions", [](auto& h) { h.window = -1; });
  expect("its sequence 0 has positions", [](auto& h) { h.window = 100000; });
}

TEST(CacheFile, ASaveThatFailsLeavesTheOldFile) {
  const TempFolder folder;
  const std::string path = folder.file("cache.kv");
  kv_test::version(0).save(path);
  const std::vector<char> before = bytes_of(path);
  EXPECT_THROW(kv_test::version(1).save(folder.file("no/such/folder/cache.kv")), Error);
  EXPECT_THROW(kv_test::version(1).save(folder.file("")), Error);
  EXPECT_EQ(bytes_of(path), before);
}

TEST(CacheFile, KilledAtAnyMomentTheOldFileOrTheNewOneIsWhole) {
  const TempFolder folder;
  const std::string path = folder.file("cache.kv");
  const std::vector<uint8_t> versions[2] = {stored_bytes(kv_test::version(0), 0),
                                            stored_bytes(kv_test::version(1), 0)};
  kv_test::version(0).save(path);
  Random random(5);
  int64_t seen[2] = {0, 0};
  int64_t killed_while_writing = 0;
  for (int round = 0; round < 100; ++round) {
    int ready[2];
    ASSERT_EQ(pipe(ready), 0);
    const pid_t child = fork();
    if (child == 0) {
      dup2(ready[1], STDOUT_FILENO);
      close(ready[0]);
      close(ready[1]);
      execl(ATTNSPAN_SAVE_FOREVER, ATTNSPAN_SAVE_FOREVER, path.c_str(), nullptr);
      _exit(127);
    }
    ASSERT_GT(child, 0);
    close(ready[1]);
    char byte = 0;
    ASSERT_EQ(read(ready[0], &byte, 1), 1) << "the child did not start";
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 12000));
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
    close(ready[0]);
    killed_while_writing += folder.names().size() > 1 ? 1 : 0;
    const KvCache loaded = KvCache::load(path);
    const std::vector<uint8_t> bytes = stored_bytes(loaded, 0);
    ASSERT_TRUE(bytes == versions[0] || bytes == versions[1]) << "round " << round;
    ++seen[bytes == versions[0] ? 0 : 1];
    for (const std::string& name : folder.names()) {
      if (folder.file(name) != path) std::filesystem::remove(folder.file(name));
    }
  }
  // The test has met what it is about: saves cut short, and both versions.
  EXPECT_GT(killed_while_writing, 10);
  EXPECT_GT(seen[0], 0);
  EXPECT_GT(seen[1], 0);
}

}  // namespace
}  // namespace attnspan
