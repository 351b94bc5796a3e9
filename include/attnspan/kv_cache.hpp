#pragma once
/// KvCache: keys and values of many sequences in pages, each side in a format of its own.
///
///   KvCache cache({.kv_heads = 8, .head_dim = 128, .key_format = KvFormat::q8, .value_format =
///   KvFormat::tbq4}); cache.append(0, key, value);          // [tokens, kv_heads, dim]: one token or a whole
///   prefill args.cache = &cache.view();           // or forward(cache, args) below
///
/// Position p of a sequence is the p-th token appended to it. A row has the same bytes whichever way it was
/// appended: alone, with others, before or after a fork. Not thread-safe: one thread at a time per cache
/// (append itself uses `threads` threads).

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "attnspan/attention.hpp"
#include "attnspan/kv_view.hpp"

namespace attnspan {

struct KvCacheConfig {
  int64_t kv_heads = 1;
  int64_t head_dim = 64;   ///< of keys, 1..576
  int64_t head_dim_v = 0;  ///< of values, 1..576; 0 = head_dim
  KvFormat key_format = KvFormat::f16;
  KvFormat value_format = KvFormat::f16;
  bool value_is_key = false;  ///< MLA: a value is the first head_dim_v of its key; only keys are appended
  EncodeMode encode_mode = EncodeMode::quality;  ///< of tbq4

  int64_t page_size = 64;      ///< tokens in a page: a power of two >= 16
  int64_t batch = 1;           ///< sequences at the start; all empty
  int64_t max_pages = 0;       ///< limit of the pool (first tokens have one of their own); 0 = grows without
  int64_t reserve_tokens = 0;  ///< memory for that many tokens, over all sequences, is taken at once

  /// Keys that the newest token sees, itself included; -1 = all. Pages that no row of the next append can see
  /// are recycled when that append begins. Attend with window_left = window - 1, as forward(cache, ...) does.
  int64_t window = -1;
  /// Tokens [0, first_tokens) of every sequence are stored in formats of their own and never recycled.
  /// Rounded up to whole pages. They form a span of their own: attend with forward(cache, ...) below.
  int64_t first_tokens = 0;
  KvFormat first_key_format = KvFormat::f16;
  KvFormat first_value_format = KvFormat::f16;

  int threads = 0;  ///< of append; 0 = all
};

/// Formats to convert to; those not given stay.
struct KvCacheFormats {
  std::optional<KvFormat> key = std::nullopt;
  std::optional<KvFormat> value = std::nullopt;
  std::optional<KvFormat> first_key = std::nullopt;  ///< of the first tokens
  std::optional<KvFormat> first_value = std::nullopt;
  EncodeMode encode_mode = EncodeMode::quality;  ///< of what is encoded again and appended later
};

/// Bytes and pages, over all sequences. A shared page counts once.
struct KvCacheMemory {
  int64_t bytes_per_token = 0;        ///< K and V of all heads, behind first_tokens
  int64_t first_bytes_per_token = 0;  ///< likewise, within first_tokens; 0 without them
  int64_t pages_used = 0;
  int64_t pages_shared = 0;    ///< used by more than one sequence
  int64_t pages_reserved = 0;  ///< that the pool has memory for
  int64_t bytes_used = 0;
  int64_t bytes_reserved = 0;
  int64_t tokens = 0;  ///< stored, counted once for every sequence that reads them
};

/// Views over chosen sequences of a cache, in the given order. They stay right until the cache changes.
class KvCacheView {
 public:
  KvCacheView(KvCacheView&&) = default;  // views point into the tables, which do not move
  KvCacheView& operator=(KvCacheView&&) = default;

  /// Positions from first_tokens on, which is everything in a cache without first tokens.
  const KvView& view() const { return rest_.view; }
  /// Positions [0, first_tokens); null in a cache without first tokens.
  const KvView* first_view() const { return first_ ? &first_->view : nullptr; }
  /// Tokens of one of the sequences, and the most that any has.
  int64_t seqlen(int64_t batch) const { return lengths_[static_cast<size_t>(batch)]; }
  int64_t max_seqlen() const { return max_length_; }
  /// KvCacheConfig::window
  int64_t window() const { return window_; }

 private:
  friend class KvCache;
  KvCacheView() = default;
  struct Part {
    KvView view;
    std::vector<int32_t> seqlens, first_position, block_table;
  };
  Part rest_;
  std::optional<Part> first_;
  std::vector<int64_t> lengths_;
  int64_t max_length_ = 0;
  int64_t window_ = -1;
};

class KvCache {
 public:
  /// Throws Error for a config that contradicts itself, naming the field.
  explicit KvCache(const KvCacheConfig& config);
  ~KvCache();
  KvCache(KvCache&&) noexcept;
  KvCache& operator=(KvCache&&) noexcept;

  const KvCacheConfig& config() const;  ///< with head_dim_v filled in and first_tokens rounded up
  int64_t batch() const;                ///< sequences, released ones included
  int64_t seqlen(int64_t sequence) const;
  /// The first position that is still stored behind first_tokens; a multiple of page_size. 0 without a
  /// window.
  int64_t first_position(int64_t sequence) const;

  /// Appends tokens. key `[tokens, kv_heads, head_dim]`, value `[tokens, kv_heads, head_dim_v]` in f32, f16
  /// or bf16, any strides, host memory; no value where value_is_key. Returns how many scales saturated. On an
  /// error nothing was appended.
  int64_t append(int64_t sequence, const Tensor& key, const Tensor& value);
  /// The same for every sequence: key `[batch, tokens, kv_heads, head_dim]`.
  int64_t append(const Tensor& key, const Tensor& value);
  /// Keeps the first `length` tokens. Refused where the window has recycled keys that those would see.
  void trim(int64_t sequence, int64_t length);

  /// A new empty sequence, and its index: a released one, or batch().
  int64_t add_sequence();
  /// A new sequence with the tokens of `source`, sharing its pages; whoever writes to a shared page gets a
  /// copy.
  int64_t fork(int64_t source);
  /// Gives the pages back. The index may be handed out again; until then the sequence is empty.
  void release(int64_t sequence);

  /// Views over the given sequences, or over all of them.
  KvCacheView select(std::span<const int64_t> sequences) const;
  KvCacheView select() const;
  /// The view over all sequences, valid until the cache changes. A cache with first tokens needs two:
  /// refused.
  const KvView& view() const;

  /// One decoded row of all heads: values `[kv_heads, dim]` of a stored position. For inspection and tests.
  void read_key(int64_t sequence, int64_t position, float* values) const;
  void read_value(int64_t sequence, int64_t position, float* values) const;

  /// The same tokens in other formats: rows of a format that changes are decoded and encoded again, the
  /// others keep their bytes. Shared pages stay shared. Keys and values have one format where value_is_key.
  KvCache converted(const KvCacheFormats& formats) const;

  KvCacheMemory memory() const;
  /// Scales beyond f16 that were stored as 65504, since the cache was made or loaded.
  int64_t saturated_scales() const;

  /// Writes the cache to a file (docs/cache-file.md), beside the old one and then over it: at any moment the
  /// name holds the old file or the new one, whole. Shared pages are written once.
  void save(const std::string& path) const;
  /// Maps a saved cache. Its pages are read in place; what is written goes to private memory, never to the
  /// file. Every page is checked. Throws Error(io) naming the file, what was found and what was expected.
  /// The file may be replaced while it is in use (as save does), but not changed in place.
  static KvCache load(const std::string& path, int threads = 0);

 private:
  struct State;
  explicit KvCache(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

/// Attention over a cache, first tokens included: their span and the rest are two states, merged in f32.
/// args.key, value and cache are not given; everything else is as in forward(args): key positions count from
/// the start of the sequence. probs is refused where the cache has first tokens. In window mode window_left
/// is window - 1 where it was not given, may not be larger, and does not reach the first tokens: they stay
/// visible to every row.
Result forward(const KvCache& cache, const ForwardArgs& args, const Execution& execution = {});
Result forward(const KvCacheView& cache, const ForwardArgs& args, const Execution& execution = {});

}  // namespace attnspan
