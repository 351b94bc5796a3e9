// Decode: the kernels of every instruction set, and the driver that runs splits of keys over threads.

#include "core/simd_targets.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/decode.cpp"
#include <hwy/foreach_target.h>
// After foreach_target.h:
#include "cpu/decode_finish-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace attnspan::cpu {
namespace HWY_NAMESPACE {

#if HWY_TARGET == HWY_SCALAR
// One lane: forward does the same work in the same time.
size_t decode_lanes() { return 0; }
void decode_queries(const DecodeGroup&) {}
void decode_split(const DecodeGroup&, int64_t) {}
int64_t decode_finish(const DecodeGroup&) { return 0; }
#else
size_t decode_lanes() { return kLanes; }
void decode_queries(const DecodeGroup& group) { prepare_queries(group); }
void decode_split(const DecodeGroup& group, int64_t split) {
#if HWY_TARGET == HWY_AVX3
  // Highway's next target (Ice Lake, Zen 4 and later) is the one that has VNNI.
  static const bool vnni = (hwy::SupportedTargets() & HWY_AVX3_DL) != 0;
  if (vnni) return DecodeSplit<true>(group, split).run();
#endif
  DecodeSplit<false>(group, split).run();
}
int64_t decode_finish(const DecodeGroup& group) { return finish_group(group); }
#endif

}  // namespace HWY_NAMESPACE
}  // namespace attnspan::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

#include <atomic>

#include "core/parallel.hpp"
#include "cpu/decode.hpp"

namespace attnspan::cpu {

HWY_EXPORT(decode_lanes);
HWY_EXPORT(decode_queries);
HWY_EXPORT(decode_split);
HWY_EXPORT(decode_finish);

namespace {

// Memory of a call: prepared queries and partial states. Kept by the calling thread for the next call.
void allocate(std::vector<DecodeGroup>& groups) {
  thread_local Scratch scratch;
  size_t floats = 0;
  const auto queries = [](const DecodeGroup& g) {
    return static_cast<size_t>(g.layout.rows) * g.layout.query_stride;
  };
  const auto partials = [](const DecodeGroup& g) {
    return static_cast<size_t>(g.splits) * g.layout.partial_stride;
  };
  for (const DecodeGroup& g : groups) floats += Scratch::padded(queries(g)) + Scratch::padded(partials(g));
  scratch.begin(floats);
  for (DecodeGroup& g : groups) {
    g.queries = scratch.take(queries(g));
    g.partials = scratch.take(partials(g));
  }
}

}  // namespace

bool takes_decode(const Problem& problem, const Sequence& sequence) {
  return HWY_DYNAMIC_DISPATCH(decode_lanes)() > 1 && is_decode(problem, sequence);
}

int64_t decode(const Problem& problem, const Execution& execution) {
  const size_t lanes = HWY_DYNAMIC_DISPATCH(decode_lanes)();
  if (lanes <= 1) return 0;
  std::vector<DecodeGroup> groups = plan_decode(problem, lanes);
  if (groups.empty()) return 0;
  allocate(groups);
  const std::vector<DecodeItem> items = decode_items(groups);
  std::atomic<int64_t> replaced{0};
  const auto each = [&](size_t count, const auto& run) {
    parallel_for_each(execution.threads, static_cast<int64_t>(count),
                      [&](int64_t i) { run(static_cast<size_t>(i)); });
  };
  const auto queries = [&](size_t i) { HWY_DYNAMIC_DISPATCH(decode_queries)(groups[i]); };
  const auto finish = [&](size_t i) { replaced += HWY_DYNAMIC_DISPATCH(decode_finish)(groups[i]); };
  // Groups of one split do all three steps in one item.
  const auto alone = [](const DecodeGroup& group) { return group.splits <= 1; };
  const bool all_alone = items.size() == groups.size();
  if (!all_alone) each(groups.size(), [&](size_t i) { alone(groups[i]) ? void() : queries(i); });
  each(items.size(), [&](size_t i) {
    const DecodeGroup& group = *items[i].group;
    const size_t index = static_cast<size_t>(&group - groups.data());
    if (alone(group) && group.splits == 1) queries(index);
    if (group.splits > 0) HWY_DYNAMIC_DISPATCH(decode_split)(group, items[i].split);
    if (alone(group)) finish(index);
  });
  if (!all_alone) each(groups.size(), [&](size_t i) { alone(groups[i]) ? void() : finish(i); });
  return replaced;
}

}  // namespace attnspan::cpu

#endif  // HWY_ONCE
