// What a call may not touch or be touched by: other sequences' NaNs, memory beyond lengths, and addresses
// that only 64-bit offsets reach.

#include <sys/mman.h>

#include <limits>

#include "attend.hpp"

namespace attnspan::property {
namespace {

const float kNan = std::numeric_limits<float>::quiet_NaN();
const float kInfinity = std::numeric_limits<float>::infinity();

void spoil(Buffer& buffer, const Tensor& part) {  // `part` is a slice of `buffer`
  const int64_t first = part.byte_offset / size_of(part.dtype);
  // Buffers of these tests are dense: the elements of a slice of dimension 0 are one after another.
  for (int64_t i = 0; i < part.numel(); ++i)
    buffer.set(first + i, i % 3 == 0 ? kNan : i % 3 == 1 ? kInfinity : -kInfinity);
}

class Isolation : public Property {};

TEST_P(Isolation, NonFiniteSequencesStayByThemselves) {
  for (const DType dtype : {DType::f32, DType::f16}) {
    Inputs in(3, 40, 77, 4, 2, 48, dtype);
    Buffer dout = random_buffer({3, 40, 4, 48}, 9, dtype);
    AttentionOptions options;
    options.causal = true;
    const auto run = [&] {
      Attended a = attend(backend(), in.query.tensor(), in.key.tensor(), in.value.tensor(), options);
      Gradients g = differentiate(backend(), in.query.tensor(), in.key.tensor(), in.value.tensor(), a,
                                  dout.tensor(), {}, options);
      return std::pair{std::move(a.out), std::move(g)};
    };
    const auto [out, gradients] = run();
    for (Buffer* buffer : {&in.query, &in.key, &in.value, &dout})
      spoil(*buffer, slice(buffer->tensor(), 0, 1, 1));
    const auto [spoilt_out, spoilt] = run();
    for (const int64_t b : {0, 2}) {
      const auto same = [&](const Buffer& x, const Buffer& y, const char* what) {
        expect_same_bits(slice(x.tensor(), 0, b, 1), slice(y.tensor(), 0, b, 1), what);
      };
      same(spoilt_out, out, "out");
      same(spoilt.dq, gradients.dq, "dq");
      same(spoilt.dk, gradients.dk, "dk");
      same(spoilt.dv, gradients.dv, "dv");
    }
  }
}

TEST_P(Isolation, NonFiniteHeadGroupsStayByThemselves) {
  Inputs in(2, 20, 77, 6, 3, 48);
  const auto run = [&] { return attend(backend(), in.query.tensor(), in.key.tensor(), in.value.tensor()); };
  const Attended before = run();
  for (Buffer* buffer : {&in.key, &in.value}) {  // KV head 1: query heads 2 and 3
    for (int64_t row = 0; row < 2 * 77; ++row) {
      for (int64_t d = 0; d < 48; ++d) buffer->set((row * 3 + 1) * 48 + d, kNan);
    }
  }
  const Attended after = run();
  for (const int64_t head : {0, 1, 4, 5}) {
    expect_same_bits(slice(after.out.tensor(), 2, head, 1), slice(before.out.tensor(), 2, head, 1), "out");
    expect_same_bits(slice(after.lse.tensor(), 1, head, 1), slice(before.lse.tensor(), 1, head, 1), "lse");
  }
}

// Packed neighbours share a tensor: the last tile of one sequence ends in the next one's rows.
TEST_P(Isolation, NonFinitePackedNeighboursStayByThemselves) {
  Buffer query = random_buffer({90, 4, 32}, 1), key = random_buffer({120, 2, 32}, 2),
         value = random_buffer({120, 2, 32}, 3);
  const Buffer cu_q = int_buffer({0, 30, 31, 90}), cu_k = int_buffer({0, 45, 47, 120});
  AttentionOptions options;
  options.cu_seqlens_q = cu_q.tensor();
  options.cu_seqlens_k = cu_k.tensor();
  const auto run = [&] { return attend(backend(), query.tensor(), key.tensor(), value.tensor(), options); };
  const Attended before = run();
  spoil(query, slice(query.tensor(), 0, 30, 1));
  spoil(key, slice(key.tensor(), 0, 45, 2));
  spoil(value, slice(value.tensor(), 0, 45, 2));
  const Attended after = run();
  for (const auto& [begin, count] : {std::pair<int64_t, int64_t>{0, 30}, {31, 59}}) {
    expect_same_bits(slice(after.out.tensor(), 0, begin, count), slice(before.out.tensor(), 0, begin, count),
                     "out");
    expect_same_bits(slice(after.lse.tensor(), 1, begin, count), slice(before.lse.tensor(), 1, begin, count),
                     "lse");
  }
}

TEST_P(Isolation, KeysBeyondALengthAreNeverRead) {
  Inputs in(3, 33, 100, 4, 2, 40);
  const Buffer dout = random_buffer({3, 33, 4, 40}, 9), used = int_buffer({61, 0, 100});
  AttentionOptions options;
  options.causal = true;
  options.seqused_k = used.tensor();
  const auto run = [&] {
    Attended a = attend(backend(), in.query.tensor(), in.key.tensor(), in.value.tensor(), options);
    Gradients g = differentiate(backend(), in.query.tensor(), in.key.tensor(), in.value.tensor(), a,
                                dout.tensor(), {}, options);
    return std::pair{std::move(a.out), std::move(g)};
  };
  const auto [out, gradients] = run();
  const int64_t lengths[] = {61, 0, 100};
  for (Buffer* buffer : {&in.key, &in.value}) {
    for (int64_t b = 0; b < 3; ++b)
      spoil(*buffer, slice(slice(buffer->tensor(), 0, b, 1), 1, lengths[b], 100 - lengths[b]));
  }
  const auto [spoilt_out, spoilt] = run();
  expect_same_bits(spoilt_out.tensor(), out.tensor(), "out");
  expect_same_bits(spoilt.dq.tensor(), gradients.dq.tensor(), "dq");
  expect_same_bits(spoilt.dk.tensor(), gradients.dk.tensor(), "dk");
  expect_same_bits(spoilt.dv.tensor(), gradients.dv.tensor(), "dv");
}

// Keys that no row of the mask sees may hold anything.
TEST_P(Isolation, KeysOutsideEverySpanAreNeverRead) {
  Inputs in(1, 40, 200, 4, 2, 40);
  AttentionOptions options;
  options.causal = true;
  options.window_left = 10;
  options.diagonal = Diagonal::at(100);  // keys 90 to 139
  const auto run = [&] {
    return attend(backend(), in.query.tensor(), in.key.tensor(), in.value.tensor(), options);
  };
  const Attended before = run();
  for (Buffer* buffer : {&in.key, &in.value}) {
    spoil(*buffer, slice(buffer->tensor(), 1, 0, 90));
    spoil(*buffer, slice(buffer->tensor(), 1, 140, 60));
  }
  const Attended after = run();
  expect_same_bits(after.out.tensor(), before.out.tensor(), "out");
  expect_same_bits(after.lse.tensor(), before.lse.tensor(), "lse");
}

// Address space without memory behind it: pages appear where they are written.
class Reserved {
 public:
  explicit Reserved(size_t bytes)
      : bytes_(bytes),
        data_(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1,
                   0)) {}
  ~Reserved() {
    if (ok()) munmap(data_, bytes_);
  }
  Reserved(const Reserved&) = delete;
  Reserved& operator=(const Reserved&) = delete;
  bool ok() const { return data_ != MAP_FAILED; }
  void* data() const { return data_; }

 private:
  size_t bytes_;
  void* data_;
};

// The tensor with strides such that it spans more than 2^31 elements, its values copied there.
Tensor spread(const Buffer& dense, const Reserved& memory, const std::array<int64_t, 4>& stride) {
  Tensor wide = dense.tensor();
  wide.data = memory.data();
  wide.byte_offset = 0;
  wide.stride = stride;
  int64_t last = 0;
  for (int i = 0; i < 4; ++i) last += (wide.shape[i] - 1) * stride[i];
  EXPECT_GT(last, int64_t{1} << 31);
  for (int64_t i = 0; i < wide.numel(); ++i) {
    int64_t rest = i, element = 0;
    for (int d = 3; d >= 0; --d) {
      element += rest % wide.shape[d] * stride[d];
      rest /= wide.shape[d];
    }
    store_f32(wide.data, element, wide.dtype, dense.get(i));
  }
  return wide;
}

// The batch, the row or the head stride is huge; a 32-bit offset would wrap.
TEST_P(Isolation, OffsetsBeyond2To31Elements) {
  const Inputs in(2, 9, 9, 4, 2, 16, DType::f16);
  const Buffer dout = random_buffer({2, 9, 4, 16}, 9, DType::f16);
  AttentionOptions options;
  options.causal = true;
  const Attended expected = attend(backend(), in.query.tensor(), in.key.tensor(), in.value.tensor(), options);
  const Gradients expected_g = differentiate(backend(), in.query.tensor(), in.key.tensor(), in.value.tensor(),
                                             expected, dout.tensor(), {}, options);
  constexpr int64_t kFar = int64_t{1} << 31;
  const std::array<int64_t, 4> strides[] = {
      {kFar + 64, 64, 16, 1}, {256, kFar / 8 + 512, 16, 1}, {144, 16, kFar + 512, 1}};
  for (const std::array<int64_t, 4>& stride : strides) {
    const size_t bytes = static_cast<size_t>(2 * (stride[0] + 8 * stride[1] + 3 * stride[2] + 16));
    const Reserved q(bytes), k(bytes), v(bytes), o(bytes), g(bytes);
    if (!q.ok() || !k.ok() || !v.ok() || !o.ok() || !g.ok()) GTEST_SKIP() << "no address space for 5 views";
    const Tensor query = spread(in.query, q, stride), key = spread(in.key, k, stride),
                 value = spread(in.value, v, stride);
    ForwardArgs args;
    args.query = query;
    args.key = key;
    args.value = value;
    args.out = spread(Buffer::poisoned({2, 9, 4, 16}, DType::f16), o, stride);
    const Buffer lse = Buffer::poisoned({2, 4, 9}, DType::f32);
    args.lse = lse.tensor();
    args.options = options;
    Execution execution;
    execution.backend = backend();
    forward(args, execution);
    expect_same_bits(args.out, expected.out.tensor(), "out");
    Attended kept{Buffer::poisoned({2, 9, 4, 16}, DType::f16), Buffer::poisoned({2, 4, 9}, DType::f32)};
    for (int64_t i = 0; i < kept.out.tensor().numel(); ++i) kept.out.set(i, expected.out.get(i));
    for (int64_t i = 0; i < kept.lse.tensor().numel(); ++i) kept.lse.set(i, expected.lse.get(i));
    const Gradients found =
        differentiate(backend(), query, key, value, kept, spread(dout, g, stride), {}, options);
    expect_same_bits(found.dq.tensor(), expected_g.dq.tensor(), "dq");
    expect_same_bits(found.dk.tensor(), expected_g.dk.tensor(), "dk");
    expect_same_bits(found.dv.tensor(), expected_g.dv.tensor(), "dv");
  }
}

ATTNSPAN_ON_EVERY_HOST_BACKEND(Isolation);

}  // namespace
}  // namespace attnspan::property
