// Decode over caches: the same bits at any number of threads and in any batch, values inside keys (MLA), and
// the stated accuracy of int16 arithmetic over tbq4.

#include "core/simd_targets.hpp"

#include <gtest/gtest.h>
#include <hwy/highway.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <optional>

#include "check/cache_builder.hpp"
#include "check/run_case.hpp"

namespace attnspan::check {
namespace {

Execution on(const char* backend, int threads = 0) {
  Execution execution;
  execution.backend = backend;
  execution.threads = threads;
  return execution;
}

// A batch of caches and the queries of a step.
struct Step {
  int64_t rows = 1, heads = 4, kv_heads = 1, head_dim = 128, head_dim_v = 128;
  KvFormat k_format = KvFormat::f16, v_format = KvFormat::f16;
  std::vector<int64_t> seqlens = {2900};
  float query_scale = 1;

  Random random{7};
  Buffer query, key, value;
  std::optional<BuiltCache> cache;

  void build() {
    const auto batch = static_cast<int64_t>(seqlens.size());
    const int64_t longest = *std::max_element(seqlens.begin(), seqlens.end());
    query = Buffer::poisoned({batch, rows, heads, head_dim}, DType::f32);
    key = Buffer::poisoned({batch, longest, kv_heads, head_dim}, DType::f32);
    value = Buffer::poisoned({batch, longest, kv_heads, head_dim_v}, DType::f32);
    query.fill_normal(random, query_scale);
    key.fill_normal(random);
    value.fill_normal(random);
    cache.emplace(key, value, seqlens, k_format, v_format, 64, random);
  }

  struct Outputs {
    Buffer out, lse;
  };
  // Sequences [first, first + count) of the batch alone.
  Outputs run(const Execution& execution, int64_t first, int64_t count, KvView view) const {
    Outputs outputs{Buffer::poisoned({count, rows, heads, view.value.dim}, DType::f32),
                    Buffer::poisoned({count, heads, rows}, DType::f32)};
    view.batch = count;
    view.block_table = slice(view.block_table, first, count);
    view.seqlens = slice(view.seqlens, first, count);
    ForwardArgs args;
    args.query = slice(query.tensor(), first, count);
    args.cache = &view;
    args.out = outputs.out.tensor();
    args.lse = outputs.lse.tensor();
    args.options.causal = true;
    forward(args, execution);
    return outputs;
  }
  Outputs run(const Execution& execution) const {
    return run(execution, 0, static_cast<int64_t>(seqlens.size()), cache->view());
  }

  static Tensor slice(Tensor tensor, int64_t first, int64_t count) {
    tensor.byte_offset += first * tensor.stride[0] * size_of(tensor.dtype);
    tensor.shape[0] = count;
    return tensor;
  }
};

// Elements [first, first + count) of a, and all of b.
bool same_bits(const Buffer& a, int64_t first, const Buffer& b) {
  for (int64_t i = 0; i < b.tensor().numel(); ++i) {
    const float x = a.get(first + i), y = b.get(i);
    if (std::memcmp(&x, &y, sizeof x) != 0) return false;
  }
  return true;
}

// |found - expected| / |expected|
double relative_error(const Buffer& found, const Buffer& expected) {
  double error = 0, energy = 0;
  for (int64_t i = 0; i < expected.tensor().numel(); ++i) {
    error += std::pow(found.get(i) - expected.get(i), 2);
    energy += std::pow(expected.get(i), 2);
  }
  return std::sqrt(error / energy);
}

constexpr KvFormat kFormats[] = {KvFormat::f32, KvFormat::f16, KvFormat::bf16, KvFormat::q8, KvFormat::tbq4};

TEST(CpuDecode, GivesTheSameBitsAtAnyNumberOfThreads) {
  for (const KvFormat format : kFormats) {
    Step step;
    step.k_format = step.v_format = format;
    step.build();
    const Step::Outputs one = step.run(on("cpu", 1));
    for (const int threads : {2, 3, 7}) {
      const Step::Outputs many = step.run(on("cpu", threads));
      EXPECT_TRUE(same_bits(many.out, 0, one.out)) << name_of(format) << ", " << threads << " threads";
      EXPECT_TRUE(same_bits(many.lse, 0, one.lse)) << name_of(format) << ", " << threads << " threads";
    }
  }
}

TEST(CpuDecode, GivesASequenceTheSameBitsInAnyBatch) {
  for (const KvFormat format : kFormats) {
    Step step;
    step.rows = 3;
    step.kv_heads = 2;
    step.k_format = step.v_format = format;
    step.seqlens = {1900, 0, 40, 700};
    step.build();
    const Step::Outputs together = step.run(on("cpu"));
    for (int64_t b = 0; b < 4; ++b) {
      const Step::Outputs alone = step.run(on("cpu"), b, 1, step.cache->view());
      EXPECT_TRUE(same_bits(together.out, b * alone.out.tensor().numel(), alone.out)) << name_of(format) << b;
      EXPECT_TRUE(same_bits(together.lse, b * alone.lse.tensor().numel(), alone.lse)) << name_of(format) << b;
    }
  }
}

TEST(CpuDecode, ReadsValuesInsideKeys) {
  for (const KvFormat format : kFormats) {
    for (const auto& [head_dim, head_dim_v] :
         {std::pair<int64_t, int64_t>{576, 512}, {192, 128}, {128, 40}}) {
      Step step;
      step.rows = 2;
      step.head_dim = head_dim;
      step.head_dim_v = head_dim_v;
      step.k_format = step.v_format = format;
      step.seqlens = {700, 77};
      step.build();
      KvView view = step.cache->view();
      view.value = view.key;
      view.value.dim = head_dim_v;
      const Step::Outputs found = step.run(on("cpu"), 0, 2, view);
      const Step::Outputs expected = step.run(on("reference"), 0, 2, view);
      const double allowed = format == KvFormat::tbq4 ? 1e-3 : 1e-6;
      EXPECT_LT(relative_error(found.out, expected.out), allowed) << name_of(format) << " " << head_dim;
    }
  }
}

// Page numbers with something else between them, as a column of a larger table has.
TEST(CpuDecode, ReadsTheBlockTableWithItsStrides) {
  for (const int64_t rows : {1, 40}) {  // decode, and the panels of forward
    Step step;
    step.rows = rows;
    step.seqlens = {700, 77};
    step.build();
    const Step::Outputs expected = step.run(on("cpu"));
    KvView view = step.cache->view();
    const Tensor& table = view.block_table;
    const auto* pages =
        reinterpret_cast<const int32_t*>(static_cast<const char*>(table.data) + table.byte_offset);
    std::vector<int32_t> spread(static_cast<size_t>(table.numel() * 3), -1);
    for (int64_t i = 0; i < table.numel(); ++i) spread[static_cast<size_t>(i * 3)] = pages[i];
    view.block_table = contiguous(spread.data(), DType::i32, {table.shape[0], table.shape[1]});
    view.block_table.stride[0] = 3 * table.shape[1];
    view.block_table.stride[1] = 3;
    const Step::Outputs found = step.run(on("cpu"), 0, 2, view);
    EXPECT_TRUE(same_bits(found.out, 0, expected.out)) << rows << " rows";
  }
}

class CpuDecodeOnTarget : public testing::TestWithParam<int64_t> {
 protected:
  void SetUp() override { hwy::GetChosenTarget().Update(GetParam()); }
  void TearDown() override { hwy::GetChosenTarget().DeInit(); }
};

// A query that is no number leaves no number behind, and only in its own row: a finite answer would hide it
// from nan_guard. The numbers of rows go through decode and through the panels of forward.
TEST_P(CpuDecodeOnTarget, ShowsAQueryThatIsNoNumber) {
  for (const KvFormat format : kFormats) {
    for (const int64_t rows : {1, 40}) {
      Step step;
      step.rows = rows;
      step.k_format = step.v_format = format;
      step.seqlens = {300, 300};
      step.build();
      const Step::Outputs before = step.run(on("cpu"));
      step.query.set(5, std::numeric_limits<float>::quiet_NaN());  // row 0, head 0
      const Step::Outputs after = step.run(on("cpu"));
      for (int64_t i = 0; i < step.head_dim_v; ++i) {
        ASSERT_TRUE(std::isnan(after.out.get(i))) << name_of(format) << ", rows " << rows << ", value " << i;
      }
      EXPECT_TRUE(std::isnan(after.lse.get(0))) << name_of(format) << ", rows " << rows;
      const int64_t sequence = before.out.tensor().numel() / 2;
      for (int64_t i = sequence; i < 2 * sequence; ++i) ASSERT_EQ(before.out.get(i), after.out.get(i));
    }
  }
}

// Against attention over the decoded values in double, from diffuse to sharp softmax, at every block size.
TEST_P(CpuDecodeOnTarget, StaysWithinTheStatedErrorOverTbq4) {
  for (const float query_scale : {0.1F, 1.0F, 4.0F}) {
    for (const int64_t head_dim : {64, 96, 128, 192, 256}) {
      Step step;
      step.heads = 7;
      step.head_dim = step.head_dim_v = head_dim;
      step.k_format = step.v_format = KvFormat::tbq4;
      step.query_scale = query_scale;
      step.seqlens = {1501, 65};
      step.build();
      const Step::Outputs found = step.run(on("cpu")), expected = step.run(on("reference"));
      EXPECT_LT(relative_error(found.out, expected.out), 1e-3) << head_dim << ", query x " << query_scale;
      EXPECT_LT(relative_error(found.lse, expected.lse), 1e-4) << head_dim << ", query x " << query_scale;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Cpu, CpuDecodeOnTarget, testing::ValuesIn(hwy::SupportedAndGeneratedTargets()),
                         [](const auto& info) { return std::string(hwy::TargetName(info.param)); });

}  // namespace
}  // namespace attnspan::check
