#pragma once
// What a backend is: a folder with one entry point, make_backend(), that returns this interface or the reason
// why the backend is not on this machine.

#include <memory>
#include <string>
#include <vector>

#include "attnspan/attention.hpp"
#include "attnspan/device_cache.hpp"
#include "core/problem.hpp"

namespace attnspan {

// Two states to join, validated (see MergeArgs). All tensors on one device.
struct MergeProblem {
  Device device = Device::cpu;
  DType dtype = DType::f32;
  int64_t batch = 0, heads = 0, rows = 0, head_dim_v = 0;
  Rows out_a, lse_a, out_b, lse_b, out, lse;
};

// Memory of a device that is not the host's, for staging host tensors. Addresses are opaque to the host.
class DeviceMemory {
 public:
  virtual ~DeviceMemory() = default;
  virtual void* allocate(size_t bytes) = 0;
  virtual void release(void* address) = 0;
  virtual void upload(void* to, const void* from, size_t bytes) = 0;
  virtual void download(void* to, const void* from, size_t bytes) = 0;  // waits for the device
};

class Backend {
 public:
  virtual ~Backend() = default;

  virtual std::string name() const = 0;  // "cpu"
  virtual std::string description()
      const = 0;                      // one line for `attnspan info`: device, instruction set, limits
  virtual Device device() const = 0;  // where its tensors live
  // Null for backends that work on host memory. Others get host tensors through src/core/staging.
  virtual DeviceMemory* memory() { return nullptr; }

  virtual Support supports(const Problem& problem) const = 0;
  virtual size_t workspace_bytes(const Problem&, const Execution&) const { return 0; }

  // Problems are valid and supported. Returns the number of non-finite values replaced (nan_guard).
  virtual int64_t forward(const Problem& problem, const Execution& execution) = 0;
  virtual int64_t backward(const Problem& problem, const Execution& execution) = 0;
  virtual void merge(const MergeProblem& problem, const Execution& execution) = 0;
  // Validated. For backends whose caches live on a device of their own.
  virtual void append(const DeviceAppendArgs&, const Execution&) {
    throw Error(ErrorCode::unsupported, "backend",
                name() + " does not encode into a cache (KvCache does, on the host)");
  }
};

// A backend, or why there is none: exactly one of the two is set.
struct BackendOrReason {
  std::unique_ptr<Backend> backend;
  std::string reason;
};

}  // namespace attnspan
