// What the grid does not reach: nan_guard, repeatability, independence of neighbours, merging in place,
// tensors of the caller on the device, and appending to a cache there.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "attnspan/device_cache.hpp"
#include "attnspan/webgpu.hpp"
#include "check/cache_builder.hpp"
#include "check/case.hpp"
#include "core/dtype.hpp"
#include "core/staging.hpp"
#include "kv/format.hpp"
#include "kv/tbq4_constants.hpp"
#include "no_device.hpp"
#include "registry/registry.hpp"

namespace attnspan::webgpu {
namespace {

using check::Buffer;
using check::Case;
using check::CaseSpec;

const Execution kWebgpu{.backend = "webgpu"};

class WebgpuTest : public testing::Test {
 protected:
  void SetUp() override {
    for (const RegisteredBackend& entry : backends()) {
      if (entry.name != "webgpu") continue;
      if (entry.backend == nullptr) ATTNSPAN_NO_DEVICE(entry.reason);
      memory_ = entry.backend->memory();
    }
  }

  // A copy of host memory on the device, released with the test.
  void* on_device(const void* host, size_t bytes) {
    void* address = memory_->allocate(bytes);
    memory_->upload(address, host, bytes);
    allocations_.push_back(address);
    return address;
  }
  void TearDown() override {
    for (void* allocation : allocations_) memory_->release(allocation);
  }

  DeviceMemory* memory_ = nullptr;
  std::vector<void*> allocations_;
};

std::vector<float> values_of(const Buffer& buffer) {
  std::vector<float> values(static_cast<size_t>(buffer.tensor().numel()));
  for (size_t i = 0; i < values.size(); ++i) values[i] = buffer.get(static_cast<int64_t>(i));
  return values;
}

TEST_F(WebgpuTest, NanGuardReplacesAndCounts) {
  constexpr int64_t kRows = 5, kDim = 6;
  const std::vector<int64_t> shape = {1, kRows, 1, kDim};
  Buffer query = Buffer::poisoned(shape, DType::f16), key = Buffer::poisoned(shape, DType::f16);
  Buffer value = Buffer::poisoned(shape, DType::f16);
  const Buffer out = Buffer::poisoned(shape, DType::f16);
  check::Random random(3);
  query.fill_normal(random);
  key.fill_normal(random);
  value.fill_normal(random);
  value.set(2, std::numeric_limits<float>::infinity());  // one column of every row
  ForwardArgs args;
  args.query = query.tensor(), args.key = key.tensor(), args.value = value.tensor(), args.out = out.tensor();
  args.options.nan_guard = true;
  const Result result = forward(args, kWebgpu);
  EXPECT_EQ(result.nonfinite_replaced, kRows);
  for (int64_t i = 0; i < kRows; ++i) {
    for (int64_t d = 0; d < kDim; ++d) {
      EXPECT_TRUE(std::isfinite(out.get(i * kDim + d)));
      if (d == 2) {
        EXPECT_EQ(out.get(i * kDim + d), 0);
      }
    }
  }
}

TEST_F(WebgpuTest, GradientsAreBitwiseRepeatable) {
  CaseSpec spec;
  spec.seqlen_q = 70, spec.seqlen_k = 90, spec.heads = 6, spec.kv_heads = 2, spec.causal = true,
  spec.sinks = true;
  const Case c(spec);
  const Case::ForwardOutputs kept = c.forward_outputs();
  forward(c.forward_args(kept), kWebgpu);
  const Case::BackwardOutputs first = c.backward_outputs(), second = c.backward_outputs();
  backward(c.backward_args(kept, first), kWebgpu);
  backward(c.backward_args(kept, second), kWebgpu);
  EXPECT_EQ(values_of(first.dq), values_of(second.dq));
  EXPECT_EQ(values_of(first.dk), values_of(second.dk));
  EXPECT_EQ(values_of(first.dv), values_of(second.dv));
  EXPECT_EQ(values_of(first.d_sinks), values_of(second.d_sinks));
}

// Decode splits keys by the length of the sequence alone: the same bits beside any neighbour.
TEST_F(WebgpuTest, ASequenceIgnoresItsNeighbours) {
  constexpr int64_t kLength = 333, kShort = 201, kHeads = 4, kKvHeads = 2, kDim = 64;
  check::Random random(5);
  Buffer query = Buffer::poisoned({2, 1, kHeads, kDim}, DType::f32);
  Buffer key = Buffer::poisoned({2, kLength, kKvHeads, kDim}, DType::f32);
  Buffer value = Buffer::poisoned({2, kLength, kKvHeads, kDim}, DType::f32);
  query.fill_normal(random);
  key.fill_normal(random);
  value.fill_normal(random);
  const auto run = [&](int64_t batch, const std::vector<int64_t>& lengths, int64_t first) {
    const auto part = [&](const Buffer& whole, int64_t rows, int64_t heads) {
      Buffer buffer = Buffer::poisoned({batch, rows, heads, kDim}, DType::f32);
      const int64_t row = heads * kDim, stride = whole.tensor().stride[0];
      for (int64_t b = 0; b < batch; ++b) {
        for (int64_t i = 0; i < rows * row; ++i)
          buffer.set(b * rows * row + i, whole.get((first + b) * stride + i));
      }
      return buffer;
    };
    const int64_t longest = *std::max_element(lengths.begin(), lengths.end());
    check::Random shuffle(9);
    const Buffer q = part(query, 1, kHeads), k = part(key, longest, kKvHeads),
                 v = part(value, longest, kKvHeads);
    const check::BuiltCache cache(k, v, lengths, KvFormat::f16, KvFormat::f16, 16, shuffle);
    const Buffer out = Buffer::poisoned({batch, 1, kHeads, kDim}, DType::f32);
    ForwardArgs args;
    args.query = q.tensor(), args.cache = &cache.view(), args.out = out.tensor();
    forward(args, kWebgpu);
    return values_of(out);
  };
  const std::vector<float> together = run(2, {kLength, kShort}, 0), alone = run(1, {kShort}, 1);
  EXPECT_EQ(std::vector<float>(together.begin() + kHeads * kDim, together.end()), alone);
}

TEST_F(WebgpuTest, MergesInPlaceOnTheDevice) {
  const std::vector<float> out_a = {1, 2, 3, 4}, out_b = {5, 6, 7, 8}, lse = {0.5F, -1.0F};
  void* a = on_device(out_a.data(), 16);
  void* b = on_device(out_b.data(), 16);
  void* lse_a = on_device(lse.data(), 16 / 2);
  void* lse_b = on_device(lse.data(), 16 / 2);
  const auto out = [](void* data) { return contiguous(data, DType::f32, {1, 2, 1, 2}, Device::webgpu); };
  const auto row = [](void* data) { return contiguous(data, DType::f32, {1, 1, 2}, Device::webgpu); };
  merge_states({out(a), row(lse_a), out(b), row(lse_b), out(a), row(lse_a)}, kWebgpu);
  std::vector<float> merged(4), merged_lse(2);
  memory_->download(merged.data(), a, 16);
  memory_->download(merged_lse.data(), lse_a, 8);
  for (int i = 0; i < 4; ++i) EXPECT_NEAR(merged[i], 0.5F * (out_a[i] + out_b[i]), 1e-6);
  for (int i = 0; i < 2; ++i) EXPECT_NEAR(merged_lse[i], lse[i] + std::log(2.0F), 1e-6);
}

TEST_F(WebgpuTest, RefusesToWriteABufferThatItReads) {
  const std::vector<float> values(64, 0.5F);
  void* data = on_device(values.data(), 256);
  const Tensor tensor = bshd(data, DType::f32, 1, 4, 1, 16, Device::webgpu);
  ForwardArgs args;
  args.query = args.key = args.value = args.out = tensor;
  try {
    forward(args, kWebgpu);
    FAIL() << "the call went through";
  } catch (const Error& error) {
    EXPECT_EQ(error.argument(), "out");
  }
}

// supports() names what is too large before anything is allocated; nothing of these tensors is read.
TEST_F(WebgpuTest, SaysNoToWhatTheAdapterCannotHold) {
  std::vector<float> values(64);
  Tensor small = bshd(values.data(), DType::f32, 1, 4, 1, 16), spread = small;
  spread.stride[1] = int64_t{1} << 31;  // the last row begins 24 GiB further on
  ForwardArgs args;
  args.query = spread, args.key = args.value = args.out = small;
  Support support = supports(args, "webgpu");
  EXPECT_FALSE(support);
  EXPECT_NE(support.reason.find("query: "), std::string::npos) << support.reason;

  constexpr int64_t kBatch = 70000;  // WebGPU promises 65535 workgroups in a dimension
  std::vector<float> many(static_cast<size_t>(kBatch * 4));
  args.query = args.key = args.value = args.out = bshd(many.data(), DType::f32, kBatch, 1, 1, 4);
  support = supports(args, "webgpu");
  EXPECT_FALSE(support);
  EXPECT_NE(support.reason.find("batch: 70000"), std::string::npos) << support.reason;
}

// ---- append

struct AppendCase {
  KvFormat format;
  int64_t dim;
};

class AppendTest : public WebgpuTest, public testing::WithParamInterface<AppendCase> {};

// Rows in two pages of 16 tokens, encoded on the device, against the host's encoder: codes differ by rounding
// in other compilers in at most 1 of 1000 (plain formats: never), scales by one f16 step.
TEST_P(AppendTest, EncodesAsTheHostDoes) {
  const auto [format, dim] = GetParam();
  constexpr int64_t kTokens = 23, kHeads = 2, kPage = 16, kStart = 3;
  const KvFormatOps& ops = ops_of(format);
  check::Random random(11);
  Buffer rows = Buffer::poisoned({1, kTokens, kHeads, dim}, DType::f32);
  rows.fill_normal(random, 2.0F);

  const int64_t code_bytes = (ops.row_code_bytes(dim) + 15) / 16 * 16, scales = ops.row_scales(dim);
  KvRows stored;
  stored.format = format;
  stored.dim = dim;
  stored.token_stride = code_bytes;
  stored.head_stride = kPage * code_bytes;
  stored.page_stride = kHeads * stored.head_stride;
  stored.scale_token_stride = scales;
  stored.scale_head_stride = kPage * scales;
  stored.scale_page_stride = kHeads * stored.scale_head_stride;
  std::vector<uint8_t> codes(static_cast<size_t>(2 * stored.page_stride), 0xee);
  std::vector<uint16_t> norms(static_cast<size_t>(2 * stored.scale_page_stride + 8), 0xeeee);
  stored.codes = on_device(codes.data(), codes.size());
  if (scales > 0) stored.scales = on_device(norms.data(), 2 * norms.size());
  const std::vector<int32_t> table = {1, 0}, start = {kStart};
  KvView view;
  view.device = Device::webgpu;
  view.batch = 1, view.kv_heads = kHeads, view.page_size = kPage, view.num_pages = 2,
  view.max_seqlen = 2 * kPage;
  view.key = view.value = stored;
  view.block_table = contiguous(on_device(table.data(), 8), DType::i32, {1, 2}, Device::webgpu);
  view.seqlens = contiguous(on_device(start.data(), 4), DType::i32, {1}, Device::webgpu);
  const Tensor tensor = bshd(on_device(rows.tensor().data, static_cast<size_t>(4 * kTokens * kHeads * dim)),
                             DType::f32, 1, kTokens, kHeads, dim, Device::webgpu);
  const std::vector<int32_t> none(4, 0);
  void* saturated = on_device(none.data(), 16);
  DeviceAppendArgs args;
  args.cache = &view;
  args.key = tensor;
  args.start = view.seqlens;
  args.saturated = contiguous(saturated, DType::i32, {1}, Device::webgpu);
  append(args, kWebgpu);
  int32_t count = -1;
  memory_->download(&count, saturated, 4);
  EXPECT_EQ(count, 0);
  memory_->download(codes.data(), stored.codes, codes.size());
  if (scales > 0) memory_->download(norms.data(), stored.scales, 2 * norms.size());

  int64_t values = 0, differing = 0;
  for (int64_t token = 0; token < kTokens; ++token) {
    for (int64_t head = 0; head < kHeads; ++head) {
      std::vector<float> row(static_cast<size_t>(dim));
      for (int64_t d = 0; d < dim; ++d) row[d] = rows.get((token * kHeads + head) * dim + d);
      std::vector<uint8_t> expected(static_cast<size_t>(code_bytes), 0xee);
      std::vector<uint16_t> expected_scales(static_cast<size_t>(scales + 1));
      ops.encode_row(row.data(), dim, EncodeMode::quality, expected.data(), expected_scales.data());
      const int64_t at = kStart + token, page = table[static_cast<size_t>(at / kPage)];
      const uint8_t* found = &codes[static_cast<size_t>(page * stored.page_stride +
                                                        head * stored.head_stride + at % kPage * code_bytes)];
      for (int64_t i = 0; i < ops.row_code_bytes(dim); ++i) {
        differing += expected[static_cast<size_t>(i)] != found[i];
        ++values;
      }
      for (int64_t i = 0; i < scales; ++i) {
        const uint16_t norm = norms[static_cast<size_t>(
            page * stored.scale_page_stride + head * stored.scale_head_stride + at % kPage * scales + i)];
        EXPECT_LE(std::abs(norm - expected_scales[static_cast<size_t>(i)]), 1) << "token " << token;
      }
    }
  }
  const bool exact = format == KvFormat::f32 || format == KvFormat::f16 || format == KvFormat::bf16;
  EXPECT_LE(differing, exact ? 0 : values / 1000) << "of " << values;
}

INSTANTIATE_TEST_SUITE_P(Formats, AppendTest,
                         testing::Values(AppendCase{KvFormat::f32, 40}, AppendCase{KvFormat::f16, 33},
                                         AppendCase{KvFormat::bf16, 64}, AppendCase{KvFormat::q8, 80},
                                         AppendCase{KvFormat::tbq4, 128}, AppendCase{KvFormat::tbq4, 100},
                                         AppendCase{KvFormat::tbq4, 576}),
                         [](const auto& info) {
                           return std::string(name_of(info.param.format)) + "_" +
                                  std::to_string(info.param.dim);
                         });

}  // namespace
}  // namespace attnspan::webgpu
