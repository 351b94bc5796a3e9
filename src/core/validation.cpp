#include "core/validation.hpp"

#include <algorithm>

namespace attnspan {

void require_shape(const Tensor& tensor, const std::string& argument, const std::vector<int64_t>& shape,
                   const std::string& meaning) {
  std::string expected = "[";
  bool same = tensor.rank == static_cast<int>(shape.size());
  for (size_t i = 0; i < shape.size(); ++i) {
    expected += (i == 0 ? "" : ", ") + (shape[i] < 0 ? std::string("any") : std::to_string(shape[i]));
    same = same && (shape[i] < 0 || tensor.shape[i] == shape[i]);
  }
  require(same, argument, tensor.shape_text(), expected + "] (" + meaning + ")");
}

void require_rank(const Tensor& tensor, const std::string& argument, int rank, const std::string& meaning) {
  require(tensor.rank == rank, argument, "rank " + std::to_string(tensor.rank) + " " + tensor.shape_text(),
          "rank " + std::to_string(rank) + " (" + meaning + ")");
}

void require_dtype(const Tensor& tensor, const std::string& argument, DType dtype) {
  require(tensor.dtype == dtype, argument, name_of(tensor.dtype), name_of(dtype));
}

void require_device(const Tensor& tensor, const std::string& argument, Device device) {
  require(tensor.device == device, argument, std::string("a tensor on ") + name_of(tensor.device),
          std::string("one on ") + name_of(device) + ", where query is");
}

void require_rows(const Tensor& tensor, const std::string& argument) {
  for (int i = 0; i < tensor.rank; ++i) {
    require(tensor.shape[i] >= 0, argument, "shape " + tensor.shape_text(), "extents of 0 or more");
    require(tensor.stride[i] >= 0 || tensor.shape[i] <= 1, argument,
            "stride " + std::to_string(tensor.stride[i]) + " in dimension " + std::to_string(i),
            "strides of 0 or more");
  }
  const int last = tensor.rank - 1;
  require(last < 0 || tensor.shape[last] <= 1 || tensor.stride[last] == 1, argument,
          "stride " + std::to_string(last < 0 ? 0 : tensor.stride[last]) + " in the last dimension",
          "a contiguous last dimension (stride 1)");
  require(tensor.data != nullptr || tensor.numel() == 0, argument, "no data (null address)",
          "an address of " + std::to_string(tensor.numel()) + " elements");
}

void require_no_overlap(const Tensor& tensor, const std::string& argument) {
  // Sort dimensions by stride; each must step over everything that the smaller ones span.
  std::vector<std::pair<int64_t, int64_t>> dims;  // (stride, extent)
  for (int i = 0; i < tensor.rank; ++i) {
    if (tensor.shape[i] > 1) dims.emplace_back(tensor.stride[i], tensor.shape[i]);
  }
  if (tensor.numel() == 0) return;
  std::sort(dims.begin(), dims.end());
  int64_t span = 1;
  for (const auto& [stride, extent] : dims) {
    require(stride >= span, argument,
            "strides under which elements overlap (stride " + std::to_string(stride) +
                " over an inner span of " + std::to_string(span) + ")",
            "one address per element, since it is written");
    span = stride * (extent - 1) + span;
  }
}

}  // namespace attnspan
