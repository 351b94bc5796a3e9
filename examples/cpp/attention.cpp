// The C++ API in one page: forward, backward, decode over a cache, and the merge of two halves.

#include <algorithm>
#include <attnspan/attention.hpp>
#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

using attnspan::DType;

namespace {

// 2 sequences of 300 tokens, 8 query heads over 2 KV heads, head_dim 64
constexpr int64_t kBatch = 2, kSeqlen = 300, kHeads = 8, kKvHeads = 2, kDim = 64;

std::vector<float> random_values(int64_t count) {
  static std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = normal(random);
  return values;
}

attnspan::Tensor rows(const std::vector<float>& data, int64_t seqlen, int64_t heads) {
  return attnspan::bshd(data.data(), DType::f32, kBatch, seqlen, heads, kDim);
}

float largest_difference(const float* a, const float* b, int64_t count) {
  float largest = 0;
  for (int64_t i = 0; i < count; ++i) largest = std::max(largest, std::abs(a[i] - b[i]));
  return largest;
}

int run() {
  const std::vector<float> query = random_values(kBatch * kSeqlen * kHeads * kDim);
  const std::vector<float> key = random_values(kBatch * kSeqlen * kKvHeads * kDim);
  const std::vector<float> value = random_values(kBatch * kSeqlen * kKvHeads * kDim);
  std::vector<float> out(query.size()), lse(kBatch * kHeads * kSeqlen);

  // Forward: causal attention. lse is what backward and merging need of it; leave it out if you do neither.
  attnspan::ForwardArgs forward;
  forward.query = rows(query, kSeqlen, kHeads);
  forward.key = rows(key, kSeqlen, kKvHeads);
  forward.value = rows(value, kSeqlen, kKvHeads);
  forward.out = rows(out, kSeqlen, kHeads);
  forward.lse = attnspan::contiguous(lse.data(), DType::f32, {kBatch, kHeads, kSeqlen});
  forward.options.causal = true;
  const attnspan::Result result = attnspan::forward(forward);
  std::printf("forward   on %s\n", result.backend.c_str());

  // Backward: gradients of query, key and value from the gradient of out.
  const std::vector<float> dout = random_values(static_cast<int64_t>(out.size()));
  std::vector<float> dq(query.size()), dk(key.size()), dv(value.size());
  attnspan::BackwardArgs backward;
  backward.query = forward.query;
  backward.key = forward.key;
  backward.value = forward.value;
  backward.out = forward.out;
  backward.lse = forward.lse;
  backward.dout = rows(dout, kSeqlen, kHeads);
  backward.dq = rows(dq, kSeqlen, kHeads);
  backward.dk = rows(dk, kSeqlen, kKvHeads);
  backward.dv = rows(dv, kSeqlen, kKvHeads);
  backward.options = forward.options;
  std::printf("backward  on %s\n", attnspan::backward(backward).backend.c_str());

  // Decode: one new query against keys and values that a cache holds. A view of any memory can be that cache.
  const std::vector<int32_t> seqlens(kBatch, kSeqlen);
  const attnspan::KvView cache = attnspan::dense_cache(
      forward.key, forward.value, attnspan::contiguous(seqlens.data(), DType::i32, {kBatch}));
  attnspan::Tensor last = forward.query;  // the last row of each sequence: a view, not a copy
  last.shape[1] = 1;
  last.byte_offset += (kSeqlen - 1) * last.stride[1] * static_cast<int64_t>(sizeof(float));
  std::vector<float> token(kBatch * kHeads * kDim);
  attnspan::decode(last, cache, rows(token, 1, kHeads));
  float error = 0;
  for (int64_t b = 0; b < kBatch; ++b) {
    const float* expected = out.data() + (b * kSeqlen + kSeqlen - 1) * kHeads * kDim;
    error = std::max(error, largest_difference(token.data() + b * kHeads * kDim, expected, kHeads * kDim));
  }
  std::printf("decode    differs from forward's last row by %.1e\n", error);

  // Merge: attention over two halves of the keys, computed apart, is attention over all of them.
  std::vector<float> half_out[2], half_lse[2];
  attnspan::ForwardArgs half = forward;
  half.options.causal = false;
  attnspan::forward(half);  // over all keys, into out and lse
  for (int64_t i = 0; i < 2; ++i) {
    half_out[i].resize(out.size());
    half_lse[i].resize(lse.size());
    half.out = rows(half_out[i], kSeqlen, kHeads);
    half.lse.data = half_lse[i].data();
    for (attnspan::Tensor* tensor : {&half.key, &half.value}) {
      tensor->shape[1] = kSeqlen / 2;
      tensor->byte_offset = i * (kSeqlen / 2) * tensor->stride[1] * static_cast<int64_t>(sizeof(float));
    }
    attnspan::forward(half);
  }
  attnspan::MergeArgs merge;
  merge.out_a = rows(half_out[0], kSeqlen, kHeads);
  merge.out_b = rows(half_out[1], kSeqlen, kHeads);
  merge.lse_a = merge.lse_b = forward.lse;
  merge.lse_a.data = half_lse[0].data();
  merge.lse_b.data = half_lse[1].data();
  merge.out = merge.out_a;  // in place
  merge.lse = merge.lse_a;
  attnspan::merge_states(merge);
  const float merge_error =
      largest_difference(half_out[0].data(), out.data(), static_cast<int64_t>(out.size()));
  std::printf("merge     differs from attention over all keys by %.1e\n", merge_error);
  return error < 1e-5F && merge_error < 1e-5F ? 0 : 1;
}

}  // namespace

int main() {
  try {
    return run();
  } catch (const attnspan::Error& error) {  // one line: the argument, what was found, what was expected
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
