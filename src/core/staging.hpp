#pragma once
// Host tensors for a backend with a memory of its own: copies go up before the call and results come back
// after it. Device tensors never pass through here.

#include <memory>
#include <vector>

#include "registry/backend.hpp"

namespace attnspan {

// Replaces the tensors of public arguments by device copies, and fetches the written ones back.
class Staging {
 public:
  Staging(DeviceMemory& memory, Device device) : memory_(memory), device_(device) {}
  ~Staging();
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  ForwardArgs stage(const ForwardArgs& args);
  BackwardArgs stage(const BackwardArgs& args);
  MergeArgs stage(const MergeArgs& args);

  // Copies every output back to the host tensor it stands for. Only the elements of the view are written.
  void fetch_outputs();

 private:
  Tensor input(const Tensor& host);
  Tensor output(const Tensor& host);
  AttentionOptions side_inputs(const AttentionOptions& options);
  const KvView* cache(const KvView* host);
  KvRows cache_rows(const KvRows& host, const KvView& view);
  void* allocate(size_t bytes);

  struct Output {
    Tensor host;
    Tensor device;  // contiguous
  };

  DeviceMemory& memory_;
  Device device_;
  std::vector<void*> allocations_;
  std::vector<Output> outputs_;
  std::unique_ptr<KvView> cache_;
};

}  // namespace attnspan
