#pragma once
// The forward kernel of Hopper: wgmma on tiles that TMA loads.

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "cuda/params.hpp"

namespace attnspan::cuda {

// The order of a launch's tiles. Equal lengths: (sequence, head) pairs go in sections whose keys and values
// fit the L2 together, and within one the longest tiles (the last rows) start first, so that causal work ends
// evenly. Packed sequences go one after the other.
struct Sm90Schedule {
  int32_t row_tiles = 0;     // of one sequence
  int32_t section = 1;       // (sequence, head) pairs that run side by side
  int64_t tiles = 0;         // equal lengths: of all
  uint32_t* next = nullptr;  // counter of tiles handed out behind the first of each block; null: dealt
  bool zero_tail = false;    // rows of V beyond a sequence's keys belong to others and may be no numbers
};

struct Sm90Plan {
  bool ok = false;  // this kernel can run the problem
  int blocks = 0;
  Sm90Schedule schedule;
  bool needs_counter = false;
};

Sm90Plan plan_forward_sm90(const Params& p, int major, int multiprocessors, int64_t l2_bytes);
// Where the plan needs a counter, schedule.next points to 4 zeroed bytes.
cudaError_t launch_forward_sm90(const Params& p, const Sm90Plan& plan, cudaStream_t stream);

namespace detail {

struct Sm90Args {
  CUtensorMap query, key, value;
  Params p;
  Sm90Schedule schedule;
};
// bucket: an index into the tiles in the order of tiles.hpp
template <typename T>
cudaError_t launch_forward_sm90_as(const Sm90Args& args, int bucket, bool transformed, int blocks,
                                   cudaStream_t stream);

}  // namespace detail
}  // namespace attnspan::cuda
