#pragma once
// What a machine can do at most: loops that do nothing but multiply and add, or read.

#include <cstddef>
#include <cstdint>

namespace attnspan::cli {

// Multiplies and adds in registers, `steps` times. Returns the floating-point operations done.
double fma_loop(int64_t steps);
// Reads floats[0, count) once; the sum, so that the reads are not left out.
float read_loop(const float* floats, size_t count);

}  // namespace attnspan::cli
