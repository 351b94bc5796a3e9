#pragma once
// What the plans of the phases share.

#include <cstring>

#include "metal/launch_plan.hpp"
#include "metal/tiles.hpp"

namespace attnspan::metal {

attnspan_metal::AttentionParams params_of(const Problem& problem);
FunctionConstants constants_of(const Problem& problem);
std::vector<TensorSlot> tensors_of(const Problem& problem);

// The element type in threadgroup memory: the dtype; f32 where a cache has another format, since its values
// may be wider than the dtype, and since tbq4 rotates the query in f32.
DType tile_type(const Problem& problem);
std::string kernel_name(const char* stem, const Tile& tile, DType type);
uint32_t tiles(int64_t rows, int64_t tile);

// Hands out the scratch of a plan. The first bytes are counters, zeroed before the first launch.
inline constexpr size_t kCounterBytes = 256;
class Scratch {
 public:
  explicit Scratch(Plan& plan);
  TensorSlot take(int64_t bytes);

 private:
  Plan& plan_;
};

template <typename Params>
std::vector<std::byte> bytes_of(const Params& params) {
  std::vector<std::byte> bytes(sizeof params);
  std::memcpy(bytes.data(), &params, sizeof params);
  return bytes;
}

Launch attention_launch(const FunctionConstants& constants, const attnspan_metal::AttentionParams& params,
                        const std::vector<TensorSlot>& tensors);

// The path that keeps its probabilities.
bool is_unfused(const Problem& problem);
Support supports_unfused(const Problem& problem);
Plan plan_unfused_forward(const Problem& problem);
std::vector<Launch> unfused_gradients(const Problem& problem, Launch common, Scratch& scratch);

}  // namespace attnspan::metal
