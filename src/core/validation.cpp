#include "core/validation.hpp"

#include <algorithm>
#include <array>

namespace attnspan {

void require_shape(const Tensor& tensor, std::string_view argument, std::span<const int64_t> shape,
                   std::string_view meaning) {
  bool same = tensor.rank == static_cast<int>(shape.size());
  int i = 0;
  for (const int64_t extent : shape) {
    same = same && (extent < 0 || tensor.shape[i] == extent);
    ++i;
  }
  if (same) return;
  std::string expected = "[";
  for (const int64_t extent : shape) {
    expected +=
        (expected.size() == 1 ? "" : ", ") + (extent < 0 ? std::string("any") : std::to_string(extent));
  }
  refuse(argument, tensor.shape_text(), expected.append("] (").append(meaning).append(")"));
}

void require_rank(const Tensor& tensor, std::string_view argument, int rank, std::string_view meaning) {
  if (tensor.rank == rank) return;
  refuse(argument, "rank " + std::to_string(tensor.rank) + " " + tensor.shape_text(),
         "rank " + std::to_string(rank) + " (" + std::string(meaning) + ")");
}

void require_dtype(const Tensor& tensor, std::string_view argument, DType dtype) {
  require(tensor.dtype == dtype, argument, name_of(tensor.dtype), name_of(dtype));
}

void require_device(const Tensor& tensor, std::string_view argument, Device device) {
  if (tensor.device == device) return;
  refuse(argument, std::string("a tensor on ") + name_of(tensor.device),
         std::string("one on ") + name_of(device) + ", where query is");
}

void require_rows(const Tensor& tensor, std::string_view argument) {
  for (int i = 0; i < tensor.rank; ++i) {
    if (tensor.shape[i] < 0) refuse(argument, "shape " + tensor.shape_text(), "extents of 0 or more");
    if (tensor.stride[i] < 0 && tensor.shape[i] > 1) {
      refuse(argument, "stride " + std::to_string(tensor.stride[i]) + " in dimension " + std::to_string(i),
             "strides of 0 or more");
    }
  }
  const int last = tensor.rank - 1;
  if (last >= 0 && tensor.shape[last] > 1 && tensor.stride[last] != 1) {
    refuse(argument, "stride " + std::to_string(tensor.stride[last]) + " in the last dimension",
           "a contiguous last dimension (stride 1)");
  }
  if (tensor.data == nullptr && tensor.numel() != 0) {
    refuse(argument, "no data (null address)",
           "an address of " + std::to_string(tensor.numel()) + " elements");
  }
}

void require_no_overlap(const Tensor& tensor, std::string_view argument) {
  if (tensor.numel() == 0) return;
  // Sort dimensions by stride; each must step over everything that the smaller ones span.
  std::array<std::pair<int64_t, int64_t>, kMaxRank> dims;  // (stride, extent)
  int count = 0;
  for (int i = 0; i < tensor.rank; ++i) {
    if (tensor.shape[i] > 1) dims[count++] = {tensor.stride[i], tensor.shape[i]};
  }
  std::sort(dims.begin(), dims.begin() + count);
  int64_t span = 1;
  for (int i = 0; i < count; ++i) {
    const auto& [stride, extent] = dims[i];
    if (stride < span) {
      refuse(argument,
             "strides under which elements overlap (stride " + std::to_string(stride) +
                 " over an inner span of " + std::to_string(span) + ")",
             "one address per element, since it is written");
    }
    span = stride * (extent - 1) + span;
  }
}

void check_head_dim(int64_t dim, const char* name) {
  if (dim < 1 || dim > kMaxHeadDim) {
    refuse(name, "head dim " + std::to_string(dim), "1 to " + std::to_string(kMaxHeadDim));
  }
}

}  // namespace attnspan
