#pragma once
// What the Metal compiler is told, and the emulator on other systems defines otherwise.

#ifndef ATTNSPAN_INSTANTIATE
// A template kernel under the name that the launch plan asks for.
#define ATTNSPAN_INSTANTIATE(NAME, ...) template [[host_name(NAME)]] [[kernel]] decltype(__VA_ARGS__) __VA_ARGS__;
// A plain kernel: its name is known already.
#define ATTNSPAN_KERNEL(NAME)
// Loops over register arrays: an index that is not a constant would move the array to memory.
#define ATTNSPAN_UNROLL _Pragma("clang loop unroll(full)")
#endif
