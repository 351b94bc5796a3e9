#include "bench_sweep.hpp"

#include <algorithm>

#include "core/validation.hpp"

namespace attnspan::cli {
namespace {

constexpr BenchPhase kPhases[] = {BenchPhase::forward, BenchPhase::backward, BenchPhase::decode,
                                  BenchPhase::append};

BenchCase attention(BenchPhase phase, int64_t length, int64_t head_dim, DType dtype, bool causal = true) {
  BenchCase c;
  c.phase = phase;
  c.seqlen_q = c.seqlen_k = length;
  c.head_dim = head_dim;
  c.dtype = dtype;
  c.causal = causal;
  return c;
}

BenchCase over_cache(BenchPhase phase, int64_t rows, int64_t tokens, int64_t kv_heads, int64_t group,
                     KvFormat format, int64_t head_dim = 128) {
  BenchCase c;
  c.phase = phase;
  c.seqlen_q = rows;
  c.seqlen_k = tokens;
  c.kv_heads = kv_heads;
  c.group = group;
  c.head_dim = head_dim;
  c.cache = true;
  c.format = format;
  return c;
}

BenchCase append(KvFormat format, EncodeMode mode, int64_t tokens) {
  BenchCase c = over_cache(BenchPhase::append, tokens, tokens, 8, 1, format);
  c.mode = mode;
  return c;
}

// The table of docs/performance.md: every bar that it names, on `threads` threads.
void add_forward(std::vector<BenchCase>& cases, bool full) {
  for (const int64_t head_dim : {128, 64}) {
    for (const int64_t length : {512, 1024, 2048, 4096}) {
      cases.push_back(attention(BenchPhase::forward, length, head_dim, DType::f32));
    }
    cases.push_back(attention(BenchPhase::forward, 4096, head_dim, DType::f32, false));
  }
  for (const DType dtype : {DType::f16, DType::bf16}) {
    cases.push_back(attention(BenchPhase::forward, 4096, 128, dtype));
  }
  cases.push_back(attention(BenchPhase::forward, 8192, 128, DType::f32));
  cases.back().window_left = 255;
  for (const KvFormat format : {KvFormat::f16, KvFormat::q8, KvFormat::tbq4}) {
    cases.push_back(over_cache(BenchPhase::forward, 512, 8192, 8, 4, format));
  }
  if (!full) return;
  for (const int64_t head_dim : {40, 72, 80, 96, 192, 256, 512}) {
    cases.push_back(attention(BenchPhase::forward, 2048, head_dim, DType::f32));
  }
  for (const int64_t length : {1, 8, 16, 32, 64}) {
    cases.push_back(attention(BenchPhase::forward, length, 128, DType::f32));
    cases.back().batch = 8;
  }
  for (const int64_t group : {2, 4, 7, 8, 16}) {
    cases.push_back(attention(BenchPhase::forward, 1024, 128, DType::f32));
    cases.back().kv_heads = 2;
    cases.back().group = group;
  }
}

void add_backward(std::vector<BenchCase>& cases, bool full) {
  for (const int64_t head_dim : {128, 64}) {
    for (const int64_t length :
         full ? std::vector<int64_t>{512, 1024, 2048, 4096} : std::vector<int64_t>{1024, 4096}) {
      cases.push_back(attention(BenchPhase::backward, length, head_dim, DType::f32));
    }
  }
  if (!full) return;
  for (const DType dtype : {DType::f16, DType::bf16}) {
    cases.push_back(attention(BenchPhase::backward, 2048, 128, dtype));
  }
}

void add_decode(std::vector<BenchCase>& cases, bool full) {
  const BenchPhase decode = BenchPhase::decode;
  const std::vector<int64_t> lengths =
      full ? std::vector<int64_t>{1024, 4096, 16384, 65536} : std::vector<int64_t>{4096, 16384, 65536};
  for (const int64_t group : {1, 4}) {
    for (const int64_t tokens : lengths) {
      for (const KvFormat format : {KvFormat::f16, KvFormat::q8, KvFormat::tbq4}) {
        if (!full && format == KvFormat::q8 && tokens == 4096) continue;
        cases.push_back(over_cache(decode, 1, tokens, 8, group, format));
      }
    }
  }
  cases.push_back(over_cache(decode, 1, 65536, 8, 7, KvFormat::f16));
  cases.push_back(over_cache(decode, 1, 65536, 8, 7, KvFormat::tbq4));
  cases.push_back(over_cache(decode, 1, 65536, 1, 4, KvFormat::tbq4));
  if (!full) return;
  cases.push_back(over_cache(decode, 1, 65536, 8, 1, KvFormat::f32));
  cases.push_back(over_cache(decode, 1, 65536, 8, 1, KvFormat::bf16));
  cases.push_back(over_cache(decode, 5, 16384, 8, 1, KvFormat::f16));
  cases.push_back(over_cache(decode, 5, 16384, 8, 1, KvFormat::tbq4));
  for (const int64_t group : {2, 3, 5, 6, 8, 12, 16}) {
    cases.push_back(over_cache(decode, 1, 16384, 8, group, KvFormat::f16));
    cases.push_back(over_cache(decode, 1, 16384, 8, group, KvFormat::tbq4));
  }
  for (const int64_t head_dim : {64, 72, 80, 96, 256}) {
    cases.push_back(over_cache(decode, 1, 16384, 8, 4, KvFormat::f16, head_dim));
    cases.push_back(over_cache(decode, 1, 16384, 8, 4, KvFormat::tbq4, head_dim));
  }
}

void add_append(std::vector<BenchCase>& cases) {
  cases.push_back(append(KvFormat::f16, EncodeMode::quality, 4096));
  cases.push_back(append(KvFormat::q8, EncodeMode::quality, 4096));
  cases.push_back(append(KvFormat::tbq4, EncodeMode::fast, 4096));
  cases.push_back(append(KvFormat::tbq4, EncodeMode::quality, 4096));
}

std::vector<BenchCase> usual_cases(const Sweep& sweep) {
  std::vector<BenchCase> cases;
  if (sweep.wants(BenchPhase::forward)) add_forward(cases, sweep.full);
  if (sweep.wants(BenchPhase::backward)) add_backward(cases, sweep.full);
  if (sweep.wants(BenchPhase::decode)) add_decode(cases, sweep.full);
  if (sweep.wants(BenchPhase::append)) add_append(cases);
  return cases;
}

DType dtype_of(const std::string& format) {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    if (format == attnspan::name_of(dtype)) return dtype;
  }
  refuse("--formats", "'" + format + "'", "f32, f16 or bf16 for forward and backward");
}

KvFormat kv_format_of(const std::string& format) {
  const auto parsed = parse_kv_format(format);
  require(parsed.has_value(), "--formats", "'" + format + "'", kKvFormatNames);
  return *parsed;
}

// Cases that are timed on one thread too.
bool shows_scaling(const BenchCase& c) {
  if (c.phase == BenchPhase::append) return true;
  if (c.phase == BenchPhase::decode) return c.kv_heads == 1;
  return !c.cache && c.seqlen_q == 4096 && c.dtype == DType::f32 && c.causal;
}

template <typename T>
std::vector<T> or_usual(const std::vector<T>& list, T usual) {
  return list.empty() ? std::vector<T>{usual} : list;
}

std::vector<BenchCase> listed_cases(const Sweep& sweep) {
  std::vector<BenchCase> cases;
  for (const BenchPhase phase : kPhases) {
    if (!sweep.wants(phase)) continue;
    const bool tensors = phase == BenchPhase::forward || phase == BenchPhase::backward;
    for (const std::string& format : or_usual<std::string>(sweep.formats, tensors ? "f32" : "f16")) {
      for (const int64_t head_dim : or_usual<int64_t>(sweep.head_dims, 128)) {
        for (const int64_t group : or_usual<int64_t>(sweep.groups, 1)) {
          for (const int64_t length : or_usual<int64_t>(sweep.lengths, 4096)) {
            BenchCase c = attention(phase, length, head_dim, tensors ? dtype_of(format) : DType::f32);
            if (!tensors) c = over_cache(phase, 1, length, 8, 1, kv_format_of(format), head_dim);
            c.group = group;
            cases.push_back(c);
          }
        }
      }
    }
  }
  return cases;
}

}  // namespace

bool Sweep::wants(BenchPhase phase) const {
  return phases.empty() || std::find(phases.begin(), phases.end(), phase) != phases.end();
}

std::vector<BenchCase> bench_cases(const Sweep& sweep) {
  const std::vector<BenchCase> once = sweep.has_lists() ? listed_cases(sweep) : usual_cases(sweep);
  std::vector<BenchCase> cases;
  for (const BenchCase& c : once) {
    std::vector<int> threads = sweep.threads;
    if (threads.empty()) {
      if (shows_scaling(c) && sweep.all_threads > 1) threads.push_back(1);
      threads.push_back(sweep.all_threads);
    }
    for (const int n : threads) {
      cases.push_back(c);
      cases.back().threads = n;
    }
  }
  return cases;
}

}  // namespace attnspan::cli
