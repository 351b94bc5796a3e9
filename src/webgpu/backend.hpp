#pragma once
// The phases of the WebGPU backend. Each records its dispatches; the caller submits.

#include <functional>

#include "webgpu/bind.hpp"
#include "webgpu/tiles.hpp"

namespace attnspan::webgpu {

struct Context;

class WebgpuBackend final : public Backend {
 public:
  explicit WebgpuBackend(std::unique_ptr<GpuDevice> device)
      : device_(std::move(device)), pipelines_(*device_) {}

  std::string name() const override { return "webgpu"; }
  std::string description() const override;
  Device device() const override { return Device::webgpu; }
  DeviceMemory* memory() override { return device_.get(); }

  Support supports(const Problem& problem) const override;
  int64_t forward(const Problem& problem, const Execution& execution) override;
  int64_t backward(const Problem& problem, const Execution& execution) override;
  void merge(const MergeProblem& problem, const Execution& execution) override;
  void append(const DeviceAppendArgs& args, const Execution& execution) override;

  GpuDevice& gpu() { return *device_; }
  // Records, submits, and reads the counter that `record` returns (null: 0).
  int64_t run(const std::function<WGPUBuffer(Context&, Commands&)>& record);

 private:
  std::mutex mutex_;
  std::unique_ptr<GpuDevice> device_;
  Pipelines pipelines_;
};

// Where one workgroup serves one row: rows beyond this many go to the grid's second dimension.
inline constexpr uint32_t kGridWidth = 32768;

// Tiles that a benchmark tries instead of the table's choice.
struct ForcedTiles {
  const ForwardTile* forward = nullptr;
  const MatrixTile* matrix = nullptr;
  const DecodeTile* decode = nullptr;
  bool no_matrix = false;
  uint32_t busy_workgroups = 0;
};

struct Context {
  GpuDevice& device;
  Pipelines& pipelines;
  ForcedTiles forced = {};
};

// No with the reason where the problem is larger than what the adapter binds or dispatches at once.
Support within_limits(const Capabilities& capabilities, const Problem& problem);
// How many parts the keys of a cache are cut into at most.
int64_t most_splits(const Problem& problem);

void record_forward(Context& context, Commands& commands, const Problem& problem);
void record_backward(Context& context, Commands& commands, const Problem& problem);
// nan_guard over everything that the problem wrote; the count lies in the returned buffer.
WGPUBuffer record_nan_guard(Context& context, Commands& commands, const Problem& problem);
void record_merge(Context& context, Commands& commands, const MergeProblem& problem);

// The first tile of the table that serves rows of `width` values within the adapter's limits, else the
// widest: wider rows are cut into blocks.
const ForwardTile& forward_tile(const Capabilities& capabilities, int64_t width);

// What attention_forward_matrix.wgsl needs before its first line; the part that every use of matrices needs.
std::string matrix_extensions();
std::string matrix_prelude(const Capabilities& capabilities, const MatrixTile& tile, int64_t head_dim,
                           int64_t head_dim_v);

// ---- steps that several phases use (merge.cpp)

// f32 states over parts of the keys, each laid out [batch, rows, heads, width], one after the other.
struct SplitStates {
  BoundRows out, lse;
  uint32_t splits = 1;
  uint32_t out_split = 0, lse_split = 0;  // bytes from one state to the next
  int64_t width = 0;
};
SplitStates make_split_states(GpuDevice& device, Commands& commands, const Problem& problem, uint32_t splits,
                              int64_t width);
// Joins them into out and lse; `block` != 0: rotates out back. `sinks` as a word offset into `side`.
void merge_splits(Context& context, Commands& commands, const Problem& problem, const SplitStates& states,
                  uint32_t block, const Binding& side, uint32_t sinks, const BoundRows& out,
                  const BoundRows& lse);
// The query in the domain of tbq4 keys: f32, `width` values a row.
BoundRows rotate_query(Context& context, Commands& commands, const Problem& problem, const BoundRows& query,
                       int64_t width, int64_t block);

}  // namespace attnspan::webgpu
