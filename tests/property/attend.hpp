#pragma once
// Attention as a function of tensors, for tests that compare calls with each other.

#include <gmock/gmock.h>

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "attnspan/attention.hpp"
#include "check/buffer.hpp"
#include "core/dtype.hpp"

namespace attnspan::property {

using check::Buffer;
using check::Random;

inline Buffer random_buffer(const std::vector<int64_t>& shape, uint64_t seed, DType dtype = DType::f32) {
  Random random(seed);
  Buffer buffer = Buffer::poisoned(shape, dtype);
  buffer.fill_normal(random);
  return buffer;
}

inline Buffer int_buffer(const std::vector<int32_t>& values) {
  Buffer buffer = Buffer::poisoned({static_cast<int64_t>(values.size())}, DType::i32);
  for (size_t i = 0; i < values.size(); ++i) buffer.set_int(static_cast<int64_t>(i), values[i]);
  return buffer;
}

// Part of one dimension, as a view.
inline Tensor slice(Tensor tensor, int dim, int64_t begin, int64_t count) {
  tensor.byte_offset += begin * tensor.stride[dim] * size_of(tensor.dtype);
  tensor.shape[dim] = count;
  return tensor;
}

// Queries, keys and values of the contract's shapes.
struct Inputs {
  Buffer query, key, value;

  Inputs(int64_t batch, int64_t seqlen_q, int64_t seqlen_k, int64_t heads, int64_t kv_heads, int64_t dim,
         DType dtype = DType::f32, uint64_t seed = 1)
      : query(random_buffer({batch, seqlen_q, heads, dim}, seed, dtype)),
        key(random_buffer({batch, seqlen_k, kv_heads, dim}, seed + 1, dtype)),
        value(random_buffer({batch, seqlen_k, kv_heads, dim}, seed + 2, dtype)) {}
};

struct Attended {
  Buffer out, lse;
};

inline std::vector<int64_t> shape_of(const Tensor& t) { return {t.shape.begin(), t.shape.begin() + t.rank}; }

inline Attended attend(const std::string& backend, const Tensor& query, const Tensor& key,
                       const Tensor& value, const AttentionOptions& options = {}, int threads = 0) {
  std::vector<int64_t> out = shape_of(query);
  out.back() = value.shape[value.rank - 1];
  const std::vector<int64_t> lse = query.rank == 3
                                       ? std::vector<int64_t>{query.shape[1], query.shape[0]}
                                       : std::vector<int64_t>{query.shape[0], query.shape[2], query.shape[1]};
  Attended result{Buffer::poisoned(out, query.dtype), Buffer::poisoned(lse, DType::f32)};
  ForwardArgs args;
  args.query = query;
  args.key = key;
  args.value = value;
  args.out = result.out.tensor();
  args.lse = result.lse.tensor();
  args.options = options;
  Execution execution;
  execution.backend = backend;
  execution.threads = threads;
  forward(args, execution);
  return result;
}

struct Gradients {
  Buffer dq, dk, dv, d_sinks;
};

// `dlse` may be a tensor that is not given.
inline Gradients differentiate(const std::string& backend, const Tensor& query, const Tensor& key,
                               const Tensor& value, const Attended& kept, const Tensor& dout,
                               const Tensor& dlse = {}, const AttentionOptions& options = {},
                               int threads = 0) {
  Gradients result{Buffer::poisoned(shape_of(query), query.dtype),
                   Buffer::poisoned(shape_of(key), key.dtype),
                   Buffer::poisoned(shape_of(value), value.dtype),
                   {}};
  BackwardArgs args;
  args.query = query;
  args.key = key;
  args.value = value;
  args.out = kept.out.tensor();
  args.lse = kept.lse.tensor();
  args.dout = dout;
  args.dlse = dlse;
  args.dq = result.dq.tensor();
  args.dk = result.dk.tensor();
  args.dv = result.dv.tensor();
  if (options.sinks) {
    result.d_sinks = Buffer::poisoned({query.shape[query.rank - 2]}, DType::f32);
    args.d_sinks = result.d_sinks.tensor();
  }
  args.options = options;
  Execution execution;
  execution.backend = backend;
  execution.threads = threads;
  backward(args, execution);
  return result;
}

// Elements of a view in row-major order of its shape.
inline std::vector<float> values(const Tensor& t) {
  std::vector<float> list;
  const auto* base = static_cast<const char*>(t.data) + t.byte_offset;
  for (int64_t i = 0; i < t.numel(); ++i) {
    int64_t rest = i, element = 0;
    for (int d = t.rank - 1; d >= 0; --d) {
      element += rest % t.shape[d] * t.stride[d];
      rest /= t.shape[d];
    }
    list.push_back(load_f32(base, element, t.dtype));
  }
  return list;
}

// Bit by bit: NaNs are equal to themselves, 0 and -0 are not.
inline void expect_same_bits(const Tensor& a, const Tensor& b, const std::string& what) {
  const std::vector<float> x = values(a), y = values(b);
  ASSERT_EQ(x.size(), y.size()) << what;
  for (size_t i = 0; i < x.size(); ++i) {
    ASSERT_EQ(std::memcmp(&x[i], &y[i], sizeof(float)), 0)
        << what << " element " << i << ": " << x[i] << ", " << y[i];
  }
}

// To rounding: `tolerance` is relative to the largest expected value. Infinities must agree.
inline void expect_close(const Tensor& found, const Tensor& expected, double tolerance,
                         const std::string& what) {
  const std::vector<float> x = values(found), y = values(expected);
  ASSERT_EQ(x.size(), y.size()) << what;
  double largest = 0;
  for (const float e : y) largest = std::isfinite(e) ? std::max<double>(largest, std::abs(e)) : largest;
  for (size_t i = 0; i < x.size(); ++i) {
    if (x[i] == y[i]) continue;
    ASSERT_NEAR(x[i], y[i], tolerance * largest + 1e-30) << what << " element " << i;
  }
}

// Backends that work in host memory and are on this machine.
inline std::vector<std::string> host_backends() {
  std::vector<std::string> names;
  for (const BackendInfo& info : list_backends()) {
    if (info.available && info.device == Device::cpu) names.push_back(info.name);
  }
  return names;
}

class Property : public testing::TestWithParam<std::string> {
 protected:
  const std::string& backend() const { return GetParam(); }
};

#define ATTNSPAN_ON_EVERY_HOST_BACKEND(suite)                                   \
  INSTANTIATE_TEST_SUITE_P(Property, suite, testing::ValuesIn(host_backends()), \
                           [](const auto& info) { return info.param; })

}  // namespace attnspan::property
