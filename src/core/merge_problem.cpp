#include "core/merge_problem.hpp"

#include <cmath>

#include "core/dtype.hpp"
#include "core/softmax_state.hpp"
#include "core/validation.hpp"

namespace attnspan {
namespace {

Rows rows_with(const Tensor& tensor, int batch_dim, int row_dim, int head_dim) {
  Rows rows;
  rows.data = tensor.data;
  rows.byte_offset = tensor.byte_offset;
  if (tensor.device == Device::cpu || tensor.device == Device::cuda) {
    if (rows.data != nullptr) rows.data = static_cast<char*>(tensor.data) + tensor.byte_offset;
    rows.byte_offset = 0;
  }
  rows.batch_stride = batch_dim >= 0 ? tensor.stride[batch_dim] : 0;
  rows.row_stride = tensor.stride[row_dim];
  rows.head_stride = tensor.stride[head_dim];
  return rows;
}

Rows out_rows(const Tensor& t) { return t.rank == 4 ? rows_with(t, 0, 1, 2) : rows_with(t, -1, 0, 1); }
Rows lse_rows(const Tensor& t) { return t.rank == 3 ? rows_with(t, 0, 2, 1) : rows_with(t, -1, 1, 0); }

void check_out(const Tensor& tensor, const char* name, const Tensor& like) {
  require(static_cast<bool>(tensor), name, "no tensor", "one");
  require(tensor.rank == like.rank && tensor.shape == like.shape, name, tensor.shape_text(),
          like.shape_text() + " (out_a's shape)");
  require_dtype(tensor, name, like.dtype);
  require_device(tensor, name, like.device);
  require_rows(tensor, name);
}

void check_lse(const Tensor& tensor, const char* name, const Tensor& like) {
  require(static_cast<bool>(tensor), name, "no tensor", "one");
  require_dtype(tensor, name, DType::f32);
  require_device(tensor, name, like.device);
  if (like.rank == 4) {
    require_shape(tensor, name, {like.shape[0], like.shape[2], like.shape[1]}, "batch, heads, rows of out_a");
  } else {
    require_shape(tensor, name, {like.shape[1], like.shape[0]}, "heads, rows of out_a");
  }
}

// A state given by its lse is (m = lse, l = 1); lse = -inf is the empty state.
SoftmaxState<double> state_of(float lse) { return single_logit(static_cast<double>(lse)); }

}  // namespace

MergeProblem make_merge_problem(const MergeArgs& args) {
  require(args.out_a.rank == 3 || args.out_a.rank == 4, "out_a", "rank " + std::to_string(args.out_a.rank),
          "[batch, rows, heads, dim] or [total, heads, dim]");
  require(args.out_a.dtype != DType::i32, "out_a", "int32", "f32, f16 or bf16");
  check_out(args.out_a, "out_a", args.out_a);
  check_out(args.out_b, "out_b", args.out_a);
  check_out(args.out, "out", args.out_a);
  require_no_overlap(args.out, "out");
  check_lse(args.lse_a, "lse_a", args.out_a);
  check_lse(args.lse_b, "lse_b", args.out_a);
  check_lse(args.lse, "lse", args.out_a);
  require_no_overlap(args.lse, "lse");

  const int first = args.out_a.rank == 4 ? 1 : 0;
  MergeProblem p;
  p.device = args.out_a.device;
  p.dtype = args.out_a.dtype;
  p.batch = first == 1 ? args.out_a.shape[0] : 1;
  p.rows = args.out_a.shape[first];
  p.heads = args.out_a.shape[first + 1];
  p.head_dim_v = args.out_a.shape[first + 2];
  p.out_a = out_rows(args.out_a);
  p.out_b = out_rows(args.out_b);
  p.out = out_rows(args.out);
  p.lse_a = lse_rows(args.lse_a);
  p.lse_b = lse_rows(args.lse_b);
  p.lse = lse_rows(args.lse);
  return p;
}

void merge_on_host(const MergeProblem& p) {
  for (int64_t b = 0; b < p.batch; ++b) {
    for (int64_t h = 0; h < p.heads; ++h) {
      for (int64_t i = 0; i < p.rows; ++i) {
        SoftmaxState<double> a = state_of(static_cast<const float*>(p.lse_a.data)[p.lse_a.index(b, h, i)]);
        const SoftmaxState<double> other =
            state_of(static_cast<const float*>(p.lse_b.data)[p.lse_b.index(b, h, i)]);
        const SoftmaxState<double> before = a;
        const MergeWeights<double> weight = merge(a, other);
        const double weight_a = before.empty() ? 0 : weight.a * before.l / a.l;
        const double weight_b = other.empty() ? 0 : weight.b * other.l / a.l;
        static_cast<float*>(p.lse.data)[p.lse.index(b, h, i)] = static_cast<float>(a.lse());
        for (int64_t d = 0; d < p.head_dim_v; ++d) {
          // A weight of 0 must not meet a stale non-finite value.
          double sum = 0;
          if (weight_a != 0) sum += weight_a * load_f32(p.out_a.data, p.out_a.index(b, h, i) + d, p.dtype);
          if (weight_b != 0) sum += weight_b * load_f32(p.out_b.data, p.out_b.index(b, h, i) + d, p.dtype);
          store_f32(p.out.data, p.out.index(b, h, i) + d, p.dtype, static_cast<float>(sum));
        }
      }
    }
  }
}

}  // namespace attnspan
