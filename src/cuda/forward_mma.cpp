#include "cuda/forward_mma.hpp"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "cuda/tiles.hpp"

namespace attnspan::cuda {
namespace {

template <typename T>
size_t shared_bytes(const MmaTile& tile, int depth, int warps) {
  const size_t pad = 16 / sizeof(T);
  const size_t rows = static_cast<size_t>(warps) * 16;
  const size_t tiles = sizeof(T) * ((rows + tile.keys) * (depth + pad) + tile.keys * (tile.columns + pad));
  return std::max(tiles, rows * (tile.columns + 4) * sizeof(float));  // the output is staged in f32
}

}  // namespace

bool choose_mma_shape(const Params& p, int compute, size_t shared_limit, MmaShape& shape) {
  const int bucket = mma_bucket(p.key.stored_dim, p.value.stored_dim);
  const MmaTile tile = compute == 0 ? MmaTiles<float>::table[bucket] : MmaTiles<__half>::table[bucket];
  const int64_t rows = static_cast<int64_t>(p.seqlen_q) * p.group;
  shape.depth = (p.key.stored_dim + 15) / 16 * 16;
  shape.chunks = (p.value.stored_dim + tile.columns - 1) / tile.columns;
  shape.warps = rows <= 16 ? 1 : rows <= 32 ? 2 : 4;
  const auto bytes = [&] {
    return compute == 0 ? shared_bytes<float>(tile, shape.depth, shape.warps)
                        : shared_bytes<__half>(tile, shape.depth, shape.warps);
  };
  // 512 bytes: the static scratch of rotations is 2 KB for four warps.
  constexpr size_t kStatic = 2048;
  while (shape.warps > 1 && bytes() + kStatic > shared_limit) shape.warps /= 2;
  shape.shared_bytes = bytes();
  return shape.shared_bytes + kStatic <= shared_limit;
}

cudaError_t launch_forward_mma(const Params& p, int compute, const MmaShape& shape, cudaStream_t stream) {
  switch (compute) {
    case 0:
      return detail::launch_forward_mma_as<float>(p, shape, stream);
    case 1:
      return detail::launch_forward_mma_as<__half>(p, shape, stream);
    default:
      return detail::launch_forward_mma_as<__nv_bfloat16>(p, shape, stream);
  }
}

}  // namespace attnspan::cuda
