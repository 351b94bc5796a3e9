// The C ABI: the same bits as the C++ API, statuses and messages instead of exceptions, structs of other
// sizes.

#include <gmock/gmock.h>

#include <cmath>
#include <cstring>
#include <thread>

#include "attnspan/attention.hpp"
#include "attnspan/attnspan.h"
#include "check/case.hpp"

extern "C" {
attnspan_options options_from_c(void);
attnspan_forward_args forward_args_from_c(float* query, float* key, float* value, float* out);
}

namespace attnspan {
namespace {

using check::Buffer;
using testing::HasSubstr;

attnspan_tensor c_tensor(const Tensor& t) {
  attnspan_tensor c{};
  c.data = t.data;
  c.byte_offset = t.byte_offset;
  c.dtype = static_cast<int32_t>(t.dtype);
  c.device = static_cast<int32_t>(t.device);
  c.rank = t.rank;
  std::copy(t.shape.begin(), t.shape.end(), c.shape);
  std::copy(t.stride.begin(), t.stride.end(), c.stride);
  return c;
}

attnspan_options c_options(const AttentionOptions& o) {
  attnspan_options c = attnspan_options_init();
  c.softmax_scale = o.softmax_scale;
  c.softcap = o.softcap;
  c.causal = o.causal;
  c.nan_guard = o.nan_guard;
  c.diagonal_kind = static_cast<int32_t>(o.diagonal.kind);
  c.diagonal_offset = o.diagonal.value;
  c.window_left = o.window_left;
  c.window_right = o.window_right;
  c.key_start = c_tensor(o.key_start);
  c.key_end = c_tensor(o.key_end);
  c.cu_seqlens_q = c_tensor(o.cu_seqlens_q);
  c.cu_seqlens_k = c_tensor(o.cu_seqlens_k);
  c.seqused_k = c_tensor(o.seqused_k);
  c.bias = c_tensor(o.bias);
  c.alibi_slopes = c_tensor(o.alibi_slopes);
  c.sinks = c_tensor(o.sinks);
  return c;
}

// Every field of the options away from its default, in two cases: not all go together.
check::CaseSpec rich_spec() {
  check::CaseSpec spec;
  spec.seqlen_q = 9;
  spec.seqlen_k = 13;
  spec.head_dim = 16;
  spec.head_dim_v = 24;
  spec.softmax_scale = 0.3F;
  spec.softcap = 4;
  spec.causal = true;
  spec.diagonal = Diagonal::at(3);
  spec.window_left = 6;
  spec.window_right = 5;
  spec.documents = check::Documents::starts_ends;
  spec.bias = spec.alibi = spec.sinks = spec.seqused_k = true;
  return spec;
}

check::CaseSpec packed_spec() {
  check::CaseSpec spec;
  spec.packed_q = {3, 0, 5};
  spec.packed_k = {4, 2, 7};
  return spec;
}

void expect_same(const Buffer& a, const Buffer& b) {
  for (int64_t i = 0; i < a.tensor().numel(); ++i) ASSERT_EQ(a.get(i), b.get(i)) << i;
}

class SameBits : public testing::TestWithParam<check::CaseSpec> {};

TEST_P(SameBits, Forward) {
  const check::Case c(GetParam());
  const auto expected = c.forward_outputs(), found = c.forward_outputs();
  const Result result = forward(c.forward_args(expected));
  const ForwardArgs cpp = c.forward_args(found);
  const attnspan_options options = c_options(cpp.options);
  attnspan_forward_args args = attnspan_forward_args_init();
  args.query = c_tensor(cpp.query);
  args.key = c_tensor(cpp.key);
  args.value = c_tensor(cpp.value);
  args.out = c_tensor(cpp.out);
  args.lse = c_tensor(cpp.lse);
  args.options = &options;
  attnspan_result c_result = attnspan_result_init();
  ASSERT_EQ(attnspan_forward(&args, nullptr, &c_result), ATTNSPAN_OK) << attnspan_last_error();
  EXPECT_EQ(c_result.backend, result.backend);
  expect_same(found.out, expected.out);
  expect_same(found.lse, expected.lse);
}

TEST_P(SameBits, Backward) {
  const check::Case c(GetParam());
  const auto kept = c.forward_outputs();
  const Execution reference{.backend = "reference"};
  forward(c.forward_args(kept), reference);
  const auto expected = c.backward_outputs(), found = c.backward_outputs();
  backward(c.backward_args(kept, expected), reference);
  const BackwardArgs cpp = c.backward_args(kept, found);
  const attnspan_options options = c_options(cpp.options);
  attnspan_backward_args args = attnspan_backward_args_init();
  args.query = c_tensor(cpp.query);
  args.key = c_tensor(cpp.key);
  args.value = c_tensor(cpp.value);
  args.out = c_tensor(cpp.out);
  args.lse = c_tensor(cpp.lse);
  args.dout = c_tensor(cpp.dout);
  args.dlse = c_tensor(cpp.dlse);
  args.dq = c_tensor(cpp.dq);
  args.dk = c_tensor(cpp.dk);
  args.dv = c_tensor(cpp.dv);
  args.d_sinks = c_tensor(cpp.d_sinks);
  args.options = &options;
  attnspan_execution execution = attnspan_execution_init();
  execution.backend = "reference";
  ASSERT_EQ(attnspan_backward(&args, &execution, nullptr), ATTNSPAN_OK) << attnspan_last_error();
  expect_same(found.dq, expected.dq);
  expect_same(found.dk, expected.dk);
  expect_same(found.dv, expected.dv);
  if (GetParam().sinks) expect_same(found.d_sinks, expected.d_sinks);
}

INSTANTIATE_TEST_SUITE_P(Capi, SameBits, testing::Values(check::CaseSpec{}, rich_spec(), packed_spec()),
                         [](const auto& info) { return "case" + std::to_string(info.index); });

// softmax over three keys with logits 0, so that out is the mean of the values; written from C
struct Tiny {
  float query[2] = {0, 0}, key[3] = {1, 2, 3}, value[3] = {1, 2, 6}, out[2] = {-1, -1};
  attnspan_forward_args args = forward_args_from_c(query, key, value, out);
};

TEST(Capi, FromC) {
  Tiny tiny;
  ASSERT_EQ(attnspan_forward(&tiny.args, nullptr, nullptr), ATTNSPAN_OK) << attnspan_last_error();
  EXPECT_NEAR(tiny.out[0], 3, 1e-6);
  EXPECT_NEAR(tiny.out[1], 3, 1e-6);
  EXPECT_EQ(options_from_c().window_left, -1);
  EXPECT_EQ(options_from_c().struct_size, sizeof(attnspan_options));
}

TEST(Capi, DecodeOverCacheViews) {
  Tiny tiny;
  int32_t seqlens[1] = {2}, table[1] = {0};  // the third key does not exist
  const attnspan_tensor lengths = attnspan_contiguous(seqlens, ATTNSPAN_I32, 1, 1, 0, 0, 0);
  const attnspan_tensor blocks = attnspan_contiguous(table, ATTNSPAN_I32, 2, 1, 1, 0, 0);
  attnspan_kv_view dense = attnspan_kv_view_init(), paged = attnspan_kv_view_init();
  ASSERT_EQ(attnspan_dense_cache(&tiny.args.key, &tiny.args.value, &lengths, &dense), ATTNSPAN_OK);
  ASSERT_EQ(attnspan_paged_cache(&tiny.args.key, &tiny.args.value, &blocks, &lengths, &paged), ATTNSPAN_OK)
      << attnspan_last_error();
  tiny.args.key = tiny.args.value = attnspan_tensor{};
  attnspan_options options = attnspan_options_init();
  options.causal = 1;
  tiny.args.options = &options;
  for (const attnspan_kv_view& view : {dense, paged}) {
    tiny.args.cache = &view;
    tiny.out[0] = tiny.out[1] = -1;
    ASSERT_EQ(attnspan_decode(&tiny.args, nullptr, nullptr), ATTNSPAN_OK) << attnspan_last_error();
    EXPECT_NEAR(tiny.out[0], 1, 1e-6);
    EXPECT_NEAR(tiny.out[1], 1.5, 1e-6);
  }
  tiny.args.cache = nullptr;
  EXPECT_EQ(attnspan_decode(&tiny.args, nullptr, nullptr), ATTNSPAN_INVALID_ARGUMENT);
  EXPECT_THAT(attnspan_last_error(), HasSubstr("cache: found a null pointer"));
}

TEST(Capi, DecodeRefusesMoreThan16Rows) {
  float data[17] = {};
  int32_t seqlens[1] = {17};
  const Tensor rows = bshd(data, DType::f32, 1, 17, 1, 1);
  const KvView cache = dense_cache(rows, rows, contiguous(seqlens, DType::i32, {1}));
  try {
    decode(rows, cache, rows);
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("query: found 17 rows, expected at most 16"));
  }
}

TEST(Capi, Merge) {
  float out_a[1] = {1}, out_b[1] = {5}, lse_a[1] = {0}, lse_b[1] = {std::log(3.0F)}, out[1] = {}, lse[1] = {};
  attnspan_merge_args args = attnspan_merge_args_init();
  const auto rows = [](float* data) { return attnspan_contiguous(data, ATTNSPAN_F32, 4, 1, 1, 1, 1); };
  const auto lses = [](float* data) { return attnspan_contiguous(data, ATTNSPAN_F32, 3, 1, 1, 1, 0); };
  args.out_a = rows(out_a);
  args.out_b = rows(out_b);
  args.out = rows(out);
  args.lse_a = lses(lse_a);
  args.lse_b = lses(lse_b);
  args.lse = lses(lse);
  ASSERT_EQ(attnspan_merge_states(&args, nullptr, nullptr), ATTNSPAN_OK) << attnspan_last_error();
  EXPECT_NEAR(out[0], 4, 1e-6);
  EXPECT_NEAR(lse[0], std::log(4.0), 1e-6);
}

TEST(Capi, SupportsSaysWhyNot) {
  Tiny tiny;
  EXPECT_EQ(attnspan_forward_supports(&tiny.args, "reference"), ATTNSPAN_OK);
  float probs[6];
  tiny.args.probs = attnspan_contiguous(probs, ATTNSPAN_F32, 4, 1, 1, 2, 3);
  EXPECT_EQ(attnspan_forward_supports(&tiny.args, "cpu"), ATTNSPAN_UNSUPPORTED);
  EXPECT_THAT(attnspan_last_error(), HasSubstr("cpu: probs"));
  EXPECT_EQ(attnspan_forward_supports(&tiny.args, "metal"), ATTNSPAN_UNSUPPORTED);
  EXPECT_THAT(attnspan_last_error(), HasSubstr("not available"));
  EXPECT_EQ(attnspan_forward_supports(&tiny.args, "gpu"), ATTNSPAN_INVALID_ARGUMENT);
  EXPECT_EQ(attnspan_forward_supports(&tiny.args, nullptr), ATTNSPAN_INVALID_ARGUMENT);
  size_t bytes = 1;
  EXPECT_EQ(attnspan_forward_workspace_bytes(&tiny.args, nullptr, &bytes), ATTNSPAN_OK);
  EXPECT_EQ(bytes, 0u);
}

TEST(Capi, Backends) {
  std::vector<std::string> names;
  for (int32_t i = 0; i < attnspan_backend_count(); ++i) {
    attnspan_backend_info info = attnspan_backend_info_init();
    ASSERT_EQ(attnspan_backend_at(i, &info), ATTNSPAN_OK);
    EXPECT_NE(info.description[0], '\0');
    names.emplace_back(info.name);
  }
  EXPECT_THAT(names, testing::Contains("reference"));
  attnspan_backend_info info = attnspan_backend_info_init();
  EXPECT_EQ(attnspan_backend_at(-1, &info), ATTNSPAN_INVALID_ARGUMENT);
  EXPECT_EQ(attnspan_backend_at(99, &info), ATTNSPAN_INVALID_ARGUMENT);
  EXPECT_STRNE(attnspan_version(), "");
}

TEST(Capi, BadCallsAreStatusesWithMessages) {
  Tiny tiny;
  const auto expect_refused = [&](const std::string& message) {
    EXPECT_EQ(attnspan_forward(&tiny.args, nullptr, nullptr), ATTNSPAN_INVALID_ARGUMENT);
    EXPECT_THAT(attnspan_last_error(), HasSubstr(message));
    EXPECT_EQ(tiny.out[0], -1);
    tiny.args = forward_args_from_c(tiny.query, tiny.key, tiny.value, tiny.out);
  };
  EXPECT_EQ(attnspan_forward(nullptr, nullptr, nullptr), ATTNSPAN_INVALID_ARGUMENT);
  EXPECT_THAT(attnspan_last_error(), HasSubstr("args: found a null pointer"));
  tiny.args.struct_size = 0;
  expect_refused("args: found struct_size 0");
  tiny.args.query.rank = 7;
  expect_refused("query: found rank 7");
  tiny.args.query.rank = -1;
  expect_refused("query: found rank -1");
  tiny.args.key.dtype = 17;
  expect_refused("key: found dtype 17");
  tiny.args.value.device = -3;
  expect_refused("value: found device -3");
  tiny.args.value.shape[1] = -3;
  expect_refused("value: found extent -3");
  tiny.args.query.data = nullptr;
  expect_refused("query: found no data (null address)");
  tiny.args.out = attnspan_tensor{};
  expect_refused("out: found no tensor");
  attnspan_options options = attnspan_options_init();
  options.diagonal_kind = 3;
  tiny.args.options = &options;
  expect_refused("diagonal: found kind 3");
  attnspan_execution execution = attnspan_execution_init();
  execution.backend = "gpu";
  EXPECT_EQ(attnspan_forward(&tiny.args, &execution, nullptr), ATTNSPAN_INVALID_ARGUMENT);
  execution.backend = "metal";
  EXPECT_EQ(attnspan_forward(&tiny.args, &execution, nullptr), ATTNSPAN_UNAVAILABLE);
}

TEST(Capi, StructsOfOtherVersions) {
  Tiny tiny;
  // An older header without the fields behind causal: the rest has its defaults (window -1, not 0).
  attnspan_options older = attnspan_options_init();
  older.struct_size = offsetof(attnspan_options, nan_guard);
  older.window_left = older.window_right = 0;
  tiny.args.options = &older;
  ASSERT_EQ(attnspan_forward(&tiny.args, nullptr, nullptr), ATTNSPAN_OK) << attnspan_last_error();
  EXPECT_NEAR(tiny.out[0], 3, 1e-6);
  // A newer header: unknown fields may be there, but not be asked for.
  struct {
    attnspan_options known = attnspan_options_init();
    int64_t unknown = 0;
  } newer;
  newer.known.struct_size = sizeof newer;
  tiny.args.options = &newer.known;
  EXPECT_EQ(attnspan_forward(&tiny.args, nullptr, nullptr), ATTNSPAN_OK) << attnspan_last_error();
  newer.unknown = 1;
  EXPECT_EQ(attnspan_forward(&tiny.args, nullptr, nullptr), ATTNSPAN_INVALID_ARGUMENT);
  EXPECT_THAT(attnspan_last_error(), HasSubstr("does not know"));
  // A caller's smaller result is not written past its end.
  attnspan_result small = attnspan_result_init();
  small.struct_size = offsetof(attnspan_result, nonfinite_replaced);
  small.nonfinite_replaced = 77;
  tiny.args.options = nullptr;
  ASSERT_EQ(attnspan_forward(&tiny.args, nullptr, &small), ATTNSPAN_OK);
  EXPECT_EQ(small.nonfinite_replaced, 77);
  EXPECT_STRNE(small.backend, "");
}

TEST(Capi, ErrorsBelongToTheirThread) {
  Tiny tiny;
  tiny.args.query.rank = 7;
  ASSERT_EQ(attnspan_forward(&tiny.args, nullptr, nullptr), ATTNSPAN_INVALID_ARGUMENT);
  std::string elsewhere = "?";
  std::thread([&] { elsewhere = attnspan_last_error(); }).join();
  EXPECT_EQ(elsewhere, "");
  EXPECT_STRNE(attnspan_last_error(), "");
}

}  // namespace
}  // namespace attnspan
