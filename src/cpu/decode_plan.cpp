#include "cpu/decode_plan.hpp"

#include <algorithm>

#include "kv/tbq4_constants.hpp"

namespace attnspan::cpu {
namespace {

constexpr int64_t kMaxQueryRows = 16;
// Stacked rows beyond which a panel of queries (forward) makes more of the multipliers than rows of keys do.
constexpr int64_t kMaxStackedRows = 32;
// A split costs its partial state and a place in the queue, about a microsecond: as much as 20 keys of 128.
constexpr int64_t kMinSplitKeys = 512;
// Splits of a sequence over all KV heads, so that one sequence alone fills a large machine.
constexpr int64_t kSplitsPerSequence = 128;

constexpr int64_t round_up(int64_t value, int64_t grain) { return (value + grain - 1) / grain * grain; }
constexpr size_t round_up(size_t value, size_t grain) { return (value + grain - 1) / grain * grain; }

size_t words_of(const KvSource& source) { return source.stored_dim() / 8; }

DecodeLayout layout_of(const KvSource& keys, const KvSource& values, int64_t rows, size_t lanes) {
  DecodeLayout layout;
  layout.rows = rows;
  if (keys.format() == KvFormat::tbq4) {  // pairs: four int32 a word of eight codes; units: one a block
    layout.query_stride = words_of(keys) * 4 + words_of(keys) / 8;
  } else {
    layout.query_stride = round_up(keys.dim(), lanes);
  }
  if (values.format() == KvFormat::tbq4) {  // whole vectors of words
    layout.out_stride = round_up(words_of(values), lanes) * 8;
  } else {
    layout.out_stride = round_up(values.dim(), lanes);
  }
  constexpr size_t kLine = 16;
  layout.query_stride = round_up(layout.query_stride, kLine);
  layout.out_stride = round_up(layout.out_stride, kLine);
  const size_t states = round_up(static_cast<size_t>(2 * rows), kLine);
  layout.partial_stride = states + static_cast<size_t>(rows) * layout.out_stride;
  return layout;
}

}  // namespace

bool is_decode(const Problem& problem, const Sequence& sequence) {
  return problem.phase == Phase::forward && sequence.seqlen_q <= kMaxQueryRows &&
         sequence.seqlen_q * problem.group() <= kMaxStackedRows;
}

std::vector<DecodeGroup> plan_decode(const Problem& problem, size_t lanes) {
  std::vector<DecodeGroup> groups;
  for (int64_t batch = 0; batch < problem.batch; ++batch) {
    const Sequence seq = sequence(problem, batch);
    const int64_t rows = seq.seqlen_q * problem.group();
    if (rows == 0 || !is_decode(problem, seq)) continue;
    for (int64_t kv_head = 0; kv_head < problem.kv_heads; ++kv_head) {
      DecodeGroup group;
      group.block = {&problem, seq, kv_head, 0, rows};
      group.layout = layout_of(KvSource::keys(problem, seq, kv_head), KvSource::values(problem, seq, kv_head),
                               rows, lanes);
      const KeySpan hull = group.block.hull(0, rows);
      if (!hull.empty()) {
        constexpr int64_t kTile = kTileKeys;
        group.key_begin = hull.begin / kTile * kTile;
        group.key_end = hull.end;
        const int64_t keys = group.key_end - group.key_begin;
        const int64_t wanted = std::max<int64_t>(1, kSplitsPerSequence / problem.kv_heads);
        group.split_keys = round_up(std::max(kMinSplitKeys, (keys + wanted - 1) / wanted), kTile);
        group.splits = (keys + group.split_keys - 1) / group.split_keys;
      }
      groups.push_back(group);
    }
  }
  return groups;
}

std::vector<DecodeItem> decode_items(std::vector<DecodeGroup>& groups) {
  std::vector<DecodeItem> items;
  for (DecodeGroup& group : groups) {
    for (int64_t split = 0; split < std::max<int64_t>(1, group.splits); ++split)
      items.push_back({&group, split});
  }
  // The longest first; the last split of a group may be short.
  std::stable_sort(items.begin(), items.end(), [](const DecodeItem& a, const DecodeItem& b) {
    const auto keys = [](const DecodeItem& item) {
      const DecodeGroup& g = *item.group;
      return std::min(g.split_keys, g.key_end - g.key_begin - item.split * g.split_keys);
    };
    return keys(a) > keys(b);
  });
  return items;
}

}  // namespace attnspan::cpu
