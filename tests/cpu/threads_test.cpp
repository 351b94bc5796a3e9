// The same bits at any number of threads and in any company. These are the tests for ThreadSanitizer.

#include <gtest/gtest.h>

#include <cstring>

#include "check/run_case.hpp"

namespace attnspan::check {
namespace {

bool same_bits(const Buffer& a, const Buffer& b) {
  for (int64_t i = 0; i < a.tensor().numel(); ++i) {
    const float x = a.get(i), y = b.get(i);
    if (std::memcmp(&x, &y, sizeof x) != 0) return false;
  }
  return true;
}

Execution cpu(int threads) {
  Execution execution;
  execution.backend = "cpu";
  execution.threads = threads;
  return execution;
}

CaseSpec base() {
  CaseSpec s;
  s.name = "threads";
  s.batch = 2;
  s.heads = 4;
  s.kv_heads = 2;
  s.seqlen_q = s.seqlen_k = 200;
  s.head_dim = s.head_dim_v = 40;
  s.causal = true;
  s.sinks = true;
  return s;
}

CaseSpec with(void (*change)(CaseSpec&)) {
  CaseSpec s = base();
  change(s);
  return s;
}

// Enough rows over one KV head for several chunks of backward.
CaseSpec long_one() {
  return with([](CaseSpec& s) {
    s.batch = 1;
    s.heads = 3;
    s.kv_heads = 1;
    s.seqlen_q = 1100;
    s.seqlen_k = 300;
    s.head_dim = s.head_dim_v = 24;
    s.window_left = 150;
  });
}

TEST(CpuThreads, ForwardGivesTheSameBits) {
  for (const CaseSpec& spec : {base(), with([](CaseSpec& s) { s.dtype = DType::bf16; }), long_one()}) {
    const Case c(spec);
    const Case::ForwardOutputs expected = c.forward_outputs();
    forward(c.forward_args(expected), cpu(1));
    for (const int threads : {2, 3, 7}) {
      const Case::ForwardOutputs found = c.forward_outputs();
      forward(c.forward_args(found), cpu(threads));
      EXPECT_TRUE(same_bits(found.out, expected.out)) << threads << " threads";
      EXPECT_TRUE(same_bits(found.lse, expected.lse)) << threads << " threads";
    }
  }
}

TEST(CpuThreads, BackwardGivesTheSameBits) {
  for (const CaseSpec& spec : {base(), with([](CaseSpec& s) { s.dtype = DType::bf16; }), long_one()}) {
    const Case c(spec);
    const Case::ForwardOutputs kept = c.forward_outputs();
    forward(c.forward_args(kept), cpu(2));
    const Case::BackwardOutputs expected = c.backward_outputs();
    backward(c.backward_args(kept, expected), cpu(1));
    for (const int threads : {2, 3, 7}) {
      const Case::BackwardOutputs found = c.backward_outputs();
      backward(c.backward_args(kept, found), cpu(threads));
      EXPECT_TRUE(same_bits(found.dq, expected.dq)) << threads << " threads";
      EXPECT_TRUE(same_bits(found.dk, expected.dk)) << threads << " threads";
      EXPECT_TRUE(same_bits(found.dv, expected.dv)) << threads << " threads";
      EXPECT_TRUE(same_bits(found.d_sinks, expected.d_sinks)) << threads << " threads";
    }
  }
}

TEST(CpuThreads, BackwardInSeveralChunksAgreesWithReference) {
  const CaseResult result = run_backward(Case(long_one()), cpu(3));
  EXPECT_EQ(result.verdict, Verdict::pass) << result.message;
}

TEST(CpuThreads, MergeGivesTheSameBits) {
  const Case a(base()), b(with([](CaseSpec&s) { s.seed = 2; }));
  const Case::ForwardOutputs of_a = a.forward_outputs(), of_b = b.forward_outputs();
  forward(a.forward_args(of_a), cpu(2));
  forward(b.forward_args(of_b), cpu(2));
  const auto merged = [&](int threads) {
    Case::ForwardOutputs to = a.forward_outputs();
    merge_states({of_a.out.tensor(), of_a.lse.tensor(), of_b.out.tensor(), of_b.lse.tensor(), to.out.tensor(),
                  to.lse.tensor()},
                 cpu(threads));
    return to;
  };
  const Case::ForwardOutputs expected = merged(1), found = merged(3);
  EXPECT_TRUE(same_bits(found.out, expected.out));
  EXPECT_TRUE(same_bits(found.lse, expected.lse));
}

// The first of two sequences alone: the bits it has in the batch.
TEST(CpuThreads, ASequenceDoesNotFeelItsBatch) {
  const Case c(base());
  const Case::ForwardOutputs whole = c.forward_outputs();
  forward(c.forward_args(whole), cpu(2));
  const Case::BackwardOutputs whole_gradients = c.backward_outputs();
  backward(c.backward_args(whole, whole_gradients), cpu(2));

  const Case::ForwardOutputs alone = c.forward_outputs();
  const Case::BackwardOutputs alone_gradients = c.backward_outputs();
  const auto first = [](Tensor& tensor) { tensor.shape[0] = 1; };
  ForwardArgs args = c.forward_args(alone);
  for (Tensor* t : {&args.query, &args.key, &args.value, &args.out, &args.lse}) first(*t);
  forward(args, cpu(2));
  BackwardArgs gradients = c.backward_args(whole, alone_gradients);
  for (Tensor* t : {&gradients.query, &gradients.key, &gradients.value, &gradients.out, &gradients.lse,
                    &gradients.dout, &gradients.dq, &gradients.dk, &gradients.dv}) {
    first(*t);
  }
  gradients.d_sinks = {};  // a sum over the batch
  backward(gradients, cpu(2));

  const auto expect_same = [](const Buffer& part, const Buffer& all, const char* name) {
    for (int64_t i = 0; i < all.tensor().numel() / 2; ++i) ASSERT_EQ(part.get(i), all.get(i)) << name;
  };
  expect_same(alone.out, whole.out, "out");
  expect_same(alone.lse, whole.lse, "lse");
  expect_same(alone_gradients.dq, whole_gradients.dq, "dq");
  expect_same(alone_gradients.dk, whole_gradients.dk, "dk");
  expect_same(alone_gradients.dv, whole_gradients.dv, "dv");
}

}  // namespace
}  // namespace attnspan::check
