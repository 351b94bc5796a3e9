// Masks against calls that need none: a window is a slice of the keys, documents are separate calls, a chunk
// is some rows of the whole.

#include "attend.hpp"

namespace attnspan::property {
namespace {

constexpr double kRounding = 2e-6;  // f32 sums in another order

class Masks : public Property {};

// For every row i the keys [i + diagonal - left, i + diagonal + right], clamped; alibi keeps its distances
// through the diagonal of the slice.
TEST_P(Masks, WindowIsAttentionOverSlicedKeys) {
  const Inputs in(1, 67, 83, 4, 2, 24);
  const Buffer slopes = random_buffer({4}, 7), sinks = random_buffer({4}, 8);
  struct Window {
    int64_t left, right;
    bool causal;
    Diagonal diagonal;
  };
  for (const Window& w : {Window{7, 3, false, {}},
                          {0, 0, false, {}},
                          {20, -1, true, {}},
                          {-1, 2, false, Diagonal::top_left()},
                          {5, 9, true, Diagonal::at(40)},
                          {3, 3, false, Diagonal::at(-10)}}) {
    AttentionOptions options;
    options.window_left = w.left;
    options.window_right = w.right;
    options.causal = w.causal;
    options.diagonal = w.diagonal;
    options.alibi_slopes = slopes.tensor();
    options.sinks = sinks.tensor();
    options.softcap = 3;
    const Attended whole = attend(backend(), in.query.tensor(), in.key.tensor(), in.value.tensor(), options);
    const int64_t offset = w.diagonal.kind == Diagonal::Kind::offset     ? w.diagonal.value
                           : w.diagonal.kind == Diagonal::Kind::top_left ? 0
                                                                         : 83 - 67;
    const int64_t right = w.causal ? 0 : w.right;
    for (int64_t i = 0; i < 67; ++i) {
      const int64_t begin = w.left < 0 ? 0 : std::clamp<int64_t>(i + offset - w.left, 0, 83);
      const int64_t end = right < 0 ? 83 : std::clamp<int64_t>(i + offset + right + 1, begin, 83);
      AttentionOptions plain;
      plain.alibi_slopes = slopes.tensor();
      plain.sinks = sinks.tensor();
      plain.softcap = 3;
      plain.diagonal = Diagonal::at(i + offset - begin);
      const Attended row =
          attend(backend(), slice(in.query.tensor(), 1, i, 1), slice(in.key.tensor(), 1, begin, end - begin),
                 slice(in.value.tensor(), 1, begin, end - begin), plain);
      expect_close(slice(whole.out.tensor(), 1, i, 1), row.out.tensor(), kRounding,
                   "out of row " + std::to_string(i));
      expect_close(slice(whole.lse.tensor(), 2, i, 1), row.lse.tensor(), kRounding,
                   "lse of row " + std::to_string(i));
    }
  }
}

struct Document {
  int64_t begin, length;
};

// Packed documents by key_start (with causal) or by key_start and key_end, and each document by itself:
// forward, lse and all gradients.
void expect_documents_are_separate(const std::string& backend, bool causal, int64_t window_left) {
  const std::vector<int64_t> lengths = {3, 1, 70, 13, 40};
  std::vector<Document> documents;
  std::vector<int32_t> starts, ends;
  int64_t total = 0;
  for (const int64_t length : lengths) {
    documents.push_back({total, length});
    starts.insert(starts.end(), length, static_cast<int32_t>(total));
    ends.insert(ends.end(), length, static_cast<int32_t>(total + length));
    total += length;
  }
  const Inputs in(2, total, total, 6, 2, 40);
  const Buffer dout = random_buffer({2, total, 6, 40}, 9);
  const Buffer key_start = int_buffer(starts), key_end = int_buffer(ends);
  AttentionOptions separate;
  separate.causal = causal;
  separate.window_left = window_left;
  separate.softcap = 4;
  AttentionOptions packed = separate;
  packed.key_start = key_start.tensor();
  if (!causal) packed.key_end = key_end.tensor();  // with causal the diagonal is the end

  const Attended whole = attend(backend, in.query.tensor(), in.key.tensor(), in.value.tensor(), packed);
  const Gradients whole_gradients = differentiate(backend, in.query.tensor(), in.key.tensor(),
                                                  in.value.tensor(), whole, dout.tensor(), {}, packed);
  for (const Document& d : documents) {
    const auto part = [&](const Buffer& buffer) { return slice(buffer.tensor(), 1, d.begin, d.length); };
    const Attended alone = attend(backend, part(in.query), part(in.key), part(in.value), separate);
    const Gradients gradients =
        differentiate(backend, part(in.query), part(in.key), part(in.value), alone, part(dout), {}, separate);
    expect_close(part(whole.out), alone.out.tensor(), kRounding, "out");
    expect_close(slice(whole.lse.tensor(), 2, d.begin, d.length), alone.lse.tensor(), kRounding, "lse");
    expect_close(part(whole_gradients.dq), gradients.dq.tensor(), 4 * kRounding, "dq");
    expect_close(part(whole_gradients.dk), gradients.dk.tensor(), 4 * kRounding, "dk");
    expect_close(part(whole_gradients.dv), gradients.dv.tensor(), 4 * kRounding, "dv");
  }
}

TEST_P(Masks, CausalDocumentsByKeyStartAreSeparateCalls) {
  expect_documents_are_separate(backend(), true, -1);
}
TEST_P(Masks, WindowedDocumentsAreSeparateCalls) { expect_documents_are_separate(backend(), true, 5); }
TEST_P(Masks, DocumentsByBothEndsAreSeparateCalls) { expect_documents_are_separate(backend(), false, -1); }

TEST_P(Masks, PackedSequencesAreSeparateCalls) {
  const std::vector<int32_t> cu_q = {0, 5, 5, 71, 72}, cu_k = {0, 9, 12, 90, 90};
  const Buffer query = random_buffer({72, 4, 32}, 1), key = random_buffer({90, 2, 32}, 2),
               value = random_buffer({90, 2, 32}, 3);
  const Buffer starts_q = int_buffer(cu_q), starts_k = int_buffer(cu_k);
  AttentionOptions options;
  options.causal = true;
  options.window_left = 30;
  AttentionOptions packed = options;
  packed.cu_seqlens_q = starts_q.tensor();
  packed.cu_seqlens_k = starts_k.tensor();
  const Attended whole = attend(backend(), query.tensor(), key.tensor(), value.tensor(), packed);
  const auto as_batch_of_one = [](Tensor t) {  // [rows, heads, dim] -> [1, rows, heads, dim]
    for (int i = 3; i > 0; --i) t.shape[i] = t.shape[i - 1], t.stride[i] = t.stride[i - 1];
    t.shape[0] = 1;
    t.rank = 4;
    return t;
  };
  for (size_t b = 0; b + 1 < cu_q.size(); ++b) {
    const int64_t rows = cu_q[b + 1] - cu_q[b], keys = cu_k[b + 1] - cu_k[b];
    const Attended alone = attend(backend(), as_batch_of_one(slice(query.tensor(), 0, cu_q[b], rows)),
                                  as_batch_of_one(slice(key.tensor(), 0, cu_k[b], keys)),
                                  as_batch_of_one(slice(value.tensor(), 0, cu_k[b], keys)), options);
    expect_same_bits(slice(whole.out.tensor(), 0, cu_q[b], rows), alone.out.tensor(), "out");
    expect_same_bits(slice(whole.lse.tensor(), 1, cu_q[b], rows), alone.lse.tensor(), "lse");
  }
}

// A chunk of queries with its own diagonal gives the rows of the whole.
TEST_P(Masks, ChunkWithItsOwnDiagonalIsRowsOfTheWhole) {
  const Inputs in(2, 130, 130, 4, 2, 64);
  const Buffer slopes = random_buffer({2, 4}, 7);
  AttentionOptions options;
  options.causal = true;
  options.window_left = 50;
  options.alibi_slopes = slopes.tensor();
  const Attended whole = attend(backend(), in.query.tensor(), in.key.tensor(), in.value.tensor(), options);
  for (const auto& [begin, count] : {std::pair<int64_t, int64_t>{0, 7}, {7, 57}, {64, 1}, {65, 65}}) {
    options.diagonal = Diagonal::at(begin);
    // The keys that later chunks bring need not be there yet.
    const int64_t keys = begin + count;
    const Attended chunk =
        attend(backend(), slice(in.query.tensor(), 1, begin, count), slice(in.key.tensor(), 1, 0, keys),
               slice(in.value.tensor(), 1, 0, keys), options);
    expect_close(slice(whole.out.tensor(), 1, begin, count), chunk.out.tensor(), kRounding, "out");
    expect_close(slice(whole.lse.tensor(), 2, begin, count), chunk.lse.tensor(), kRounding, "lse");
  }
}

// The same heads in another order are the same results in that order, bit by bit.
TEST_P(Masks, HeadsMayBePermuted) {
  for (const DType dtype : {DType::f32, DType::f16}) {
    const Inputs in(2, 33, 70, 6, 3, 40, dtype);
    const int64_t kv_order[] = {2, 0, 1}, order[] = {4, 5, 0, 1, 2, 3};
    Buffer query = Buffer::poisoned({2, 33, 6, 40}, dtype), key = Buffer::poisoned({2, 70, 3, 40}, dtype),
           value = Buffer::poisoned({2, 70, 3, 40}, dtype);
    const auto permute = [](const Buffer& from, Buffer& to, const int64_t* head_order) {
      const int64_t heads = from.tensor().shape[2], dim = from.tensor().shape[3];
      for (int64_t i = 0; i < from.tensor().numel(); ++i) {
        const int64_t d = i % dim, head = i / dim % heads, row = i / dim / heads;
        to.set(i, from.get((row * heads + head_order[head]) * dim + d));
      }
    };
    permute(in.query, query, order);
    permute(in.key, key, kv_order);
    permute(in.value, value, kv_order);
    AttentionOptions options;
    options.causal = true;
    const Attended before = attend(backend(), in.query.tensor(), in.key.tensor(), in.value.tensor(), options);
    const Attended after = attend(backend(), query.tensor(), key.tensor(), value.tensor(), options);
    for (int64_t head = 0; head < 6; ++head) {
      expect_same_bits(slice(after.out.tensor(), 2, head, 1), slice(before.out.tensor(), 2, order[head], 1),
                       "out");
      expect_same_bits(slice(after.lse.tensor(), 1, head, 1), slice(before.lse.tensor(), 1, order[head], 1),
                       "lse");
    }
  }
}

// The order of dimensions in memory changes nothing, bit by bit.
TEST_P(Masks, LayoutsGiveTheSameBits) {
  const Inputs in(2, 50, 75, 4, 2, 72, DType::bf16);
  const auto exchanged = [](const Buffer& from) {
    const auto& s = from.tensor().shape;
    Buffer to = Buffer::poisoned({s[0], s[1], s[2], s[3]}, from.tensor().dtype, check::Layout::bhsd);
    for (int64_t i = 0; i < from.tensor().numel(); ++i) to.set(i, from.get(i));
    return to;
  };
  const Buffer query = exchanged(in.query), key = exchanged(in.key), value = exchanged(in.value);
  const Attended a = attend(backend(), in.query.tensor(), in.key.tensor(), in.value.tensor());
  const Attended b = attend(backend(), query.tensor(), key.tensor(), value.tensor());
  expect_same_bits(a.out.tensor(), b.out.tensor(), "out");
  expect_same_bits(a.lse.tensor(), b.lse.tensor(), "lse");
}

ATTNSPAN_ON_EVERY_HOST_BACKEND(Masks);

}  // namespace
}  // namespace attnspan::property
