// Tile sizes of the CPU kernels: the one table. Included once per target.
//
// A product is computed in blocks of kMicroRows x (kPanelVectors * lanes) accumulators that stay in
// registers. Per step of the depth a block loads kPanelVectors vectors and broadcasts kMicroRows scalars for
// kMicroRows * kPanelVectors FMAs.
//
// target | registers | block    | loads per FMA | why
// AVX3   | 32 x 16   | 8 x 32   | 10 / 16       | two FMAs and two 64-byte loads a cycle: FMAs bind (8 cycles
// for 5);
//        |           |          |               | 16 chains cover a latency of 4; 8 divides the usual head
//        dims
// AVX2   | 16 x 8    | 6 x 16   | 8 / 12        | 12 accumulators + 2 vectors + 1 broadcast fill the 16
// registers NEON   | 32 x 4    | 6 x 16   | 10 / 24       | 24 accumulators + 4 vectors + broadcasts; four
// FMAs a cycle at most other  | 16 x 4    | 4 x 8    | 6 / 8         | portable vectors without FMA: small
// enough not to spill

#if defined(ATTNSPAN_CPU_TILES_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef ATTNSPAN_CPU_TILES_INL_HPP
#undef ATTNSPAN_CPU_TILES_INL_HPP
#else
#define ATTNSPAN_CPU_TILES_INL_HPP
#endif

#include "cpu/simd-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace attnspan::cpu {
namespace HWY_NAMESPACE {

#if HWY_TARGET == HWY_AVX3
inline constexpr size_t kMicroRows = 8, kPanelVectors = 2;
#elif HWY_TARGET == HWY_AVX2
inline constexpr size_t kMicroRows = 6, kPanelVectors = 2;
#elif HWY_TARGET == HWY_NEON
inline constexpr size_t kMicroRows = 6, kPanelVectors = 4;
#else
inline constexpr size_t kMicroRows = 4, kPanelVectors = 2;
#endif

// Query rows that share a panel: one lane each.
inline constexpr size_t kPanelRows = kPanelVectors * kLanes;

// Rows of a block and keys of a tile in backward. dk and dv are loaded and stored once per 64 steps of depth
// (2 / 64 of the FMAs' time); p and ds of a tile take 2 x 32 KiB, and with keys, values, query, dout, their
// transposes and the touched part of the sums about half a MiB of the second cache at head_dim 128.
inline constexpr size_t kBackwardRows = 64, kBackwardKeys = 128;
static_assert(kBackwardRows % kPanelRows == 0);

}  // namespace HWY_NAMESPACE
}  // namespace attnspan::cpu
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
