// Loads a tile of keys or values as f32 rows, whatever their format: decoded once per tile, then used by
// every query row and every head of the group. A new format is one more case here.

#if defined(ATTNSPAN_CPU_LOADER_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef ATTNSPAN_CPU_LOADER_INL_HPP
#undef ATTNSPAN_CPU_LOADER_INL_HPP
#else
#define ATTNSPAN_CPU_LOADER_INL_HPP
#endif

#include "cpu/kv_source.hpp"
#include "cpu/simd-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace attnspan::cpu {
namespace HWY_NAMESPACE {

// A row of a tile: `dim` floats and then a cache line, so that the rows of a power-of-two dim do not all fall
// into the same few sets of the first cache when a column is read.
constexpr size_t tile_row(size_t dim) { return (dim + 15) / 16 * 16 + 16; }

HWY_INLINE void load_run(const RowRun& run, DType dtype, size_t dim, float* HWY_RESTRICT to, size_t stride) {
  for (int64_t i = 0; i < run.count; ++i) {
    row_to_f32(run.codes + i * run.code_stride, dtype, dim, to + static_cast<size_t>(i) * stride);
  }
}

// Keys [key_begin, key_end) to rows of `stride` floats.
HWY_NOINLINE void load_tile(const KvSource& source, int64_t key_begin, int64_t key_end,
                            float* HWY_RESTRICT to, size_t stride) {
  while (key_begin < key_end) {
    const RowRun run = source.run(key_begin, key_end);
    switch (source.format()) {
      case KvFormat::f32:
        load_run(run, DType::f32, source.dim(), to, stride);
        break;
      case KvFormat::f16:
        load_run(run, DType::f16, source.dim(), to, stride);
        break;
      case KvFormat::bf16:
        load_run(run, DType::bf16, source.dim(), to, stride);
        break;
      case KvFormat::q8:
      case KvFormat::tbq4:
        HWY_ABORT("supports() refuses this format");
    }
    key_begin += run.count;
    to += static_cast<size_t>(run.count) * stride;
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace attnspan::cpu
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
