#pragma once
// Which instruction sets the kernels of the CPU backend and the KV encoders are compiled for; include before
// any Highway header. Every target costs a compilation of every kernel, so the list is short:
//   AVX3   x86 with AVX-512 (F, BW, DQ, VL): 32 registers of 16 floats
//   AVX2   x86 with FMA: 16 registers of 8 floats
//   NEON   every 64-bit Arm: 32 registers of 4 floats
//   the baseline (scalars, or portable vectors of 4 floats) for anything older
// SVE is left out: its vector types have no size, so a block of accumulators cannot be an array, and the
// server cores that have it issue as many NEON multiply-adds per cycle as SVE ones.

#define HWY_DISABLED_TARGETS (~(HWY_AVX3 | HWY_AVX2 | HWY_NEON | HWY_EMU128 | HWY_SCALAR))

// ATTNSPAN_CPU_TARGETS=one: what the compiler's own flags allow, and nothing else.
#ifdef ATTNSPAN_CPU_ONE_TARGET
#define HWY_COMPILE_ONLY_STATIC
#endif
