#include "check/case.hpp"

#include <algorithm>
#include <numeric>

namespace attnspan::check {
namespace {

int64_t total(const std::vector<int64_t>& lengths) {
  return std::accumulate(lengths.begin(), lengths.end(), int64_t{0});
}

Buffer cu_seqlens(const std::vector<int64_t>& lengths) {
  Buffer cu = Buffer::poisoned({static_cast<int64_t>(lengths.size()) + 1}, DType::i32);
  int64_t sum = 0;
  cu.set_int(0, 0);
  for (size_t i = 0; i < lengths.size(); ++i) {
    sum += lengths[i];
    cu.set_int(static_cast<int64_t>(i) + 1, static_cast<int32_t>(sum));
  }
  return cu;
}

int64_t uniform(Random& random, int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(random);
}

}  // namespace

Case::Case(const CaseSpec& spec) : spec_(spec) {
  Random random(spec.seed);
  if (packed()) {
    spec_.batch = static_cast<int64_t>(spec.packed_q.size());
    spec_.seqlen_q = total(spec.packed_q);
    spec_.seqlen_k = total(spec.packed_k);
  }
  const CaseSpec& s = spec_;
  const Layout key_layout = s.layout;
  const Layout query_layout = s.layout == Layout::broadcast ? Layout::bshd : s.layout;
  query_ = Buffer::poisoned(rows_shape(s.seqlen_q, s.heads, s.head_dim), s.dtype, query_layout);
  key_ = Buffer::poisoned(rows_shape(s.seqlen_k, s.kv_heads, s.head_dim), s.dtype, key_layout);
  value_ = Buffer::poisoned(rows_shape(s.seqlen_k, s.kv_heads, s.head_dim_v), s.dtype, key_layout);
  dout_ = Buffer::poisoned(rows_shape(s.seqlen_q, s.heads, s.head_dim_v), s.dtype, query_layout);
  query_.fill_normal(random);
  key_.fill_normal(random);
  value_.fill_normal(random);
  dout_.fill_normal(random);
  if (s.values == Values::extreme) make_extreme(random);
  make_options(random);
  if (s.cache) {
    std::vector<int64_t> lengths;
    for (int64_t b = 0; b < s.batch; ++b)
      lengths.push_back(b == 0 ? s.seqlen_k : uniform(random, 0, s.seqlen_k));
    const int64_t page_size = s.page_size > 0 ? s.page_size : std::max<int64_t>(1, s.seqlen_k);
    cache_ = std::make_unique<BuiltCache>(key_, value_, lengths, s.k_format, s.v_format, page_size, random);
  } else if (s.seqused_k) {
    poison_unused_keys();
  }
}

std::vector<int64_t> Case::rows_shape(int64_t rows, int64_t heads, int64_t dim) const {
  if (packed()) return {rows, heads, dim};
  return {spec_.batch, rows, heads, dim};
}

std::vector<int64_t> Case::lse_shape() const {
  if (packed()) return {spec_.heads, spec_.seqlen_q};
  return {spec_.batch, spec_.heads, spec_.seqlen_q};
}

// Logits that are exact in f32 and in f16 inputs: 2^10 * +-2^10 plus small halves, with softmax_scale 1.
void Case::make_extreme(Random& random) {
  spec_.softmax_scale = 1;
  const int64_t query_rows = query_.tensor().numel() / spec_.head_dim;
  const int64_t key_rows = key_.tensor().numel() / spec_.head_dim;
  for (int64_t i = 0; i < query_.tensor().numel(); ++i) query_.set(i, 0);
  for (int64_t i = 0; i < key_.tensor().numel(); ++i) key_.set(i, 0);
  for (int64_t r = 0; r < query_rows; ++r) {
    query_.set(r * spec_.head_dim, 1024);
    query_.set(r * spec_.head_dim + 1, 1);
  }
  // One sign per KV head: near -2^20 every logit of a row must still count, near +2^20 nothing may overflow.
  for (int64_t r = 0; r < key_rows; ++r) {
    key_.set(r * spec_.head_dim, r % spec_.kv_heads == 0 ? -1024.0F : 1024.0F);
    key_.set(r * spec_.head_dim + 1, 0.5F * static_cast<float>(uniform(random, -4, 4)));
  }
}

void Case::make_documents(Random& random) {
  const CaseSpec& s = spec_;
  if (s.documents == Documents::none) return;
  const bool per_batch = s.documents != Documents::starts;
  const std::vector<int64_t> shape =
      per_batch ? std::vector<int64_t>{s.batch, s.seqlen_q} : std::vector<int64_t>{s.seqlen_q};
  key_start_ = Buffer::poisoned(shape, DType::i32);
  key_end_ = Buffer::poisoned(shape, DType::i32);
  const bool uses_start = s.documents != Documents::right_padded;
  const bool uses_end = s.documents == Documents::starts_ends || s.documents == Documents::right_padded;
  for (int64_t b = 0; b < (per_batch ? s.batch : 1); ++b) {
    int64_t start = s.documents == Documents::left_padded ? uniform(random, 0, s.seqlen_k) : 0;
    int64_t end = s.documents == Documents::right_padded
                      ? uniform(random, 0, s.seqlen_k)
                      : uniform(random, 1, std::max<int64_t>(1, s.seqlen_k));
    for (int64_t i = 0; i < s.seqlen_q; ++i) {
      const bool documents = s.documents == Documents::starts || s.documents == Documents::starts_ends;
      if (documents && i > 0 && uniform(random, 0, 12) == 0) {  // a new document begins at this row
        start = std::max(start, std::min(end, s.seqlen_k));
        end = std::min(s.seqlen_k, start + uniform(random, 0, 30));
      }
      key_start_.set_int(b * s.seqlen_q + i, static_cast<int32_t>(start));
      key_end_.set_int(b * s.seqlen_q + i, static_cast<int32_t>(end));
    }
  }
  if (uses_start) options_.key_start = key_start_.tensor();
  if (uses_end) options_.key_end = key_end_.tensor();
}

void Case::make_options(Random& random) {
  const CaseSpec& s = spec_;
  options_.softmax_scale = s.softmax_scale;
  options_.softcap = s.softcap;
  options_.causal = s.causal;
  options_.diagonal = s.diagonal;
  options_.window_left = s.window_left;
  options_.window_right = s.window_right;
  if (packed()) {
    cu_seqlens_q_ = cu_seqlens(s.packed_q);
    cu_seqlens_k_ = cu_seqlens(s.packed_k);
    options_.cu_seqlens_q = cu_seqlens_q_.tensor();
    options_.cu_seqlens_k = cu_seqlens_k_.tensor();
  }
  make_documents(random);
  if (s.bias) {  // broadcast over the batch, so that broadcasting is always exercised
    bias_ = Buffer::poisoned({1, s.heads, s.seqlen_q, s.seqlen_k}, DType::f32);
    bias_.fill_normal(random);
    for (int64_t i = 0; s.masking_bias && i < bias_.tensor().numel(); ++i) {
      const int64_t draw = uniform(random, 0, 9);
      if (draw < 2) bias_.set(i, -std::numeric_limits<float>::infinity());
      if (draw == 2) bias_.set(i, -1e30F);
    }
    options_.bias = bias_.tensor();
  }
  if (s.alibi) {
    alibi_ = Buffer::poisoned({s.batch, s.heads}, DType::f32);
    for (int64_t i = 0; i < s.batch * s.heads; ++i) alibi_.set(i, 0.01F * static_cast<float>(i + 1));
    options_.alibi_slopes = alibi_.tensor();
  }
  if (s.sinks) {
    sinks_ = Buffer::poisoned({s.heads}, DType::f32);
    sinks_.fill_normal(random);
    options_.sinks = sinks_.tensor();
  }
  if (s.dlse) {
    dlse_ = Buffer::poisoned(lse_shape(), DType::f32);
    dlse_.fill_normal(random);
  }
  if (s.seqused_k && !s.cache) {
    seqused_k_ = Buffer::poisoned({s.batch}, DType::i32);
    for (int64_t b = 0; b < s.batch; ++b)
      seqused_k_.set_int(b, static_cast<int32_t>(uniform(random, 0, s.seqlen_k)));
    options_.seqused_k = seqused_k_.tensor();
  }
}

void Case::poison_unused_keys() {
  if (spec_.layout == Layout::broadcast) return;  // other sequences read the same rows
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const int32_t* used = static_cast<const int32_t*>(seqused_k_.tensor().data);
  for (Buffer* buffer : {&key_, &value_}) {
    const int64_t row = buffer->tensor().shape[2] * buffer->tensor().shape[3];
    for (int64_t b = 0; b < spec_.batch; ++b) {
      for (int64_t i = used[b] * row; i < spec_.seqlen_k * row; ++i)
        buffer->set(b * spec_.seqlen_k * row + i, nan);
    }
  }
}

Case::ForwardOutputs Case::forward_outputs() const {
  const Layout layout = spec_.layout == Layout::broadcast ? Layout::bshd : spec_.layout;
  return {Buffer::poisoned(rows_shape(spec_.seqlen_q, spec_.heads, spec_.head_dim_v), spec_.dtype, layout),
          Buffer::poisoned(lse_shape(), DType::f32, layout == Layout::sliced ? layout : Layout::bshd)};
}

Case::BackwardOutputs Case::backward_outputs() const {
  const Layout layout = spec_.layout == Layout::broadcast ? Layout::bshd : spec_.layout;
  return {Buffer::poisoned(rows_shape(spec_.seqlen_q, spec_.heads, spec_.head_dim), spec_.dtype, layout),
          Buffer::poisoned(rows_shape(spec_.seqlen_k, spec_.kv_heads, spec_.head_dim), spec_.dtype, layout),
          Buffer::poisoned(rows_shape(spec_.seqlen_k, spec_.kv_heads, spec_.head_dim_v), spec_.dtype, layout),
          Buffer::poisoned({spec_.heads}, DType::f32)};
}

ForwardArgs Case::forward_args(const ForwardOutputs& outputs) const {
  ForwardArgs args;
  args.query = query_.tensor();
  if (cache_) {
    args.cache = &cache_->view();
  } else {
    args.key = key_.tensor();
    args.value = value_.tensor();
  }
  args.out = outputs.out.tensor();
  args.lse = outputs.lse.tensor();
  args.options = options_;
  return args;
}

BackwardArgs Case::backward_args(const ForwardOutputs& forward, const BackwardOutputs& outputs) const {
  BackwardArgs args;
  args.query = query_.tensor();
  args.key = key_.tensor();
  args.value = value_.tensor();
  args.out = forward.out.tensor();
  args.lse = forward.lse.tensor();
  args.dout = dout_.tensor();
  if (spec_.dlse) args.dlse = dlse_.tensor();
  args.dq = outputs.dq.tensor();
  args.dk = outputs.dk.tensor();
  args.dv = outputs.dv.tensor();
  if (spec_.sinks) args.d_sinks = outputs.d_sinks.tensor();
  args.options = options_;
  return args;
}

}  // namespace attnspan::check
