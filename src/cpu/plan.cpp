#include "cpu/plan.hpp"

#include <algorithm>

#include "cpu/decode.hpp"

namespace attnspan::cpu {
namespace {

// Rows of a block. Every block loads each of its keys and values once, at about 1 cycle per 16 floats against
// rows / 32 cycles of FMAs per float: 256 rows hide it (1%).
constexpr int64_t kMaxBlockRows = 256;
// Query and out of a block, f32: half of a 1 MiB second cache, next to the tile of keys and values.
constexpr int64_t kBlockFloats = 128 * 1024;
// Blocks wanted per sequence, so that one long sequence alone occupies a large machine.
constexpr int64_t kBlocksPerSequence = 64;

int64_t round_up(int64_t value, int64_t grain) { return (value + grain - 1) / grain * grain; }

int64_t block_rows(const Problem& problem, const Sequence& sequence, int64_t panel_rows) {
  const int64_t by_cache = kBlockFloats / (problem.head_dim + problem.head_dim_v);
  const int64_t by_count = sequence.seqlen_q * problem.heads / kBlocksPerSequence;
  return round_up(std::clamp<int64_t>(std::min(by_cache, by_count), 1, kMaxBlockRows), panel_rows);
}

int64_t cost(const RowBlock& block) {
  return (block.end - block.begin) * (1 + block.hull(block.begin, block.end).size());
}

// Chunks of a sequence in backward. Chunks of one KV head each gather dk and dv of their own, so they are cut
// no finer than it takes to give a sequence 32 of them in all, and hold at least 1024 rows: summing a chunk
// costs 1 addition per 5 * 1024 FMAs.
constexpr int64_t kChunksPerSequence = 32, kMinChunkRows = 1024;

int64_t chunk_rows(const Problem& problem, int64_t rows) {
  const int64_t chunks = std::clamp<int64_t>(kChunksPerSequence / problem.kv_heads, 1,
                                             std::max<int64_t>(rows / kMinChunkRows, 1));
  return std::max<int64_t>((rows + chunks - 1) / chunks, 1);
}

}  // namespace

std::vector<RowBlock> plan_row_blocks(const Problem& problem, int64_t panel_rows) {
  std::vector<RowBlock> blocks;
  for (int64_t batch = 0; batch < problem.batch; ++batch) {
    const Sequence seq = sequence(problem, batch);
    if (takes_decode(problem, seq)) continue;
    const int64_t rows = seq.seqlen_q * problem.group();
    const int64_t step = block_rows(problem, seq, panel_rows);
    for (int64_t kv_head = 0; kv_head < problem.kv_heads; ++kv_head) {
      for (int64_t begin = 0; begin < rows; begin += step) {
        blocks.push_back({&problem, seq, kv_head, begin, std::min(begin + step, rows)});
      }
    }
  }
  std::stable_sort(blocks.begin(), blocks.end(),
                   [](const RowBlock& a, const RowBlock& b) { return cost(a) > cost(b); });
  return blocks;
}

std::vector<KeyGradientSum> plan_key_gradients(const Problem& problem) {
  std::vector<KeyGradientSum> sums(static_cast<size_t>(problem.batch * problem.kv_heads));
  for (size_t i = 0; i < sums.size(); ++i) {
    KeyGradientSum& sum = sums[i];
    sum.problem = &problem;
    sum.sequence = sequence(problem, static_cast<int64_t>(i) / problem.kv_heads);
    sum.kv_head = static_cast<int64_t>(i) % problem.kv_heads;
    const int64_t rows = sum.sequence.seqlen_q * problem.group();
    const int64_t step = chunk_rows(problem, rows);
    for (int64_t begin = 0; begin == 0 || begin < rows; begin += step) {
      sum.chunks.push_back({&problem, sum.sequence, sum.kv_head, begin, std::min(begin + step, rows)});
    }
    sum.parts.resize(sum.chunks.size());
    sum.unfinished = static_cast<int64_t>(sum.chunks.size());
  }
  return sums;
}

}  // namespace attnspan::cpu
