// Forward: the kernels of every instruction set, and the driver that runs blocks of query rows over threads.

#include "core/simd_targets.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/forward.cpp"
#include <hwy/foreach_target.h>
// After foreach_target.h:
#include "cpu/forward-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace attnspan::cpu {
namespace HWY_NAMESPACE {

int64_t panel_rows() { return kPanelRows; }
const char* target_name() { return hwy::TargetName(HWY_TARGET); }
int64_t forward_block(const RowBlock& block) { return ForwardBlock(block).run(); }

}  // namespace HWY_NAMESPACE
}  // namespace attnspan::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

#include <atomic>

#include "core/parallel.hpp"
#include "cpu/forward.hpp"
#include "cpu/plan.hpp"

namespace attnspan::cpu {

HWY_EXPORT(panel_rows);
HWY_EXPORT(target_name);
HWY_EXPORT(forward_block);

const char* instruction_set() { return HWY_DYNAMIC_DISPATCH(target_name)(); }

int64_t forward(const Problem& problem, const Execution& execution) {
  const std::vector<RowBlock> blocks = plan_row_blocks(problem, HWY_DYNAMIC_DISPATCH(panel_rows)());
  std::atomic<int64_t> replaced{0};
  parallel_for_each(execution.threads, static_cast<int64_t>(blocks.size()), [&](int64_t item) {
    replaced += HWY_DYNAMIC_DISPATCH(forward_block)(blocks[static_cast<size_t>(item)]);
  });
  return replaced;
}

}  // namespace attnspan::cpu

#endif  // HWY_ONCE
