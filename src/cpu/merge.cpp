#include "cpu/merge.hpp"

#include <algorithm>

#include "core/merge_problem.hpp"
#include "core/parallel.hpp"

namespace attnspan::cpu {
namespace {

// Rows of one head that one work item joins: at 3 x 128 values a row some 100 microseconds of work, a hundred
// times what handing out an item costs.
constexpr int64_t kRows = 256;

Rows part_of(Rows rows, int64_t element_bytes, int64_t batch, int64_t head, int64_t row) {
  rows.data = static_cast<char*>(rows.data) + rows.index(batch, head, row) * element_bytes;
  return rows;
}

// Rows [row, row + kRows) of one head, as a problem of its own.
MergeProblem part_of(const MergeProblem& problem, int64_t batch, int64_t head, int64_t row) {
  MergeProblem part = problem;
  part.batch = part.heads = 1;
  part.rows = std::min(kRows, problem.rows - row);
  for (Rows* rows : {&part.out_a, &part.out_b, &part.out}) {
    *rows = part_of(*rows, size_of(problem.dtype), batch, head, row);
  }
  for (Rows* rows : {&part.lse_a, &part.lse_b, &part.lse}) {
    *rows = part_of(*rows, size_of(DType::f32), batch, head, row);
  }
  return part;
}

}  // namespace

void merge(const MergeProblem& problem, const Execution& execution) {
  const int64_t parts = (problem.rows + kRows - 1) / kRows;
  parallel_for_each(execution.threads, problem.batch * problem.heads * parts, [&](int64_t item) {
    const int64_t head = item / parts % problem.heads, batch = item / parts / problem.heads;
    merge_on_host(part_of(problem, batch, head, item % parts * kRows));
  });
}

}  // namespace attnspan::cpu
