#pragma once
// Included before every shader that is compiled as C++: what instantiate.h leaves to the platform.

#include "emulator/kernel.hpp"

#define EMU_JOIN_(A, B) A##B
#define EMU_JOIN(A, B) EMU_JOIN_(A, B)
#define ATTNSPAN_INSTANTIATE(NAME, ...) \
  static const emu::RegisterKernel EMU_JOIN(registered_, __COUNTER__)(NAME, &__VA_ARGS__);
#define ATTNSPAN_KERNEL(NAME) static const emu::RegisterKernel NAME##_registered(#NAME, &NAME);
#define ATTNSPAN_UNROLL
