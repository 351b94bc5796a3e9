// Kernels with one fault each: emulator_test.cpp expects a report of the kind and of the line.

#include "constants.h"

struct FaultTensors {
  device int* numbers;
};
struct FaultParams {
  int count;
};

kernel void reads_before_writing(constant FaultParams& p [[buffer(1)]],
                                 threadgroup int* shared [[threadgroup(0)]],
                                 uint thread_index [[thread_index_in_threadgroup]]) {
  if (shared[thread_index] == p.count) shared[0] = 1;  // line 15
}
ATTNSPAN_KERNEL(reads_before_writing)

kernel void lacks_a_threadgroup_barrier(constant FaultParams& p [[buffer(1)]],
                                        threadgroup int* shared [[threadgroup(0)]],
                                        uint thread_index [[thread_index_in_threadgroup]]) {
  shared[thread_index] = p.count;
  const int neighbour = shared[(thread_index + 32) % 64];  // line 23
  threadgroup_barrier(mem_flags::mem_threadgroup);
  shared[thread_index] = neighbour;
}
ATTNSPAN_KERNEL(lacks_a_threadgroup_barrier)

kernel void lacks_a_simdgroup_barrier(constant FaultParams& p [[buffer(1)]],
                                      threadgroup int* shared [[threadgroup(0)]],
                                      uint thread_index [[thread_index_in_threadgroup]]) {
  shared[thread_index] = p.count;
  simdgroup_barrier(mem_flags::mem_threadgroup);
  const int neighbour = shared[thread_index ^ 1];  // line 34: against the write of line 35 by a lane that did not wait
  shared[thread_index] = neighbour;
}
ATTNSPAN_KERNEL(lacks_a_simdgroup_barrier)

kernel void waits_in_a_branch(constant FaultParams& p [[buffer(1)]],
                              uint thread_index [[thread_index_in_threadgroup]]) {
  if (int(thread_index) < p.count) threadgroup_barrier(mem_flags::mem_threadgroup);  // line 41
}
ATTNSPAN_KERNEL(waits_in_a_branch)

kernel void waits_at_two_places(constant FaultParams& p [[buffer(1)]],
                                uint thread_index [[thread_index_in_threadgroup]]) {
  if (int(thread_index) < p.count) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
  } else {
    threadgroup_barrier(mem_flags::mem_threadgroup);  // line 50
  }
}
ATTNSPAN_KERNEL(waits_at_two_places)

kernel void sums_in_a_branch(constant FaultTensors& t [[buffer(0)]],
                             constant FaultParams& p [[buffer(1)]],
                             uint thread_index [[thread_index_in_threadgroup]]) {
  if (int(thread_index) < p.count) t.numbers[thread_index] = simd_sum(1);  // line 58
}
ATTNSPAN_KERNEL(sums_in_a_branch)

kernel void writes_past_the_end(constant FaultTensors& t [[buffer(0)]],
                                constant FaultParams& p [[buffer(1)]],
                                uint thread_index [[thread_index_in_threadgroup]]) {
  t.numbers[thread_index + p.count] = 1;  // line 65
}
ATTNSPAN_KERNEL(writes_past_the_end)

kernel void reads_before_the_start(constant FaultTensors& t [[buffer(0)]],
                                   constant FaultParams& p [[buffer(1)]],
                                   uint thread_index [[thread_index_in_threadgroup]]) {
  t.numbers[thread_index] = t.numbers[int(thread_index) - p.count];  // line 72
}
ATTNSPAN_KERNEL(reads_before_the_start)

kernel void leaves_threadgroup_memory(constant FaultParams& p [[buffer(1)]],
                                      threadgroup int* shared [[threadgroup(0)]],
                                      uint thread_index [[thread_index_in_threadgroup]]) {
  shared[thread_index + p.count] = 1;  // line 79
}
ATTNSPAN_KERNEL(leaves_threadgroup_memory)

// No fault: what the operations compute.
kernel void uses_everything(constant FaultTensors& t [[buffer(0)]],
                            constant FaultParams& p [[buffer(1)]],
                            threadgroup int* shared [[threadgroup(0)]],
                            uint3 group [[threadgroup_position_in_grid]],
                            uint thread_index [[thread_index_in_threadgroup]],
                            uint lane [[thread_index_in_simdgroup]],
                            uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  shared[thread_index] = int(lane) * p.count;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  int value = shared[(thread_index + 32) % 64];                     // the same lane of the other simdgroup
  value += simd_shuffle_xor(int(lane), ushort(1));                   // lane ^ 1
  value += simd_broadcast(int(simdgroup), ushort(3));                // simdgroup
  value += simd_sum(1) + simd_max(int(lane));                        // 32 + 31
  t.numbers[group.x * 64 + thread_index] = value;
}
ATTNSPAN_KERNEL(uses_everything)
