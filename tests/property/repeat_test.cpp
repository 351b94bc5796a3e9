// The same call gives the same bits: from run to run, at any number of threads, alone or in a batch.

#include "attend.hpp"
#include "check/cache_builder.hpp"

namespace attnspan::property {
namespace {

class Repeat : public Property {};

TEST_P(Repeat, BitsDoNotDependOnRunsOrThreads) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const Inputs in(2, 150, 131, 6, 2, 72, dtype);
    const Buffer dout = random_buffer({2, 150, 6, 72}, 9, dtype);
    AttentionOptions options;
    options.causal = true;
    options.softcap = 6;
    const Attended first =
        attend(backend(), in.query.tensor(), in.key.tensor(), in.value.tensor(), options, 1);
    const Gradients first_gradients = differentiate(backend(), in.query.tensor(), in.key.tensor(),
                                                    in.value.tensor(), first, dout.tensor(), {}, options, 1);
    for (const int threads : {1, 2, 3, 7, 0}) {
      const Attended again =
          attend(backend(), in.query.tensor(), in.key.tensor(), in.value.tensor(), options, threads);
      const Gradients g = differentiate(backend(), in.query.tensor(), in.key.tensor(), in.value.tensor(),
                                        first, dout.tensor(), {}, options, threads);
      const std::string at = " at " + std::to_string(threads) + " threads";
      expect_same_bits(again.out.tensor(), first.out.tensor(), "out" + at);
      expect_same_bits(again.lse.tensor(), first.lse.tensor(), "lse" + at);
      expect_same_bits(g.dq.tensor(), first_gradients.dq.tensor(), "dq" + at);
      expect_same_bits(g.dk.tensor(), first_gradients.dk.tensor(), "dk" + at);
      expect_same_bits(g.dv.tensor(), first_gradients.dv.tensor(), "dv" + at);
    }
  }
}

// Splits of the keys depend on a sequence's own length: a sequence decoded alone and inside any batch has the
// same bits, in a dense cache and in pages.
TEST_P(Repeat, DecodeAloneIsDecodeInABatch) {
  const std::vector<int64_t> lengths = {1500, 1, 700, 0, 64};
  const auto batch = static_cast<int64_t>(lengths.size());
  for (const KvFormat format : {KvFormat::f32, KvFormat::f16, KvFormat::q8, KvFormat::tbq4}) {
    for (const int64_t rows : {1, 5}) {
      const Buffer query = random_buffer({batch, rows, 4, 64}, 1);
      const Buffer key = random_buffer({batch, 1500, 1, 64}, 2),
                   value = random_buffer({batch, 1500, 1, 64}, 3);
      Random random(4);
      const check::BuiltCache together(key, value, lengths, format, format, 16, random);
      const auto run = [&](const Tensor& q, const KvView& cache) {
        Attended a{Buffer::poisoned(shape_of(q), DType::f32),
                   Buffer::poisoned({q.shape[0], 4, rows}, DType::f32)};
        AttentionOptions options;
        options.causal = true;
        Execution execution;
        execution.backend = backend();
        decode(q, cache, a.out.tensor(), a.lse.tensor(), options, execution);
        return a;
      };
      const Attended all = run(query.tensor(), together.view());
      for (int64_t b = 0; b < batch; ++b) {
        KvView alone = together.view();
        alone.batch = 1;
        alone.seqlens = slice(alone.seqlens, 0, b, 1);
        alone.block_table = slice(alone.block_table, 0, b, 1);
        alone.max_seqlen = std::max<int64_t>(1, lengths[static_cast<size_t>(b)]);
        const Attended one = run(slice(query.tensor(), 0, b, 1), alone);
        const std::string what = std::string(name_of(format)) + " sequence " + std::to_string(b);
        expect_same_bits(one.out.tensor(), slice(all.out.tensor(), 0, b, 1), what + " out");
        expect_same_bits(one.lse.tensor(), slice(all.lse.tensor(), 0, b, 1), what + " lse");
      }
    }
  }
}

// The same for dense calls, forward and backward.
TEST_P(Repeat, ASequenceAloneIsTheSameInABatch) {
  const Inputs in(3, 70, 140, 4, 2, 40);
  const Buffer dout = random_buffer({3, 70, 4, 40}, 9);
  AttentionOptions options;
  options.causal = true;
  const Attended all = attend(backend(), in.query.tensor(), in.key.tensor(), in.value.tensor(), options);
  const Gradients all_g = differentiate(backend(), in.query.tensor(), in.key.tensor(), in.value.tensor(), all,
                                        dout.tensor(), {}, options);
  for (int64_t b = 0; b < 3; ++b) {
    const auto part = [&](const Buffer& buffer) { return slice(buffer.tensor(), 0, b, 1); };
    const Attended one = attend(backend(), part(in.query), part(in.key), part(in.value), options);
    const Gradients g =
        differentiate(backend(), part(in.query), part(in.key), part(in.value), one, part(dout), {}, options);
    expect_same_bits(one.out.tensor(), part(all.out), "out");
    expect_same_bits(one.lse.tensor(), part(all.lse), "lse");
    expect_same_bits(g.dq.tensor(), part(all_g.dq), "dq");
    expect_same_bits(g.dk.tensor(), part(all_g.dk), "dk");
    expect_same_bits(g.dv.tensor(), part(all_g.dv), "dv");
  }
}

// The same for packed calls: neighbours change the totals that a backend sees, and nothing else. One row over
// many keys is what a backend may want to split.
TEST_P(Repeat, APackedSequenceAloneIsTheSameAmongOthers) {
  const std::vector<int32_t> rows = {1, 40, 0, 5}, keys = {900, 70, 3, 400};
  std::vector<int32_t> cu_q = {0}, cu_k = {0};
  for (size_t b = 0; b < rows.size(); ++b) {
    cu_q.push_back(cu_q.back() + rows[b]);
    cu_k.push_back(cu_k.back() + keys[b]);
  }
  const Buffer query = random_buffer({cu_q.back(), 4, 64}, 1), key = random_buffer({cu_k.back(), 2, 64}, 2),
               value = random_buffer({cu_k.back(), 2, 64}, 3);
  const auto run = [&](const Tensor& q, const Tensor& k, const Tensor& v, const std::vector<int32_t>& q_rows,
                       const std::vector<int32_t>& k_rows) {
    const Buffer cu_seqlens_q = int_buffer(q_rows), cu_seqlens_k = int_buffer(k_rows);
    AttentionOptions options;
    options.causal = true;
    options.cu_seqlens_q = cu_seqlens_q.tensor();
    options.cu_seqlens_k = cu_seqlens_k.tensor();
    return attend(backend(), q, k, v, options);
  };
  const Attended all = run(query.tensor(), key.tensor(), value.tensor(), cu_q, cu_k);
  for (size_t b = 0; b < rows.size(); ++b) {
    const Attended one =
        run(slice(query.tensor(), 0, cu_q[b], rows[b]), slice(key.tensor(), 0, cu_k[b], keys[b]),
            slice(value.tensor(), 0, cu_k[b], keys[b]), {0, rows[b]}, {0, keys[b]});
    const std::string what = "sequence " + std::to_string(b);
    expect_same_bits(one.out.tensor(), slice(all.out.tensor(), 0, cu_q[b], rows[b]), what + " out");
    expect_same_bits(one.lse.tensor(), slice(all.lse.tensor(), 1, cu_q[b], rows[b]), what + " lse");
  }
}

ATTNSPAN_ON_EVERY_HOST_BACKEND(Repeat);

}  // namespace
}  // namespace attnspan::property
