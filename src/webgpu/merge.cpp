// Host side of attention_merge.wgsl and rotate_query.wgsl.

#include <algorithm>

#include "webgpu/backend.hpp"

namespace attnspan::webgpu {
namespace {

// One workgroup a row.
template <typename P>
void dispatch_rows(Context& context, Commands& commands, const char* shader, const char* entry,
                   const std::string& layout, P& p, const std::vector<Binding>& bindings) {
  const int64_t rows = int64_t{p.rows} * p.heads * p.batch;
  p.grid_x = static_cast<uint32_t>(std::min<int64_t>(rows, kGridWidth));
  if (rows == 0) return;
  const auto grid_y = static_cast<uint32_t>((rows + p.grid_x - 1) / p.grid_x);
  commands.dispatch(context.pipelines.get({shader, entry, "", {}}, layout), &p, sizeof(p), bindings, p.grid_x,
                    grid_y, 1);
}

// out or lse of a merge may be one of its inputs. WebGPU forbids that in one dispatch: a copy takes the place
// of the written buffer, and is copied back.
struct Output {
  BoundRows bound;
  Binding target;  // where the copy goes back to, or nothing
};

Output detached(Commands& commands, const BoundRows& bound, std::initializer_list<BoundRows> inputs) {
  const bool shared = std::any_of(inputs.begin(), inputs.end(), [&](const BoundRows& input) {
    return bound.binding.buffer != nullptr && input.binding.buffer == bound.binding.buffer;
  });
  if (!shared) return {bound, {}};
  Output output{bound, bound.binding};
  output.bound.binding = {commands.scratch(bound.binding.size), 0, bound.binding.size};
  commands.copy(bound.binding.buffer, bound.binding.offset, output.bound.binding.buffer, 0,
                bound.binding.size);
  return output;
}

void attach(Commands& commands, const Output& output) {
  if (output.target.buffer == nullptr) return;
  commands.copy(output.bound.binding.buffer, 0, output.target.buffer, output.target.offset,
                output.target.size);
}

}  // namespace

void record_merge(Context& context, Commands& commands, const MergeProblem& problem) {
  GpuDevice& device = context.device;
  const Extent extent{problem.batch, problem.heads, problem.rows, problem.head_dim_v};
  const BoundRows a = bind_rows(device, problem.out_a, extent, problem.dtype, "out_a");
  const BoundRows b = bind_rows(device, problem.out_b, extent, problem.dtype, "out_b");
  const BoundRows lse_a = bind_lse(device, problem.lse_a, extent, "lse_a");
  const BoundRows lse_b = bind_lse(device, problem.lse_b, extent, "lse_b");
  const Output out =
      detached(commands, bind_rows(device, problem.out, extent, problem.dtype, "out"), {a, b, lse_a, lse_b});
  const Output lse = detached(commands, bind_lse(device, problem.lse, extent, "lse"), {a, b, lse_a, lse_b});
  MergeParams p;
  p.a = a.params, p.b = b.params, p.lse_a = lse_a.params, p.lse_b = lse_b.params;
  p.out = out.bound.params, p.lse = lse.bound.params;
  p.batch = static_cast<uint32_t>(problem.batch);
  p.heads = static_cast<uint32_t>(problem.heads);
  p.rows = static_cast<uint32_t>(problem.rows);
  p.states_b = 1;
  p.width = p.head_dim_v = static_cast<uint32_t>(problem.head_dim_v);
  p.in_format = p.out_format = plain_loader(problem.dtype);
  dispatch_rows(
      context, commands, "attention_merge", "merge", "urrrrrww", p,
      {a.binding, lse_a.binding, b.binding, lse_b.binding, {}, out.bound.binding, lse.bound.binding});
  attach(commands, out);
  attach(commands, lse);
}

SplitStates make_split_states(GpuDevice& device, Commands& commands, const Problem& problem, uint32_t splits,
                              int64_t width) {
  SplitStates states;
  states.splits = splits;
  states.width = width;
  const int64_t rows = problem.batch * problem.seqlen_q * problem.heads;
  const int64_t out_bytes = 4 * rows * width, lse_bytes = 4 * rows;
  const uint64_t limit = device.capabilities().binding_bytes;
  if (static_cast<uint64_t>(splits * out_bytes) > limit) {
    throw Error(ErrorCode::unsupported, "query",
                "found " + std::to_string(rows) + " rows, whose partial results take " +
                    std::to_string(splits * out_bytes) + " bytes, expected at most " + std::to_string(limit) +
                    ", what this adapter binds at once");
  }
  states.out.binding.buffer = commands.scratch(static_cast<uint64_t>(splits * out_bytes));
  states.lse.binding.buffer = commands.scratch(static_cast<uint64_t>(splits * lse_bytes));
  const auto u32 = [](int64_t value) { return static_cast<uint32_t>(value); };
  states.out.params = {0, u32(4 * problem.seqlen_q * problem.heads * width), u32(4 * width),
                       u32(4 * problem.heads * width)};
  states.lse.params = {0, u32(4 * problem.seqlen_q * problem.heads), u32(4 * problem.seqlen_q), 4};
  states.out_split = u32(out_bytes);
  states.lse_split = u32(lse_bytes);
  return states;
}

void merge_splits(Context& context, Commands& commands, const Problem& problem, const SplitStates& states,
                  uint32_t block, const Binding& side, uint32_t sinks, const BoundRows& out,
                  const BoundRows& lse) {
  MergeParams p;
  p.a = states.out.params, p.lse_a = states.lse.params;
  p.out = out.params, p.lse = lse.params;
  p.batch = static_cast<uint32_t>(problem.batch);
  p.heads = static_cast<uint32_t>(problem.heads);
  p.rows = static_cast<uint32_t>(problem.seqlen_q);
  p.states_a = states.splits;
  p.a_split = states.out_split, p.lse_split = states.lse_split;
  p.width = static_cast<uint32_t>(states.width);
  p.head_dim_v = static_cast<uint32_t>(problem.head_dim_v);
  p.in_format = Loader::f32_vec;
  p.out_format = plain_loader(problem.dtype);
  p.block = block;
  p.sinks = sinks;
  dispatch_rows(context, commands, "attention_merge", "merge", "urrrrrww", p,
                {states.out.binding, states.lse.binding, {}, {}, side, out.binding, lse.binding});
}

BoundRows rotate_query(Context& context, Commands& commands, const Problem& problem, const BoundRows& query,
                       int64_t width, int64_t block) {
  RotateParams p;
  p.query = query.params;
  p.batch = static_cast<uint32_t>(problem.batch);
  p.heads = static_cast<uint32_t>(problem.heads);
  p.rows = static_cast<uint32_t>(problem.seqlen_q);
  p.head_dim = static_cast<uint32_t>(problem.head_dim);
  p.width = static_cast<uint32_t>(width);
  p.block = static_cast<uint32_t>(block);
  p.in_format = plain_loader(problem.dtype);
  BoundRows rotated;
  rotated.binding.buffer =
      commands.scratch(static_cast<uint64_t>(4 * problem.batch * problem.seqlen_q * problem.heads * width));
  rotated.params.head = 4 * p.width;
  rotated.params.row = rotated.params.head * p.heads;
  rotated.params.batch = rotated.params.row * p.rows;
  p.rotated = rotated.params;
  rotated.loader = Loader::f32_vec;
  dispatch_rows(context, commands, "rotate_query", "rotate", "urw", p, {query.binding, rotated.binding});
  return rotated;
}

}  // namespace attnspan::webgpu
