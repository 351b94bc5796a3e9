// Validation: every refusal names the argument, what was found and what was expected.

#include "core/problem.hpp"

#include <gtest/gtest.h>

#include <functional>
#include <vector>

namespace attnspan {
namespace {

// A valid call: batch 2, seqlen_q 3, seqlen_k 4, heads 4 over 2 KV heads, head_dim 8, head_dim_v 6.
struct Valid {
  std::vector<float> memory = std::vector<float>(4096);
  std::vector<int32_t> ints = std::vector<int32_t>(64);
  ForwardArgs args;

  Valid() {
    args.query = bshd(memory.data(), DType::f32, 2, 3, 4, 8);
    args.key = bshd(memory.data(), DType::f32, 2, 4, 2, 8);
    args.value = bshd(memory.data(), DType::f32, 2, 4, 2, 6);
    args.out = bshd(memory.data(), DType::f32, 2, 3, 4, 6);
    args.lse = contiguous(memory.data(), DType::f32, {2, 4, 3});
  }
};

TEST(Problem, FillsInDefaults) {
  Valid v;
  v.args.options.causal = true;
  const Problem p = make_problem(v.args);
  EXPECT_EQ(p.group(), 2);
  EXPECT_FLOAT_EQ(p.softmax_scale, 0.35355339F);
  EXPECT_EQ(p.window_right, 0);
  EXPECT_EQ(p.window_left, kUnlimited);
  EXPECT_EQ(sequence(p, 1).rule.diagonal, 1);
}

TEST(Problem, PackedSequencesComeFromCuSeqlens) {
  Valid v;
  v.ints = {0, 2, 2, 5, 0, 1, 4, 4};
  v.args.query = contiguous(v.memory.data(), DType::f32, {5, 4, 8});
  v.args.key = contiguous(v.memory.data(), DType::f32, {4, 2, 8});
  v.args.value = contiguous(v.memory.data(), DType::f32, {4, 2, 6});
  v.args.out = contiguous(v.memory.data(), DType::f32, {5, 4, 6});
  v.args.lse = contiguous(v.memory.data(), DType::f32, {4, 5});
  v.args.options.cu_seqlens_q = contiguous(v.ints.data(), DType::i32, {4});
  v.args.options.cu_seqlens_k = contiguous(v.ints.data() + 4, DType::i32, {4});
  const Problem p = make_problem(v.args);
  EXPECT_EQ(p.batch, 3);
  EXPECT_EQ(sequence(p, 1).seqlen_q, 0);
  EXPECT_EQ(sequence(p, 1).seqlen_k, 3);
  EXPECT_EQ(sequence(p, 2).q_row0, 2);
  EXPECT_EQ(sequence(p, 2).seqlen_k, 0);
  EXPECT_EQ(sequence(p, 0).rule.diagonal, -1);
}

struct BadCall {
  const char* name;
  std::function<void(Valid&)> spoil;
  const char* message;
};

class BadCallTest : public testing::TestWithParam<BadCall> {};

TEST_P(BadCallTest, IsRefusedInOneLine) {
  Valid v;
  GetParam().spoil(v);
  try {
    make_problem(v.args);
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), GetParam().message);
    EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos);
  }
}

const BadCall kBadCalls[] = {
    {"no_query", [](Valid& v) { v.args.query = {}; }, "query: found no tensor, expected one"},
    {"query_rank",
     [](Valid& v) {
       v.args.query = contiguous(v.memory.data(), DType::f32, {3, 4, 8});
     },
     "query: found rank 3 [3, 4, 8], expected rank 4 ([batch, seqlen, heads, dim])"},
    {"query_int", [](Valid& v) { v.args.query.dtype = DType::i32; },
     "query: found int32, expected f32, f16 or bf16"},
    {"mixed_dtypes", [](Valid& v) { v.args.value.dtype = DType::f16; }, "value: found f16, expected f32"},
    {"heads_do_not_divide", [](Valid& v) { v.args.query = bshd(v.memory.data(), DType::f32, 2, 3, 3, 8); },
     "query: found 3 heads over 2 KV heads, expected heads that are a multiple of KV heads"},
    {"head_dim_differs", [](Valid& v) { v.args.key = bshd(v.memory.data(), DType::f32, 2, 4, 2, 7); },
     "key: found [2, 4, 2, 7], expected [2, any, any, 8] (batch and head_dim like query)"},
    {"value_length_differs", [](Valid& v) { v.args.value = bshd(v.memory.data(), DType::f32, 2, 5, 2, 6); },
     "value: found [2, 5, 2, 6], expected [2, 4, 2, any] (batch, seqlen and heads like key)"},
    {"head_dim_too_large", [](Valid& v) { v.args.query = bshd(v.memory.data(), DType::f32, 1, 1, 1, 577); },
     "query: found head dim 577, expected 1 to 576"},
    {"last_dim_strided", [](Valid& v) { v.args.query.stride[3] = 2; },
     "query: found stride 2 in the last dimension, expected a contiguous last dimension (stride 1)"},
    {"no_data", [](Valid& v) { v.args.key.data = nullptr; },
     "key: found no data (null address), expected an address of 128 elements"},
    {"out_shape", [](Valid& v) { v.args.out = bshd(v.memory.data(), DType::f32, 2, 3, 4, 8); },
     "out: found [2, 3, 4, 8], expected [2, 3, 4, 6] (batch, seqlen_q and heads like query)"},
    {"out_overlaps", [](Valid& v) { v.args.out.stride[0] = 0; },
     "out: found strides under which elements overlap (stride 0 over an inner span of 1), expected one "
     "address per "
     "element, since it is written"},
    {"lse_shape",
     [](Valid& v) {
       v.args.lse = contiguous(v.memory.data(), DType::f32, {2, 3, 4});
     },
     "lse: found [2, 3, 4], expected [2, 4, 3] (batch, heads, seqlen_q)"},
    {"window", [](Valid& v) { v.args.options.window_left = -2; },
     "window_left: found -2, expected 0 or more, or -1 for unlimited"},
    {"softcap", [](Valid& v) { v.args.options.softcap = -1; },
     "softcap: found -1.000000, expected 0 (off) or a positive number"},
    {"bias_extent",
     [](Valid& v) {
       v.args.options.bias = contiguous(v.memory.data(), DType::f32, {2, 4, 3, 5});
     },
     "bias: found extent 5 in dimension 3, expected 4 or 1"},
    {"key_start_decreases",
     [](Valid& v) {
       v.ints = {2, 1, 3};
       v.args.options.key_start = contiguous(v.ints.data(), DType::i32, {3});
     },
     "key_start: found entry 1 = 1 after 2, expected values that never decrease along the sequence"},
    {"seqused_beyond",
     [](Valid& v) {
       v.ints = {4, 5};
       v.args.options.seqused_k = contiguous(v.ints.data(), DType::i32, {2});
     },
     "seqused_k: found 5 for sequence 1, expected 0 to seqlen_k = 4"},
    {"sinks_shape", [](Valid& v) { v.args.options.sinks = contiguous(v.memory.data(), DType::f32, {2}); },
     "sinks: found [2], expected [4] (heads)"},
    {"one_cu_seqlens",
     [](Valid& v) {
       v.args.query = contiguous(v.memory.data(), DType::f32, {3, 4, 8});
       v.args.options.cu_seqlens_q = contiguous(v.ints.data(), DType::i32, {2});
     },
     "cu_seqlens_k: found no tensor, expected both cu_seqlens_q and cu_seqlens_k, or neither"},
};

INSTANTIATE_TEST_SUITE_P(Calls, BadCallTest, testing::ValuesIn(kBadCalls),
                         [](const auto& info) { return info.param.name; });

TEST(Problem, CuSeqlensMustCoverTheTensor) {
  Valid v;
  v.ints = {0, 2, 1, 5, 0, 1, 4, 4};
  v.args.query = contiguous(v.memory.data(), DType::f32, {5, 4, 8});
  v.args.key = contiguous(v.memory.data(), DType::f32, {4, 2, 8});
  v.args.options.cu_seqlens_q = contiguous(v.ints.data(), DType::i32, {4});
  v.args.options.cu_seqlens_k = contiguous(v.ints.data() + 4, DType::i32, {4});
  try {
    make_problem(v.args);
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(),
                 "cu_seqlens_q: found entry 2 = 1 after 2, expected offsets that never decrease");
  }
  v.ints = {0, 2, 2, 4, 0, 1, 4, 4};
  try {
    make_problem(v.args);
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "cu_seqlens_q: found last entry 4, expected 5 (rows of the packed tensor)");
  }
}

}  // namespace
}  // namespace attnspan
