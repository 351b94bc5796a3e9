#pragma once
// Warpgroup matrix instructions of sm_90a: d[64 x N] (+)= a[64 x 16] b[16 x N], f32 accumulation. A comes
// from shared memory (product of two K-major tiles) or from registers (weights times an MN-major tile of
// values). docs: PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions".

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace attnspan::cuda {

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Keeps the compiler from moving reads and writes of these registers across an asynchronous product.
template <int kCount>
__device__ __forceinline__ void keep(float (&r)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(r[i])::"memory");
}
template <int kCount>
__device__ __forceinline__ void keep(uint32_t (&r)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(r[i])::"memory");
}

// A tile of rows of 128 bytes, swizzled in groups of 8 rows (1024 bytes), as TMA's SWIZZLE_128B writes it.
// `leading` is the distance in bytes of two blocks of 64 columns; K-major operands do not use it. Steps
// inside a tile touch the low word alone: one addition each.
struct WgmmaTile {
  uint32_t low;

  __device__ __forceinline__ WgmmaTile(uint32_t address, uint32_t leading)
      : low((address & 0x3ffff) >> 4 | ((leading & 0x3ffff) >> 4) << 16) {}
  __device__ __forceinline__ uint64_t at(uint32_t offset) const {
    constexpr uint64_t kHigh = static_cast<uint64_t>(1024 >> 4) << 32 | static_cast<uint64_t>(1) << 62;
    return kHigh | (low + (offset >> 4));
  }
};

template <int kColumns>
struct Wgmma;

// clang-format off
// Operand lists, each longer by what is new.

#define ATTNSPAN_TEXT_48 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, " \
  "%22, %23"
#define ATTNSPAN_REGS_48 \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),  \
  "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),  \
  "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]),  \
  "+f"(d[23])
#define ATTNSPAN_TEXT_64 ATTNSPAN_TEXT_48 ", " \
  "%24, %25, %26, %27, %28, %29, %30, %31"
#define ATTNSPAN_REGS_64 ATTNSPAN_REGS_48, \
  "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]),  \
  "+f"(d[31])
#define ATTNSPAN_TEXT_80 ATTNSPAN_TEXT_64 ", " \
  "%32, %33, %34, %35, %36, %37, %38, %39"
#define ATTNSPAN_REGS_80 ATTNSPAN_REGS_64, \
  "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]),  \
  "+f"(d[39])
#define ATTNSPAN_TEXT_96 ATTNSPAN_TEXT_80 ", " \
  "%40, %41, %42, %43, %44, %45, %46, %47"
#define ATTNSPAN_REGS_96 ATTNSPAN_REGS_80, \
  "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]),  \
  "+f"(d[47])
#define ATTNSPAN_TEXT_112 ATTNSPAN_TEXT_96 ", " \
  "%48, %49, %50, %51, %52, %53, %54, %55"
#define ATTNSPAN_REGS_112 ATTNSPAN_REGS_96, \
  "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]),  \
  "+f"(d[55])
#define ATTNSPAN_TEXT_128 ATTNSPAN_TEXT_112 ", " \
  "%56, %57, %58, %59, %60, %61, %62, %63"
#define ATTNSPAN_REGS_128 ATTNSPAN_REGS_112, \
  "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]),  \
  "+f"(d[63])
#define ATTNSPAN_TEXT_144 ATTNSPAN_TEXT_128 ", " \
  "%64, %65, %66, %67, %68, %69, %70, %71"
#define ATTNSPAN_REGS_144 ATTNSPAN_REGS_128, \
  "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]),  \
  "+f"(d[71])
#define ATTNSPAN_TEXT_160 ATTNSPAN_TEXT_144 ", " \
  "%72, %73, %74, %75, %76, %77, %78, %79"
#define ATTNSPAN_REGS_160 ATTNSPAN_REGS_144, \
  "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]),  \
  "+f"(d[79])
#define ATTNSPAN_TEXT_176 ATTNSPAN_TEXT_160 ", " \
  "%80, %81, %82, %83, %84, %85, %86, %87"
#define ATTNSPAN_REGS_176 ATTNSPAN_REGS_160, \
  "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]),  \
  "+f"(d[87])
#define ATTNSPAN_TEXT_192 ATTNSPAN_TEXT_176 ", " \
  "%88, %89, %90, %91, %92, %93, %94, %95"
#define ATTNSPAN_REGS_192 ATTNSPAN_REGS_176, \
  "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]),  \
  "+f"(d[95])
#define ATTNSPAN_TEXT_256 ATTNSPAN_TEXT_192 ", " \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, " \
  "%113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define ATTNSPAN_REGS_256 ATTNSPAN_REGS_192, \
  "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]),  \
  "+f"(d[103]), "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]),  \
  "+f"(d[110]), "+f"(d[111]), "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]), "+f"(d[116]),  \
  "+f"(d[117]), "+f"(d[118]), "+f"(d[119]), "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]),  \
  "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])

#define ATTNSPAN_WGMMA_SHARED(N, TYPE, A, B, ADD) \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" ADD ", 0;\n" \
               "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" ATTNSPAN_TEXT_##N "}, " \
               "%" A ", %" B ", p, 1, 1, 0, 0;\n}\n" \
               : ATTNSPAN_REGS_##N : "l"(a), "l"(b), "r"(add) : "memory")
#define ATTNSPAN_WGMMA_REGISTERS(N, TYPE, A0, A1, A2, A3, B, ADD) \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" ADD ", 0;\n" \
               "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" ATTNSPAN_TEXT_##N "}, " \
               "{%" A0 ", %" A1 ", %" A2 ", %" A3 "}, %" B ", p, 1, 1, 1;\n}\n" \
               : ATTNSPAN_REGS_##N : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add) : "memory")

// I0..I5: the numbers of the operands behind the N / 2 accumulators. add == 0: d is overwritten.
#define ATTNSPAN_WGMMA(N, I0, I1, I2, I3, I4, I5) \
  template <> \
  struct Wgmma<N> { \
    template <typename T> \
    static __device__ __forceinline__ void keys(float (&d)[N / 2], uint64_t a, uint64_t b, int add) { \
      if constexpr (std::is_same_v<T, __half>) { \
        ATTNSPAN_WGMMA_SHARED(N, "f16", I0, I1, I2); \
      } else { \
        ATTNSPAN_WGMMA_SHARED(N, "bf16", I0, I1, I2); \
      } \
    } \
    template <typename T> \
    static __device__ __forceinline__ void values(float (&d)[N / 2], const uint32_t* a, uint64_t b, int add) { \
      if constexpr (std::is_same_v<T, __half>) { \
        ATTNSPAN_WGMMA_REGISTERS(N, "f16", I0, I1, I2, I3, I4, I5); \
      } else { \
        ATTNSPAN_WGMMA_REGISTERS(N, "bf16", I0, I1, I2, I3, I4, I5); \
      } \
    } \
  };

ATTNSPAN_WGMMA(48, "24", "25", "26", "27", "28", "29")
ATTNSPAN_WGMMA(64, "32", "33", "34", "35", "36", "37")
ATTNSPAN_WGMMA(80, "40", "41", "42", "43", "44", "45")
ATTNSPAN_WGMMA(96, "48", "49", "50", "51", "52", "53")
ATTNSPAN_WGMMA(112, "56", "57", "58", "59", "60", "61")
ATTNSPAN_WGMMA(128, "64", "65", "66", "67", "68", "69")
ATTNSPAN_WGMMA(144, "72", "73", "74", "75", "76", "77")
ATTNSPAN_WGMMA(160, "80", "81", "82", "83", "84", "85")
ATTNSPAN_WGMMA(176, "88", "89", "90", "91", "92", "93")
ATTNSPAN_WGMMA(192, "96", "97", "98", "99", "100", "101")
ATTNSPAN_WGMMA(256, "128", "129", "130", "131", "132", "133")
// clang-format on

}  // namespace attnspan::cuda
