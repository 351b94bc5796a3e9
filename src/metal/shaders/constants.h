#pragma once
// Function constants and the argument buffer, declared from the lists of params.h.

#include <metal_stdlib>

#include "instantiate.h"
#include "params.h"

using namespace metal;
using namespace attnspan_metal;

#define ATTNSPAN_INDEX(TYPE, NAME) NAME##_INDEX,
enum FunctionConstantIndex { ATTNSPAN_FUNCTION_CONSTANTS(ATTNSPAN_INDEX) };
#undef ATTNSPAN_INDEX

constant int HEAD_DIM [[function_constant(HEAD_DIM_INDEX)]];
constant int HEAD_DIM_V [[function_constant(HEAD_DIM_V_INDEX)]];
constant int KEY_WIDTH [[function_constant(KEY_WIDTH_INDEX)]];
constant int VALUE_WIDTH [[function_constant(VALUE_WIDTH_INDEX)]];
constant int GROUP [[function_constant(GROUP_INDEX)]];
constant int DTYPE [[function_constant(DTYPE_INDEX)]];
constant int KEY_FORMAT [[function_constant(KEY_FORMAT_INDEX)]];
constant int VALUE_FORMAT [[function_constant(VALUE_FORMAT_INDEX)]];
constant int KEY_BLOCK [[function_constant(KEY_BLOCK_INDEX)]];
constant int VALUE_BLOCK [[function_constant(VALUE_BLOCK_INDEX)]];
constant bool PACKED [[function_constant(PACKED_INDEX)]];
constant bool HAS_LENGTHS [[function_constant(HAS_LENGTHS_INDEX)]];
constant bool HAS_FIRST_POSITION [[function_constant(HAS_FIRST_POSITION_INDEX)]];
constant bool HAS_BLOCK_TABLE [[function_constant(HAS_BLOCK_TABLE_INDEX)]];
constant bool HAS_KEY_START [[function_constant(HAS_KEY_START_INDEX)]];
constant bool HAS_KEY_END [[function_constant(HAS_KEY_END_INDEX)]];
constant bool HAS_SOFTCAP [[function_constant(HAS_SOFTCAP_INDEX)]];
constant bool HAS_BIAS [[function_constant(HAS_BIAS_INDEX)]];
constant bool HAS_ALIBI [[function_constant(HAS_ALIBI_INDEX)]];
constant bool HAS_SINKS [[function_constant(HAS_SINKS_INDEX)]];
constant bool HAS_LSE [[function_constant(HAS_LSE_INDEX)]];
constant bool HAS_DLSE [[function_constant(HAS_DLSE_INDEX)]];
constant bool NAN_GUARD [[function_constant(NAN_GUARD_INDEX)]];
constant bool SPLIT [[function_constant(SPLIT_INDEX)]];
constant bool WRITE_OUT [[function_constant(WRITE_OUT_INDEX)]];
constant bool ENCODE_FAST [[function_constant(ENCODE_FAST_INDEX)]];

#define ATTNSPAN_TENSOR(TYPE, NAME) DevicePointerTo<TYPE>::type NAME;

// `device TYPE*` for the lists of tensors, whose types may be const.
template <typename T>
struct DevicePointerTo {
  typedef device T* type;
};

struct AttentionTensors {
  ATTNSPAN_ATTENTION_TENSORS(ATTNSPAN_TENSOR)
};
struct MergeTensors {
  ATTNSPAN_MERGE_TENSORS(ATTNSPAN_TENSOR)
};
struct AppendTensors {
  ATTNSPAN_APPEND_TENSORS(ATTNSPAN_TENSOR)
};
struct ProbeTensors {
  ATTNSPAN_PROBE_TENSORS(ATTNSPAN_TENSOR)
};
