#pragma once
// Which work items a call is cut into. By the shape of each sequence alone, never by threads or batchmates.

#include <vector>

#include "cpu/key_gradients.hpp"
#include "cpu/row_block.hpp"

namespace attnspan::cpu {

// Query rows in blocks, most work first. `panel_rows` is the grain of the instruction set in use.
std::vector<RowBlock> plan_row_blocks(const Problem& problem, int64_t panel_rows);

// For backward: every (sequence, KV head) with its query rows in chunks of one work item each.
std::vector<KeyGradientSum> plan_key_gradients(const Problem& problem);

}  // namespace attnspan::cpu
