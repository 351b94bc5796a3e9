// Appending: room first, so that a failure leaves the cache as it was; then every row is encoded by itself,
// so that its bytes depend on its own values alone.

#include <algorithm>
#include <array>
#include <atomic>

#include "core/dtype.hpp"
#include "core/parallel.hpp"
#include "core/validation.hpp"
#include "kv/cache_state.hpp"

namespace attnspan {
namespace {

constexpr int64_t kMaxLength = INT32_MAX;  // seqlens are int32

// Values that one work item encodes: 0.1 ms or more of tbq4, far above the cost of handing it to a thread.
constexpr int64_t kValuesPerItem = 16384;

// batch < 0: one sequence. -1 tokens: any number.
void check_appended(const Tensor& tensor, const char* name, const KvCacheConfig& config, int64_t dim,
                    int64_t batch, int64_t tokens) {
  std::vector<int64_t> shape{tokens, config.kv_heads, dim};
  if (batch >= 0) shape.insert(shape.begin(), batch);
  require_shape(tensor, name, shape, batch < 0 ? "tokens, kv_heads, dim" : "batch, tokens, kv_heads, dim");
  require(tensor.dtype != DType::i32, name, "i32", "f32, f16 or bf16");
  require_device(tensor, name, Device::cpu);
  require_rows(tensor, name);
}

// Both sides of an append. Returns the number of tokens.
int64_t check_append(const KvCacheConfig& config, const Tensor& key, const Tensor& value, int64_t batch) {
  check_appended(key, "key", config, config.head_dim, batch, -1);
  const int64_t tokens = key.shape[batch < 0 ? 0 : 1];
  if (config.value_is_key) {
    require(!value, "value", "a tensor", "none (value_is_key: values are read from the keys)");
  } else {
    check_appended(value, "value", config, config.head_dim_v, batch, tokens);
  }
  return tokens;
}

// The rows of one sequence in `[tokens, kv_heads, dim]` or `[batch, tokens, kv_heads, dim]`.
RowSource row_source(const Tensor& tensor, int64_t sequence) {
  if (!tensor) return {};
  const int token_axis = tensor.rank - 3;
  const int64_t start = token_axis == 0 ? 0 : sequence * tensor.stride[0];
  return {&tensor, start, tensor.stride[token_axis], tensor.stride[token_axis + 1],
          tensor.shape[token_axis + 2]};
}

}  // namespace

int64_t encode_row(PagePool& pool, PagedStore::Place place, int64_t head, KvSide side, EncodeMode mode,
                   const float* values) {
  const PoolShape& shape = pool.shape();
  const bool key = side == KvSide::key;
  const int plane = key ? kKeyCodes : kValueCodes;
  const int64_t dim = key ? shape.key_dim : shape.value_dim;
  const KvFormatOps& ops = ops_of(key ? shape.key_format : shape.value_format);
  auto* codes = reinterpret_cast<uint8_t*>(pool.row(plane, place.page, head, place.token));
  auto* scales = ops.row_scales(dim) == 0
                     ? nullptr
                     : reinterpret_cast<uint16_t*>(pool.row(plane + 1, place.page, head, place.token));
  // The padding up to the next row is part of a saved page.
  std::fill(codes + ops.row_code_bytes(dim), codes + plane_row_bytes(shape, plane), uint8_t{0});
  return ops.encode_row(values, dim, mode, codes, scales);
}

void RowSource::read(int64_t token, int64_t head, float* values) const {
  const auto* base = static_cast<const std::byte*>(tensor->data) + tensor->byte_offset;
  const int64_t row = start + token * token_stride + head * head_stride;
  if (tensor->dtype == DType::f32) {
    std::copy_n(reinterpret_cast<const float*>(base) + row, dim, values);
    return;
  }
  for (int64_t i = 0; i < dim; ++i) values[i] = load_f32(base, row + i, tensor->dtype);
}

void KvCache::State::make_room(const std::vector<AppendTarget>& targets, int64_t tokens) {
  for (const AppendTarget& target : targets) {
    require(tokens <= kMaxLength - target.begin, "key",
            std::to_string(tokens) + " tokens behind " + std::to_string(target.begin),
            "at most 2147483647 together");
  }
  // The last row that exists stays answerable, whatever becomes of the append.
  for (const AppendTarget& target : targets) {
    if (config.window >= 0) rest.recycle(target.sequence, target.begin - config.window);
  }
  try {
    for (const AppendTarget& target : targets) {
      const int64_t end = target.begin + tokens;
      if (first) first->extend(target.sequence, std::min(end, config.first_tokens));
      rest.extend(target.sequence, end);
    }
  } catch (...) {
    for (const AppendTarget& target : targets) {
      rest.trim(target.sequence, target.begin);
      if (first) first->trim(target.sequence, target.begin);
    }
    throw;
  }
}

int64_t KvCache::State::encode_token(const AppendTarget& target, int64_t token) {
  const int64_t position = target.begin + token;
  PagedStore& store = store_of(position);
  const PagedStore::Place place = store.place(target.sequence, position);
  std::array<float, kMaxStoredDim> values;
  int64_t saturated_now = 0;
  for (const KvSide side : {KvSide::key, KvSide::value}) {
    const RowSource& source = side == KvSide::key ? target.key : target.value;
    for (int64_t head = 0; source.tensor != nullptr && head < config.kv_heads; ++head) {
      source.read(token, head, values.data());
      saturated_now += encode_row(store.pool(), place, head, side, config.encode_mode, values.data());
    }
  }
  return saturated_now;
}

int64_t KvCache::State::append(const std::vector<AppendTarget>& targets, int64_t tokens) {
  all.reset();
  make_room(targets, tokens);
  // One index over all tokens of all sequences, cut into items of kValuesPerItem values.
  const int64_t total = static_cast<int64_t>(targets.size()) * tokens;
  const int64_t values = config.kv_heads * (config.head_dim + (config.value_is_key ? 0 : config.head_dim_v));
  const int64_t step = std::max<int64_t>(1, kValuesPerItem / values);
  std::atomic<int64_t> saturated_now{0};
  parallel_for_each(config.threads, (total + step - 1) / step, [&](int64_t item) {
    int64_t count = 0;
    for (int64_t i = item * step; i < std::min(total, (item + 1) * step); ++i) {
      count += encode_token(targets[static_cast<size_t>(i / tokens)], i % tokens);
    }
    saturated_now += count;
  });
  saturated += saturated_now;
  return saturated_now;
}

int64_t KvCache::append(int64_t sequence, const Tensor& key, const Tensor& value) {
  state_->check_sequence(sequence);
  const int64_t tokens = check_append(state_->config, key, value, -1);
  return state_->append({{sequence, state_->length(sequence), row_source(key, 0), row_source(value, 0)}},
                        tokens);
}

int64_t KvCache::append(const Tensor& key, const Tensor& value) {
  const int64_t tokens = check_append(state_->config, key, value, batch());
  std::vector<AppendTarget> targets;
  for (int64_t sequence = 0; sequence < batch(); ++sequence) {
    state_->check_sequence(sequence);
    targets.push_back(
        {sequence, state_->length(sequence), row_source(key, sequence), row_source(value, sequence)});
  }
  return state_->append(targets, tokens);
}

}  // namespace attnspan
