// Which elements of an 8 x 8 matrix a lane holds: element (r, c) of the matrix is 8 r + c. The host compares the rows
// with matrix_row before the first use of a device.

#include <metal_simdgroup_matrix>

#include "constants.h"

kernel void matrix_layout_probe(constant ProbeTensors& t [[buffer(0)]],
                                threadgroup float* shared [[threadgroup(0)]],
                                uint lane [[thread_index_in_simdgroup]]) {
  shared[lane] = float(lane);
  shared[lane + 32] = float(lane + 32);
  simdgroup_barrier(mem_flags::mem_threadgroup);
  simdgroup_float8x8 matrix;
  simdgroup_load(matrix, shared, 8);
  t.elements[2 * lane] = matrix.thread_elements()[0];
  t.elements[2 * lane + 1] = matrix.thread_elements()[1];
}
ATTNSPAN_KERNEL(matrix_layout_probe)
