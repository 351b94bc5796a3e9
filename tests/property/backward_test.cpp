// Gradients against finite differences of the reference, which computes in double.

#include "attend.hpp"

namespace attnspan::property {
namespace {

// loss = sum(dout * out) + sum(dlse * lse over rows that see something)
class Loss {
 public:
  Loss(const Buffer& dout, const Buffer& dlse, const AttentionOptions& options)
      : dout_(dout), dlse_(dlse), options_(options) {}

  double operator()(const Inputs& in) const {
    const Attended a = attend("reference", in.query.tensor(), in.key.tensor(), in.value.tensor(), options_);
    double sum = 0;
    for (int64_t i = 0; i < a.out.tensor().numel(); ++i)
      sum += static_cast<double>(a.out.get(i)) * dout_.get(i);
    for (int64_t i = 0; i < a.lse.tensor().numel(); ++i) {
      if (std::isfinite(a.lse.get(i))) sum += static_cast<double>(a.lse.get(i)) * dlse_.get(i);
    }
    return sum;
  }

 private:
  const Buffer& dout_;
  const Buffer& dlse_;
  const AttentionOptions& options_;
};

// Fourth-order central differences. The step balances their error, about step^4, with the rounding of out to
// f32, about 1e-7 / step: both leave some 1e-5.
template <typename Evaluate>
double derivative(Buffer& buffer, int64_t index, Evaluate loss) {
  constexpr double kStep = 1.0 / 32;
  const float kept = buffer.get(index);
  double sum = 0;
  for (const auto& [steps, weight] : {std::pair{-2, 1.0}, {-1, -8.0}, {1, 8.0}, {2, -1.0}}) {
    buffer.set(index, static_cast<float>(kept + steps * kStep));
    sum += weight * loss();
  }
  buffer.set(index, kept);
  return sum / (12 * kStep);
}

template <typename Evaluate>
void expect_gradient(const char* name, Buffer& input, const Buffer& gradient, Evaluate loss) {
  double largest = 0;
  std::vector<double> expected;
  for (int64_t i = 0; i < input.tensor().numel(); ++i) {
    expected.push_back(derivative(input, i, loss));
    largest = std::max(largest, std::abs(expected.back()));
  }
  EXPECT_GT(largest, 1e-2) << name << ": a gradient of nothing proves nothing";
  for (int64_t i = 0; i < input.tensor().numel(); ++i) {
    ASSERT_NEAR(gradient.get(i), expected[i], 3e-4 * largest) << name << " element " << i;
  }
}

class Differences : public Property {
 protected:
  void check(AttentionOptions options, int64_t heads, int64_t kv_heads, int64_t seqlen_q, int64_t seqlen_k) {
    Inputs in(2, seqlen_q, seqlen_k, heads, kv_heads, 4);
    Buffer sinks = random_buffer({heads}, 5);
    if (with_sinks_) options.sinks = sinks.tensor();
    const Buffer dout = random_buffer({2, seqlen_q, heads, 4}, 11),
                 dlse = random_buffer({2, heads, seqlen_q}, 12);
    const Attended kept = attend("reference", in.query.tensor(), in.key.tensor(), in.value.tensor(), options);
    const Gradients g = differentiate(backend(), in.query.tensor(), in.key.tensor(), in.value.tensor(), kept,
                                      dout.tensor(), dlse.tensor(), options);
    const Loss loss(dout, dlse, options);
    const auto evaluate = [&] { return loss(in); };
    expect_gradient("dq", in.query, g.dq, evaluate);
    expect_gradient("dk", in.key, g.dk, evaluate);
    expect_gradient("dv", in.value, g.dv, evaluate);
    if (with_sinks_) expect_gradient("d_sinks", sinks, g.d_sinks, evaluate);
  }

  bool with_sinks_ = false;
};

TEST_P(Differences, Plain) { check({}, 2, 2, 5, 7); }

TEST_P(Differences, SoftcapWindowDocumentsGqa) {
  const Buffer key_start = int_buffer({0, 0, 0, 3, 3, 3, 3, 8, 8}),
               key_end = int_buffer({3, 3, 3, 8, 8, 8, 8, 9, 9});
  for (const float softcap : {0.0F, 1.5F}) {
    for (const int64_t window_left : {int64_t{-1}, int64_t{2}}) {
      for (const bool documents : {false, true}) {
        for (const int64_t heads : {2, 6}) {
          AttentionOptions options;
          options.causal = true;
          options.softcap = softcap;
          options.window_left = window_left;
          if (documents) {
            options.key_start = key_start.tensor();
            options.key_end = key_end.tensor();
          }
          SCOPED_TRACE(testing::Message() << "softcap " << softcap << ", window " << window_left
                                          << ", documents " << documents << ", heads " << heads);
          check(options, heads, 2, 9, 9);
        }
      }
    }
  }
}

TEST_P(Differences, BiasAlibiSinksScale) {
  const Buffer bias = random_buffer({1, 4, 1, 8}, 6), slopes = random_buffer({2, 4}, 7);
  AttentionOptions options;
  options.bias = bias.tensor();
  options.alibi_slopes = slopes.tensor();
  options.softmax_scale = 0.7F;
  options.softcap = 2;
  with_sinks_ = true;
  check(options, 4, 2, 6, 8);
}

// Rows before all keys see nothing; with a sink they still have a denominator.
TEST_P(Differences, EmptyRows) {
  AttentionOptions options;
  options.causal = true;
  check(options, 2, 1, 9, 5);
  with_sinks_ = true;
  check(options, 2, 1, 9, 5);
}

ATTNSPAN_ON_EVERY_HOST_BACKEND(Differences);

}  // namespace
}  // namespace attnspan::property
