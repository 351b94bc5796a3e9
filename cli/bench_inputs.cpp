#include "bench_inputs.hpp"

#include <cstring>
#include <random>

#include "core/dtype.hpp"

namespace attnspan::cli {
namespace {

// Tokens of a page, and so the length of the runs of one head that lie together in a cache.
constexpr int64_t kPageSize = 256;

// Normal values; drawing each value of a large tensor would take longer than the benchmark.
const std::vector<float>& normal_values() {
  static const std::vector<float> values = [] {
    std::vector<float> drawn(65521);  // a prime: tensors of powers of two do not repeat row by row
    std::mt19937_64 random(1);
    std::normal_distribution<float> normal;
    for (float& value : drawn) value = normal(random);
    return drawn;
  }();
  return values;
}

void fill_normal(void* data, DType dtype, int64_t count, size_t first) {
  const std::vector<float>& values = normal_values();
  size_t at = first % values.size();
  for (int64_t i = 0; i < count; ++i) {
    store_f32(data, i, dtype, values[at]);
    if (++at == values.size()) at = 0;
  }
}

int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

}  // namespace

AttentionInputs::AttentionInputs(const BenchCase& bench) : bench_(bench) {
  const int64_t heads = bench.kv_heads * bench.group;
  query_ = take(bench.seqlen_q, heads);
  out_ = take(bench.seqlen_q, heads);
  memory_.emplace_back(static_cast<size_t>(bench.batch * heads * bench.seqlen_q) * sizeof(float));
  lse_ = contiguous(memory_.back().data(), DType::f32, {bench.batch, heads, bench.seqlen_q});
  if (bench.cache) {
    make_cache();
    return;
  }
  key_ = take(bench.seqlen_k, bench.kv_heads);
  value_ = take(bench.seqlen_k, bench.kv_heads);
  if (bench.phase != BenchPhase::backward) return;
  dout_ = take(bench.seqlen_q, heads);
  dq_ = take(bench.seqlen_q, heads);
  dk_ = take(bench.seqlen_k, bench.kv_heads);
  dv_ = take(bench.seqlen_k, bench.kv_heads);
}

Tensor AttentionInputs::take(int64_t rows, int64_t heads) {
  const int64_t count = bench_.batch * rows * heads * bench_.head_dim;
  memory_.emplace_back(static_cast<size_t>(count * size_of(bench_.dtype)));
  void* data = memory_.back().data();
  fill_normal(data, bench_.dtype, count, memory_.size() * 7919);
  // Heads outermost: a head's rows lie together, as in a cache.
  return bhsd(data, bench_.dtype, bench_.batch, rows, heads, bench_.head_dim);
}

void AttentionInputs::make_cache() {
  const int64_t pages = (bench_.seqlen_k + kPageSize - 1) / kPageSize;
  cache_.batch = bench_.batch;
  cache_.kv_heads = bench_.kv_heads;
  cache_.page_size = kPageSize;
  cache_.num_pages = bench_.batch * pages;
  cache_.max_seqlen = bench_.seqlen_k;
  for (int64_t page = 0; page < cache_.num_pages; ++page) block_table_.push_back(static_cast<int32_t>(page));
  seqlens_.assign(static_cast<size_t>(bench_.batch), static_cast<int32_t>(bench_.seqlen_k));
  cache_.block_table = contiguous(block_table_.data(), DType::i32, {bench_.batch, pages});
  cache_.seqlens = contiguous(seqlens_.data(), DType::i32, {bench_.batch});
  make_pages(cache_.key);
  make_pages(cache_.value);
}

// Pages in the layout of KvCache, [page][head][token], all with the same rows: encoding each row of a large
// cache would take longer than the benchmark.
void AttentionInputs::make_pages(KvRows& rows) {
  const KvFormatOps& ops = ops_of(bench_.format);
  rows.format = bench_.format;
  rows.dim = bench_.head_dim;
  rows.token_stride = round_up(ops.row_code_bytes(rows.dim), kRowAlignment);
  rows.head_stride = rows.token_stride * kPageSize;
  rows.page_stride = rows.head_stride * bench_.kv_heads;
  rows.scale_token_stride = ops.row_scales(rows.dim);
  rows.scale_head_stride = rows.scale_token_stride * kPageSize;
  rows.scale_page_stride = rows.scale_head_stride * bench_.kv_heads;
  memory_.emplace_back(static_cast<size_t>(rows.page_stride * cache_.num_pages));
  auto* codes = static_cast<uint8_t*>(memory_.back().data());
  rows.codes = codes;
  uint16_t* scales = nullptr;
  if (rows.scale_token_stride > 0) {
    memory_.emplace_back(static_cast<size_t>(rows.scale_page_stride * cache_.num_pages) * sizeof(uint16_t));
    scales = static_cast<uint16_t*>(memory_.back().data());
    rows.scales = scales;
  }
  std::vector<float> row(static_cast<size_t>(rows.dim));
  for (int64_t i = 0; i < bench_.kv_heads * kPageSize; ++i) {
    fill_normal(row.data(), DType::f32, rows.dim, static_cast<size_t>(i * rows.dim) + memory_.size());
    ops.encode_row(row.data(), rows.dim, EncodeMode::fast, codes + i * rows.token_stride,
                   scales == nullptr ? nullptr : scales + i * rows.scale_token_stride);
  }
  for (int64_t page = 1; page < cache_.num_pages; ++page) {
    std::memcpy(codes + page * rows.page_stride, codes, static_cast<size_t>(rows.page_stride));
    if (scales == nullptr) continue;
    std::memcpy(scales + page * rows.scale_page_stride, scales,
                static_cast<size_t>(rows.scale_page_stride) * sizeof(uint16_t));
  }
}

ForwardArgs AttentionInputs::forward_args() const {
  ForwardArgs args;
  args.query = query_;
  args.key = key_;
  args.value = value_;
  if (bench_.cache) args.cache = &cache_;
  args.out = out_;
  args.lse = lse_;
  args.options.causal = bench_.causal;
  args.options.window_left = bench_.window_left;
  return args;
}

BackwardArgs AttentionInputs::backward_args() const {
  BackwardArgs args;
  args.query = query_;
  args.key = key_;
  args.value = value_;
  args.out = out_;
  args.lse = lse_;
  args.dout = dout_;
  args.dq = dq_;
  args.dk = dk_;
  args.dv = dv_;
  args.options = forward_args().options;
  return args;
}

AppendInputs::AppendInputs(const BenchCase& bench) : bench_(bench) {
  const auto count = static_cast<size_t>(bench.seqlen_k * bench.kv_heads * bench.head_dim);
  key_.resize(count);
  value_.resize(count);
  fill_normal(key_.data(), DType::f32, static_cast<int64_t>(count), 0);
  fill_normal(value_.data(), DType::f32, static_cast<int64_t>(count), 4711);
}

std::unique_ptr<KvCache> AppendInputs::make_cache() const {
  KvCacheConfig config;
  config.kv_heads = bench_.kv_heads;
  config.head_dim = bench_.head_dim;
  config.key_format = config.value_format = bench_.format;
  config.encode_mode = bench_.mode;
  config.page_size = kPageSize;
  config.reserve_tokens = bench_.seqlen_k;
  config.threads = bench_.threads;
  return std::make_unique<KvCache>(config);
}

void AppendInputs::append(KvCache& cache) const {
  const auto rows = [&](const std::vector<float>& values) {
    return contiguous(values.data(), DType::f32, {bench_.seqlen_k, bench_.kv_heads, bench_.head_dim});
  };
  cache.append(0, rows(key_), rows(value_));
}

}  // namespace attnspan::cli
