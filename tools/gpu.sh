#!/bin/bash
# Everything that needs an NVIDIA GPU: the grid, the device tests, compute-sanitizer on a small grid, benchmarks.
# usage: tools/gpu.sh FOLDER [BUILD]      results go to FOLDER; BUILD defaults to build/release and is built if needed
set -u
if [ $# -lt 1 ]; then
  echo "usage: tools/gpu.sh FOLDER [BUILD]" >&2
  exit 2
fi
root=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$1" || exit 1
results=$(cd "$1" && pwd)
build=${2:-$root/build/release}
failed=0

step() {  # step NAME COMMAND...: runs, keeps the output, notes a failure
  local name=$1
  shift
  echo "== $name"
  if ! "$@" >"$results/$name.log" 2>&1; then
    failed=1
    echo "   failed, see $results/$name.log"
    tail -n 15 "$results/$name.log"
  fi
}

if [ ! -x "$build/tests/grid_test" ]; then
  step configure cmake -S "$root" -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DATTNSPAN_CUDA=ON -DBUILD_SHARED_LIBS=ON
  step build cmake --build "$build"
fi

nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | tee "$results/card.txt"

# The grid in one process per core: the double reference on the host takes most of its time.
shards=$(nproc)
pids=()
for shard in $(seq 0 $((shards - 1))); do
  GTEST_TOTAL_SHARDS=$shards GTEST_SHARD_INDEX=$shard "$build/tests/grid_test" --gtest_filter='*_cuda_*' \
    --gtest_brief=1 >"$results/grid.$shard.log" 2>&1 &
  pids+=($!)
done
for pid in "${pids[@]}"; do wait "$pid" || failed=1; done
cat "$results"/grid.*.log >"$results/grid.log"
rm -f "$results"/grid.[0-9]*.log
echo "== grid: $(grep -h PASSED "$results/grid.log" | awk '{n += $4} END {print n + 0}') passed," \
  "$(grep -c 'FAILED  ] Grid' "$results/grid.log") failed"

step device_tests "$build/tests/cuda_device_test"
small='*forward_cuda_length_65x6*:*forward_cuda_packed_*:*forward_cuda_head_dim_*16:*backward_cuda_gqa_*:*backward_cuda_packed_*f16*:*decode_cuda_decode_5x255*:*cache_cuda_cache_*_rows_5'
for tool in memcheck racecheck; do
  step "sanitizer_$tool" compute-sanitizer --tool "$tool" --error-exitcode 1 "$build/tests/grid_test" \
    --gtest_filter="$small" --gtest_brief=1
done

library=$(ls "$build"/libattnspan.so "$build"/lib/libattnspan.so 2>/dev/null | head -n 1)
if [ -n "$library" ] && python3 -c 'import torch' 2>/dev/null; then
  step bench env PYTHONPATH="$root/bench/cuda" python3 "$root/bench/cuda/bench.py" "$library" "$results/bench.json"
  cat "$results/bench.log"
else
  echo "== bench: left out (it needs PyTorch, and a library built with -DBUILD_SHARED_LIBS=ON)"
fi
exit $failed
