// What the grid does not reach: key splits, probs, nan_guard, merges, recycled pages, shared key and value
// rows, and that a sequence's answer is its own.

#include <gtest/gtest.h>

#include <bit>
#include <cmath>

#include "check/grid.hpp"
#include "check/run_case.hpp"
#include "core/dtype.hpp"
#include "emulated_device.hpp"
#include "metal/launch_plan.hpp"
#include "registry/registry.hpp"

namespace attnspan::metal_emulation {
namespace {

using check::Buffer;
using check::Case;
using check::CaseSpec;
using check::Random;
using check::Verdict;

const Execution kMetal{.backend = "metal"};
const Execution kReference{.backend = "reference"};

CaseSpec long_decode() {
  CaseSpec s;
  s.name = "long_decode";
  s.batch = 2;
  s.seqlen_q = 3;
  s.seqlen_k = 1100;
  s.heads = 6;
  s.kv_heads = 2;
  s.head_dim = s.head_dim_v = 64;
  s.causal = true;
  return s;
}

void expect_agrees(const CaseSpec& spec) {
  const check::CaseResult result = check::run_forward(Case(spec), kMetal);
  EXPECT_EQ(result.verdict, Verdict::pass) << spec.name << ": " << result.message;
}

TEST(MetalDecode, SplitsOfEveryFormatAgree) {
  for (KvFormat format : {KvFormat::f32, KvFormat::f16, KvFormat::bf16, KvFormat::q8, KvFormat::tbq4}) {
    CaseSpec s = long_decode();
    s.cache = true;
    s.k_format = s.v_format = format;
    s.sinks = format == KvFormat::tbq4;
    s.name = std::string("splits_") + name_of(format);
    expect_agrees(s);
  }
  // The hull of the first 8 rows ends at 512 keys, that of the last 8 beyond: 2 splits and 3.
  CaseSpec s = long_decode();
  s.heads = s.kv_heads;
  s.seqlen_q = 16;
  s.seqlen_k = 520;
  s.name = "splits_at_a_boundary";
  expect_agrees(s);
}

TEST(MetalDecode, SplitsWithFeaturesAgree) {
  CaseSpec s = long_decode();
  s.seqused_k = s.sinks = s.alibi = s.bias = s.masking_bias = true;
  s.softcap = 4;
  expect_agrees(s);
  s.causal = false;
  s.window_left = 600;
  s.window_right = 40;
  s.diagonal = Diagonal::at(500);
  s.documents = check::Documents::right_padded;
  s.seqused_k = false;
  expect_agrees(s);
}

TEST(MetalPlan, LongDecodeIsSplitAndPrefillIsNot) {
  const Case c(long_decode());
  const Case::ForwardOutputs outputs = c.forward_outputs();
  ForwardArgs args = c.forward_args(outputs);
  const metal::Plan plan = metal::plan_forward(make_problem(args));
  ASSERT_EQ(plan.launches.size(), 2U);
  EXPECT_EQ(plan.launches[0].kernel, "attention_forward_decode_64_f32");
  EXPECT_EQ(plan.launches[0].groups[2], 2U * 5U);  // ceil(1100 / 256) splits of each sequence
  EXPECT_EQ(plan.launches[1].kernel, "attention_merge");
  CaseSpec prefill = long_decode();
  prefill.seqlen_q = 17;
  const Case longer(prefill);
  const Case::ForwardOutputs more = longer.forward_outputs();
  EXPECT_EQ(metal::plan_forward(make_problem(longer.forward_args(more))).launches.size(), 1U);
}

// The same sequence alone and beside a longer one, whose length decides the grid: the same bits.
TEST(MetalDecode, AnswersDoNotDependOnBatchmates) {
  const CaseSpec spec = long_decode();
  const Case c(spec);
  const Case::ForwardOutputs together = c.forward_outputs(), alone = c.forward_outputs();
  ForwardArgs args = c.forward_args(together);
  const int32_t lengths[2] = {200, 1100};
  args.options.seqused_k = contiguous(lengths, DType::i32, {2});
  forward(args, kMetal);
  ForwardArgs first = c.forward_args(alone);
  for (Tensor* t : {&first.query, &first.key, &first.value, &first.out, &first.lse}) t->shape[0] = 1;
  first.key.shape[1] = first.value.shape[1] = 200;  // by itself: no split at all
  forward(first, kMetal);
  for (int64_t i = 0; i < first.out.numel(); ++i) {
    ASSERT_EQ(std::bit_cast<uint32_t>(together.out.get(i)), std::bit_cast<uint32_t>(alone.out.get(i))) << i;
  }
}

// Packed rows of `query` over packed keys that are their own values, with the cumulative lengths given.
std::vector<float> attend_packed(const Buffer& query, const Buffer& key, const std::vector<int32_t>& rows,
                                 const std::vector<int32_t>& keys, const Execution& execution) {
  const auto part = [](const Buffer& buffer, const std::vector<int32_t>& starts) {
    Tensor tensor = buffer.tensor();
    tensor.byte_offset = starts.front() * tensor.stride[0] * 4;
    tensor.shape[0] = starts.back() - starts.front();
    return tensor;
  };
  const auto from_zero = [](std::vector<int32_t> starts) {
    const int32_t first = starts.front();
    for (int32_t& start : starts) start -= first;
    return starts;
  };
  const std::vector<int32_t> starts_q = from_zero(rows), starts_k = from_zero(keys);
  const int64_t count = static_cast<int64_t>(rows.size());
  ForwardArgs args;
  args.query = part(query, rows);
  args.key = args.value = part(key, keys);
  args.options.cu_seqlens_q = contiguous(starts_q.data(), DType::i32, {count});
  args.options.cu_seqlens_k = contiguous(starts_k.data(), DType::i32, {count});
  args.options.causal = true;
  const Buffer out = Buffer::poisoned({args.query.shape[0], 4, 64}, DType::f32);
  args.out = out.tensor();
  forward(args, execution);
  std::vector<float> values;
  for (int64_t i = 0; i < args.out.numel(); ++i) values.push_back(static_cast<float>(out.get(i)));
  return values;
}

// Short sequences of a packed call are split, long ones are not, and each has the bits that it has alone.
TEST(MetalDecode, PackedSequencesAreSplitByTheirOwnRows) {
  Random random(12);
  for (const std::vector<int32_t>& lengths : {std::vector<int32_t>{2, 90, 0, 16, 1}, {1, 3, 2, 2, 16}}) {
    std::vector<int32_t> rows = {0}, keys = {0};
    for (size_t b = 0; b < lengths.size(); ++b) {
      rows.push_back(rows.back() + lengths[b]);
      keys.push_back(keys.back() + std::vector<int32_t>{700, 300, 5, 600, 90}[b]);
    }
    Buffer query = Buffer::poisoned({rows.back(), 4, 64}, DType::f32),
           key = Buffer::poisoned({keys.back(), 2, 64}, DType::f32);
    query.fill_normal(random);
    key.fill_normal(random);
    const std::vector<float> found = attend_packed(query, key, rows, keys, kMetal),
                             expected = attend_packed(query, key, rows, keys, kReference);
    for (size_t i = 0; i < found.size(); ++i) ASSERT_NEAR(found[i], expected[i], 1e-5) << i;
    for (size_t b = 0; b < lengths.size(); ++b) {
      const std::vector<float> alone =
          attend_packed(query, key, {rows[b], rows[b + 1]}, {keys[b], keys[b + 1]}, kMetal);
      for (size_t i = 0; i < alone.size(); ++i) {
        ASSERT_EQ(std::bit_cast<uint32_t>(alone[i]), std::bit_cast<uint32_t>(found[rows[b] * 256 + i]))
            << "sequence " << b << ", " << i;
      }
    }
  }
}

// Tiles beyond a sequence's rows, and launches that are not its own, do nothing.
TEST(MetalPlan, APackedCallDoesWhatItsSequencesDo) {
  Random random(13);
  const std::vector<int32_t> rows = {0, 32, 37, 85}, keys = {0, 300, 900, 1180};  // lengths 32, 5, 48
  Buffer query = Buffer::poisoned({rows.back(), 4, 64}, DType::f32),
         key = Buffer::poisoned({keys.back(), 2, 64}, DType::f32);
  query.fill_normal(random);
  key.fill_normal(random);
  const auto work = [&](const std::vector<int32_t>& q, const std::vector<int32_t>& k) {
    const uint64_t before = emu::Machine::rendezvous();
    attend_packed(query, key, q, k, kMetal);
    return emu::Machine::rendezvous() - before;
  };
  work(rows, keys);  // the first call probes the device
  uint64_t alone = 0;
  for (size_t b = 0; b < 3; ++b) alone += work({rows[b], rows[b + 1]}, {keys[b], keys[b + 1]});
  EXPECT_EQ(work(rows, keys), alone);
}

// A decode in two launches, on tensors of the device: only they come with the caller's workspace.
TEST(MetalForward, TakesAWorkspaceThatIsLargeEnough) {
  DeviceMemory& memory = *select_backend(Device::metal, "metal").memory();
  Random random(9);
  Buffer query = Buffer::poisoned({1, 1, 2, 64}, DType::f32),
         key = Buffer::poisoned({1, 600, 2, 64}, DType::f32),
         out = Buffer::poisoned({1, 1, 2, 64}, DType::f32),
         expected = Buffer::poisoned({1, 1, 2, 64}, DType::f32);
  query.fill_normal(random);
  key.fill_normal(random);
  ForwardArgs args;
  args.query = query.tensor();
  args.key = args.value = key.tensor();
  args.out = expected.tensor();
  forward(args, kReference);
  args.out = out.tensor();
  std::vector<void*> buffers;
  for (Tensor* t : {&args.query, &args.key, &args.value, &args.out}) {
    const size_t bytes = static_cast<size_t>(t->numel() * 4);
    buffers.push_back(memory.allocate(bytes));
    memory.upload(buffers.back(), t->data, bytes);
    t->data = buffers.back();
    t->device = Device::metal;
  }
  Execution execution = kMetal;
  const size_t bytes = workspace_bytes(args, execution);
  ASSERT_GT(bytes, 2U * 3U * 64U * 4U);  // two heads, three splits
  buffers.push_back(execution.workspace = memory.allocate(bytes));
  execution.workspace_bytes = bytes - 1;
  try {
    forward(args, execution);
    ADD_FAILURE() << "a workspace that is one byte short was taken";
  } catch (const Error& error) {
    EXPECT_EQ(error.argument(), "workspace_bytes");
    EXPECT_NE(std::string(error.what()).find(std::to_string(bytes - 1)), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find(std::to_string(bytes) + " "), std::string::npos) << error.what();
  }
  execution.workspace_bytes = bytes;
  forward(args, execution);
  memory.download(out.tensor().data, args.out.data, 512);
  for (int64_t i = 0; i < 128; ++i) ASSERT_NEAR(out.get(i), expected.get(i), 1e-5) << i;
  for (void* buffer : buffers) memory.release(buffer);
}

TEST(MetalForward, ReturnsProbs) {
  CaseSpec s;
  s.seqlen_q = 11;
  s.seqlen_k = 29;
  s.causal = s.sinks = s.bias = s.masking_bias = true;
  s.softcap = 6;
  const Case c(s);
  const Case::ForwardOutputs found = c.forward_outputs(), expected = c.forward_outputs();
  Buffer found_probs = Buffer::poisoned({2, 4, 11, 29}, DType::f32);
  Buffer expected_probs = Buffer::poisoned({2, 4, 11, 29}, DType::f32);
  ForwardArgs args = c.forward_args(found);
  args.probs = found_probs.tensor();
  forward(args, kMetal);
  args = c.forward_args(expected);
  args.probs = expected_probs.tensor();
  forward(args, kReference);
  for (int64_t i = 0; i < expected_probs.tensor().numel(); ++i) {
    ASSERT_NEAR(found_probs.get(i), expected_probs.get(i), 2e-6) << i;
  }
  for (int64_t i = 0; i < expected.out.tensor().numel(); ++i) {
    ASSERT_NEAR(found.out.get(i), expected.out.get(i), 1e-5) << i;
  }
}

TEST(MetalForward, NanGuardReplacesAndCounts) {
  CaseSpec s;
  s.batch = 2;
  const Case c(s);
  const Case::ForwardOutputs found = c.forward_outputs();
  ForwardArgs args = c.forward_args(found);
  args.options.nan_guard = true;
  static_cast<float*>(args.query.data)[args.query.stride[0] + 5 * args.query.stride[1]] =
      NAN;  // [1, 5, 0, 0]
  EXPECT_EQ(forward(args, kMetal).nonfinite_replaced, s.head_dim_v);
  for (int64_t i = 0; i < found.out.tensor().numel(); ++i) ASSERT_TRUE(std::isfinite(found.out.get(i))) << i;
}

TEST(MetalMerge, JoinsTheHalvesOfTheKeys) {
  CaseSpec s;
  s.seqlen_q = 9;
  s.seqlen_k = 40;
  for (DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    s.dtype = dtype;
    const Case c(s);
    const Case::ForwardOutputs a = c.forward_outputs(), b = c.forward_outputs(), merged = c.forward_outputs(),
                               whole = c.forward_outputs();
    ForwardArgs first = c.forward_args(a), second = c.forward_args(b);
    for (ForwardArgs* half : {&first, &second}) half->key.shape[1] = half->value.shape[1] = 20;
    for (Tensor* t : {&second.key, &second.value}) t->byte_offset += 20 * t->stride[1] * size_of(dtype);
    forward(first, kMetal);
    forward(second, kMetal);
    forward(c.forward_args(whole), kReference);
    merge_states({first.out, first.lse, second.out, second.lse, merged.out.tensor(), merged.lse.tensor()},
                 kMetal);
    const double tolerance = dtype == DType::f32 ? 1e-5 : dtype == DType::f16 ? 3e-3 : 3e-2;
    for (int64_t i = 0; i < whole.out.tensor().numel(); ++i) {
      ASSERT_NEAR(merged.out.get(i), whole.out.get(i), tolerance);
    }
    for (int64_t i = 0; i < whole.lse.tensor().numel(); ++i)
      ASSERT_NEAR(merged.lse.get(i), whole.lse.get(i), 1e-5);
  }
}

TEST(MetalMerge, MayOverwriteAnOperand) {
  Random random(6);
  Buffer out_a = Buffer::poisoned({1, 5, 2, 40}, DType::f32),
         out_b = Buffer::poisoned({1, 5, 2, 40}, DType::f32);
  Buffer lse_a = Buffer::poisoned({1, 2, 5}, DType::f32), lse_b = Buffer::poisoned({1, 2, 5}, DType::f32);
  for (Buffer* buffer : {&out_a, &out_b, &lse_a, &lse_b}) buffer->fill_normal(random);
  Buffer expected = Buffer::poisoned({1, 5, 2, 40}, DType::f32),
         expected_lse = Buffer::poisoned({1, 2, 5}, DType::f32);
  merge_states({out_a.tensor(), lse_a.tensor(), out_b.tensor(), lse_b.tensor(), expected.tensor(),
                expected_lse.tensor()},
               kReference);
  // On the device itself: staged copies of host tensors would never alias.
  for (const emu::Schedule schedule :
       {emu::Schedule::forward, emu::Schedule::reverse, emu::Schedule::skewed}) {
    const std::unique_ptr<metal::MetalDevice> device = make_emulated_device(schedule);
    std::vector<void*> buffers;
    for (const Buffer* from : {&out_a, &lse_a, &out_b, &lse_b}) {
      const size_t bytes = static_cast<size_t>(from->tensor().numel() * 4);
      buffers.push_back(device->allocate(bytes));
      device->upload(buffers.back(), from->tensor().data, bytes);
    }
    MergeProblem p;
    p.batch = 1, p.heads = 2, p.rows = 5, p.head_dim_v = 40;
    p.out_a = p.out = {buffers[0], 0, 400, 40, 80};
    p.lse_a = p.lse = {buffers[1], 0, 10, 5, 1};
    p.out_b = {buffers[2], 0, 400, 40, 80};
    p.lse_b = {buffers[3], 0, 10, 5, 1};
    device->run(metal::plan_merge(p), nullptr);
    std::vector<float> out(400), lse(10);
    device->download(out.data(), buffers[0], 1600);
    device->download(lse.data(), buffers[1], 40);
    for (int i = 0; i < 400; ++i) ASSERT_NEAR(out[i], expected.get(i), 1e-5) << i;
    for (int i = 0; i < 10; ++i) ASSERT_NEAR(lse[i], expected_lse.get(i), 1e-5) << i;
    for (void* buffer : buffers) device->release(buffer);
  }
}

TEST(MetalMerge, EmptyStatesStayEmpty) {
  Buffer out = Buffer::poisoned({1, 3, 2, 8}, DType::f32), lse = Buffer::poisoned({1, 2, 3}, DType::f32);
  for (int64_t i = 0; i < 6; ++i) lse.set(i, -INFINITY);
  Buffer merged = Buffer::poisoned({1, 3, 2, 8}, DType::f32),
         merged_lse = Buffer::poisoned({1, 2, 3}, DType::f32);
  merge_states({out.tensor(), lse.tensor(), out.tensor(), lse.tensor(), merged.tensor(), merged_lse.tensor()},
               kMetal);
  for (int64_t i = 0; i < 48; ++i) EXPECT_EQ(merged.get(i), 0);
  for (int64_t i = 0; i < 6; ++i) EXPECT_EQ(merged_lse.get(i), -INFINITY);
}

// A cache view over `pages` of f32 or encoded rows, compared on both backends.
void expect_cache_agrees(const Buffer& query, const KvView& view, const AttentionOptions& options,
                         double tolerance) {
  const Tensor& q = query.tensor();
  const std::vector<int64_t> shape = {q.shape[0], q.shape[1], q.shape[2], view.value.dim};
  Buffer found = Buffer::poisoned(shape, DType::f32), expected = Buffer::poisoned(shape, DType::f32);
  ForwardArgs args;
  args.query = q;
  args.cache = &view;
  args.options = options;
  args.out = found.tensor();
  forward(args, kMetal);
  args.out = expected.tensor();
  forward(args, kReference);
  for (int64_t i = 0; i < found.tensor().numel(); ++i)
    ASSERT_NEAR(found.get(i), expected.get(i), tolerance) << i;
}

TEST(MetalCache, RecycledPagesStartLater) {
  Random random(3);
  Buffer query = Buffer::poisoned({2, 2, 2, 32}, DType::f32);
  Buffer key = Buffer::poisoned({6, 16, 1, 32}, DType::f32),
         value = Buffer::poisoned({6, 16, 1, 32}, DType::f32);
  for (Buffer* buffer : {&query, &key, &value}) buffer->fill_normal(random);
  const int32_t table[] = {3, 1, 5, 0}, seqlens[] = {60, 33}, first[] = {32, 16};
  KvView view = paged_cache(key.tensor(), value.tensor(), contiguous(table, DType::i32, {2, 2}),
                            contiguous(seqlens, DType::i32, {2}));
  view.first_position = contiguous(first, DType::i32, {2});
  view.max_seqlen = 64;
  AttentionOptions options;
  options.causal = true;
  expect_cache_agrees(query, view, options, 1e-5);
}

// Lengths and first positions as a column of a table, on the device: host tensors would be staged without
// gaps.
TEST(MetalCache, LengthsMayBeStrided) {
  DeviceMemory& memory = *select_backend(Device::metal, "metal").memory();
  Random random(5);
  Buffer query = Buffer::poisoned({2, 1, 2, 32}, DType::f32),
         key = Buffer::poisoned({6, 16, 1, 32}, DType::f32);
  query.fill_normal(random);
  key.fill_normal(random);
  const int32_t table[] = {3, 1, 5, 0}, ends[] = {60, 1000, 33, 1000}, firsts[] = {32, 1000, 16, 1000};
  KvView view = paged_cache(key.tensor(), key.tensor(), contiguous(table, DType::i32, {2, 2}),
                            contiguous(ends, DType::i32, {2}));
  view.first_position = contiguous(firsts, DType::i32, {2});
  view.seqlens.stride[0] = view.first_position.stride[0] = 2;
  view.max_seqlen = 64;
  Buffer found = Buffer::poisoned({2, 1, 2, 32}, DType::f32),
         expected = Buffer::poisoned({2, 1, 2, 32}, DType::f32);
  ForwardArgs args;
  args.query = query.tensor();
  args.cache = &view;
  args.out = expected.tensor();
  forward(args, kReference);

  std::vector<void*> buffers;
  const auto on_device = [&](const void* from, size_t bytes) {
    buffers.push_back(memory.allocate(bytes));
    memory.upload(buffers.back(), from, bytes);
    return buffers.back();
  };
  args.query.data = on_device(query.tensor().data, 2 * 2 * 32 * 4);
  args.out.data = on_device(found.tensor().data, 2 * 2 * 32 * 4);
  args.query.device = args.out.device = view.device = Device::metal;
  void* rows = on_device(key.tensor().data, 6 * 16 * 32 * 4);
  view.key.codes = view.value.codes = rows;
  view.block_table.data = on_device(table, sizeof table);
  view.seqlens.data = on_device(ends, sizeof ends);
  view.first_position.data = on_device(firsts, sizeof firsts);
  for (Tensor* t : {&view.block_table, &view.seqlens, &view.first_position}) t->device = Device::metal;
  forward(args, kMetal);
  memory.download(found.tensor().data, args.out.data, 2 * 2 * 32 * 4);
  for (int64_t i = 0; i < 128; ++i) ASSERT_NEAR(found.get(i), expected.get(i), 1e-5) << i;
  for (void* buffer : buffers) memory.release(buffer);
}

TEST(MetalCache, ValuesMayBeTheFirstOfTheKey) {
  Random random(4);
  CaseSpec s;
  s.head_dim = 192;
  s.head_dim_v = 128;
  s.cache = true;
  s.seqlen_q = 2;
  s.seqlen_k = 40;
  for (KvFormat format : {KvFormat::f16, KvFormat::q8, KvFormat::tbq4}) {
    s.k_format = s.v_format = format;
    const Case c(s);
    const Case::ForwardOutputs outputs = c.forward_outputs();
    KvView view = *c.forward_args(outputs).cache;
    const int64_t dim_v = view.value.dim;
    view.value = view.key;
    view.value.dim = dim_v;
    Buffer query = Buffer::poisoned({2, 2, 4, 192}, DType::f32);
    query.fill_normal(random);
    expect_cache_agrees(query, view, {}, 1e-4);
  }
}

}  // namespace
}  // namespace attnspan::metal_emulation
