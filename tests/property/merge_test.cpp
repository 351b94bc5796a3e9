// States over disjoint keys, merged, are the state over all of them, in any order.

#include "attend.hpp"

namespace attnspan::property {
namespace {

class Merging : public Property {
 protected:
  Attended merged(const Attended& a, const Attended& b) const {
    Attended result{Buffer::poisoned(shape_of(a.out.tensor()), a.out.tensor().dtype),
                    Buffer::poisoned(shape_of(a.lse.tensor()), DType::f32)};
    MergeArgs args;
    args.out_a = a.out.tensor();
    args.lse_a = a.lse.tensor();
    args.out_b = b.out.tensor();
    args.lse_b = b.lse.tensor();
    args.out = result.out.tensor();
    args.lse = result.lse.tensor();
    Execution execution;
    execution.backend = backend();
    merge_states(args, execution);
    return result;
  }
  Attended over_keys(const Inputs& in, int64_t begin, int64_t count) const {
    AttentionOptions options;
    options.causal = true;
    options.diagonal = Diagonal::at(40 - begin);  // some rows see no key of the last parts
    return attend(backend(), in.query.tensor(), slice(in.key.tensor(), 1, begin, count),
                  slice(in.value.tensor(), 1, begin, count), options);
  }
};

TEST_P(Merging, IsAssociativeToRounding) {
  const Inputs in(2, 30, 100, 4, 2, 64);
  const Attended whole = over_keys(in, 0, 100);
  for (const auto& [first, second] : {std::pair<int64_t, int64_t>{1, 30}, {37, 50}, {50, 99}, {0, 60}}) {
    const Attended a = over_keys(in, 0, first), b = over_keys(in, first, second - first),
                   c = over_keys(in, second, 100 - second);
    for (const Attended& m : {merged(merged(a, b), c), merged(a, merged(b, c)), merged(merged(c, a), b)}) {
      expect_close(m.out.tensor(), whole.out.tensor(), 2e-6, "out");
      expect_close(m.lse.tensor(), whole.lse.tensor(), 2e-6, "lse");
    }
  }
}

TEST_P(Merging, WithNothingChangesNothing) {
  const Inputs in(1, 30, 100, 4, 2, 64);
  const Attended some = over_keys(in, 0, 100), none = over_keys(in, 100, 0);
  for (const Attended& m : {merged(some, none), merged(none, some)}) {
    expect_same_bits(m.out.tensor(), some.out.tensor(), "out");
    expect_same_bits(m.lse.tensor(), some.lse.tensor(), "lse");
  }
  const Attended nothing = merged(none, none);
  expect_same_bits(nothing.out.tensor(), none.out.tensor(), "out");
  expect_same_bits(nothing.lse.tensor(), none.lse.tensor(), "lse");
}

// A sink is the state (lse = sink, out = 0).
TEST_P(Merging, SinksAreAState) {
  const Inputs in(2, 20, 50, 4, 2, 32);
  const Buffer sinks = random_buffer({4}, 9);
  AttentionOptions options;
  options.causal = true;
  const Attended without = attend(backend(), in.query.tensor(), in.key.tensor(), in.value.tensor(), options);
  options.sinks = sinks.tensor();
  const Attended with = attend(backend(), in.query.tensor(), in.key.tensor(), in.value.tensor(), options);
  Attended sink{Buffer::poisoned({2, 20, 4, 32}, DType::f32), Buffer::poisoned({2, 4, 20}, DType::f32)};
  for (int64_t i = 0; i < sink.out.tensor().numel(); ++i) sink.out.set(i, 0);
  for (int64_t i = 0; i < sink.lse.tensor().numel(); ++i) sink.lse.set(i, sinks.get(i / 20 % 4));
  const Attended m = merged(without, sink);
  expect_close(m.out.tensor(), with.out.tensor(), 2e-6, "out");
  expect_close(m.lse.tensor(), with.lse.tensor(), 2e-6, "lse");
}

ATTNSPAN_ON_EVERY_HOST_BACKEND(Merging);

}  // namespace
}  // namespace attnspan::property
