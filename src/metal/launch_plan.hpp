#pragma once
// What is run for a problem: kernels with their function constants, parameters, tensors and grids, as plain
// data. The Metal host and the emulator of the tests carry out the same plan; neither decides anything.

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "core/problem.hpp"
#include "kv/format.hpp"
#include "metal/shaders/params.h"
#include "registry/backend.hpp"

namespace attnspan::metal {

// A place in a buffer: of the caller, or of this call's scratch.
struct TensorSlot {
  void* buffer = nullptr;  // MTLBuffer; null and not scratch: not bound
  int64_t byte_offset = 0;
  bool scratch = false;
};

enum AttentionTensor {
#define ATTNSPAN_SLOT(TYPE, NAME) k_##NAME,
  ATTNSPAN_ATTENTION_TENSORS(ATTNSPAN_SLOT) kAttentionTensors
};
enum MergeTensor { ATTNSPAN_MERGE_TENSORS(ATTNSPAN_SLOT) kMergeTensors };
enum AppendTensor { ATTNSPAN_APPEND_TENSORS(ATTNSPAN_SLOT) kAppendTensors };
#undef ATTNSPAN_SLOT

enum FunctionConstant {
#define ATTNSPAN_CONSTANT(TYPE, NAME) NAME,
  ATTNSPAN_FUNCTION_CONSTANTS(ATTNSPAN_CONSTANT) kFunctionConstants
#undef ATTNSPAN_CONSTANT
};
using FunctionConstants = std::array<int32_t, kFunctionConstants>;
// Whether the constant of this index is a bool in the shader.
bool is_bool(int function_constant);

// One dispatch. Buffer 0 is the argument buffer of `tensors`, buffer 1 the parameters.
struct Launch {
  std::string kernel;
  FunctionConstants constants{};
  std::vector<TensorSlot> tensors;
  std::vector<std::byte> params;
  std::array<uint32_t, 3> groups{};
  uint32_t threads = 0;
  uint32_t threadgroup_bytes = 0;
};

// Launches in order: each sees what the ones before it wrote.
struct Plan {
  std::vector<Launch> launches;
  size_t scratch_bytes = 0;
  int64_t nonfinite_offset = -1;  // of a uint32 in the scratch that counts and starts at 0; -1: none
};

Support supports(const Problem& problem);
Plan plan_forward(const Problem& problem);
Plan plan_backward(const Problem& problem);
Plan plan_merge(const MergeProblem& problem);

// New rows `[batch, seqlen_new, kv_heads, dim]` go to the positions positions[b], positions[b] + 1, ... of
// one side of a cache.
struct AppendProblem {
  Rows rows;
  DType dtype = DType::f32;
  int64_t batch = 0, seqlen_new = 0;
  const KvView* view = nullptr;
  KvSide side = KvSide::key;
  Tensor positions;  // int32 `[batch]`
  EncodeMode mode = EncodeMode::quality;
  Tensor saturated;  // int32 `[1]`: scales beyond f16 are added to it; may be absent
};
Plan plan_append(const AppendProblem& problem);

// Writes the 64 elements that the lanes of a simdgroup hold of a matrix, two per lane, to `elements`.
Plan plan_layout_probe(void* elements);

}  // namespace attnspan::metal
