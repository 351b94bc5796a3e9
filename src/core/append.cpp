// Validation of append() on devices, and its backend.

#include "attnspan/device_cache.hpp"
#include "core/validation.hpp"
#include "kv/format.hpp"
#include "registry/registry.hpp"

namespace attnspan {
namespace {

void check_rows(const Tensor& tensor, const char* name, const KvView& cache, int64_t dim,
                const DeviceAppendArgs& args) {
  require_shape(tensor, name, {cache.batch, args.key.shape[1], cache.kv_heads, dim},
                "batch, tokens, kv_heads, dim");
  require(tensor.dtype != DType::i32, name, name_of(tensor.dtype), "f32, f16 or bf16");
  require_dtype(tensor, name, args.key.dtype);
  require_device(tensor, name, cache.device);
  require_rows(tensor, name);
}

}  // namespace

void append(const DeviceAppendArgs& args, const Execution& execution) {
  require(args.cache != nullptr, "cache", "none", "a view of a cache on a device");
  const KvView& cache = *args.cache;
  check_head_dim(cache.key.dim, "cache.key.dim");
  check_head_dim(cache.value.dim, "cache.value.dim");
  require_rank(args.key, "key", 4, "batch, tokens, kv_heads, head_dim");
  check_rows(args.key, "key", cache, cache.key.dim, args);
  require(static_cast<bool>(args.value) != shares_rows(cache), "value", args.value ? "a tensor" : "no tensor",
          shares_rows(cache) ? "none: values are keys" : "one");
  if (args.value) check_rows(args.value, "value", cache, cache.value.dim, args);
  require_shape(args.start, "start", {cache.batch}, "batch");
  require_dtype(args.start, "start", DType::i32);
  require_device(args.start, "start", cache.device);
  if (args.saturated) {
    require_shape(args.saturated, "saturated", {1}, "one counter");
    require_dtype(args.saturated, "saturated", DType::i32);
    require_device(args.saturated, "saturated", cache.device);
  }
  Backend& backend = select_backend(cache.device, execution.backend);
  require(backend.device() == cache.device, "cache", std::string("on ") + name_of(cache.device),
          "on " + std::string(name_of(backend.device())) + ", where backend " + backend.name() + " works");
  backend.append(args, execution);
}

}  // namespace attnspan
