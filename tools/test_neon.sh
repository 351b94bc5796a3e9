#!/bin/bash
# Cross-compiles the library and the CPU backend's tests for 64-bit Arm and runs them under qemu: the NEON kernels
# against the reference, exp and tanh, threads, decode, the bytes of the tbq4 encoder. Minutes, so run it by hand after
# a change of the kernels.
#   apt-get install g++-aarch64-linux-gnu qemu-user libgtest-dev libxxhash-dev libhwy-dev libtbb-dev
# Highway's and oneTBB's arm64 packages are unpacked under build/neon; nothing is installed.
set -euo pipefail
cd "$(dirname "$0")/.."
build=$PWD/build/neon
root=$build/root
mkdir -p "$build/apt/lists/partial" "$build/apt/cache/archives/partial" "$build/debs" "$build/include" "$build/obj"

if [ ! -d "$root" ]; then
  : > "$build/apt/status"
  arm64=(-o APT::Architecture=arm64 -o APT::Architectures=arm64 -o "Dir::State::lists=$build/apt/lists"
         -o "Dir::State::status=$build/apt/status" -o "Dir::Cache=$build/apt/cache" -o APT::Sandbox::User=root)
  apt-get "${arm64[@]}" -qq update
  (cd "$build/debs" && apt-get "${arm64[@]}" -qq download libhwy1 libhwy-dev libtbb12 libtbb-dev)
  for deb in "$build"/debs/*.deb; do dpkg -x "$deb" "$root"; done
  cp -r "$root/usr/include/." "$build/include/"
  cp /usr/include/xxhash.h "$build/include/"
  cp -r /usr/include/gtest "$build/include/"
fi

flags=(-std=c++20 -O2 -w -DATTNSPAN_WITH_CPU -DHWY_SHARED_DEFINE -Iinclude -Isrc -Itests -isystem "$build/include"
       -I/usr/src/googletest/googletest)
sources=(src/core/*.cpp src/reference/*.cpp src/registry/*.cpp src/kv/*.cpp src/io/file.cpp src/io/mapped_file.cpp src/cpu/*.cpp src/check/*.cpp
         tests/cpu/targets_test.cpp tests/cpu/exp_test.cpp tests/cpu/threads_test.cpp tests/cpu/decode_test.cpp
         tests/kv/tbq4_simd_test.cpp
         /usr/src/googletest/googletest/src/gtest-all.cc /usr/src/googletest/googletest/src/gtest_main.cc)
compile() {
  local source=$1 object
  object=$build/obj/$(echo "${source#/}" | tr / _).o
  shift
  if [ "$object" -nt "$source" ] && [ "$object" -nt "$build/stamp" ]; then return; fi
  local extra=()
  case $source in src/kv/*tbq4*) extra=(-ffp-contract=off) ;; esac
  aarch64-linux-gnu-g++ "$@" "${extra[@]}" -c "$source" -o "$object"
}
export -f compile
export build
# A header changed: compile everything again.
newest=$(find src include tests/cpu -name '*.hpp' -newer "$build/stamp" 2>/dev/null | head -1 || true)
if [ -n "$newest" ] || [ ! -f "$build/stamp" ]; then touch "$build/stamp"; fi
printf '%s\n' "${sources[@]}" | xargs -P "$(nproc)" -I{} bash -c 'compile "$@"' _ {} "${flags[@]}"

lib=$root/usr/lib/aarch64-linux-gnu
aarch64-linux-gnu-g++ "$build"/obj/*.o -o "$build/cpu_tests" -L"$lib" -lhwy -ltbb -lpthread -Wl,--allow-shlib-undefined
LD_LIBRARY_PATH=$lib qemu-aarch64 -L /usr/aarch64-linux-gnu -E "LD_LIBRARY_PATH=$lib" "$build/cpu_tests" "$@"
