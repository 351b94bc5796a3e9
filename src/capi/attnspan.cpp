// The functions of attnspan.h. Each converts, calls the C++ API and turns what was thrown into a status.

#include "attnspan/attnspan.h"

#include <string>

#include "capi/convert.hpp"
#include "capi/status.hpp"
#include "core/validation.hpp"

namespace attnspan::capi {

std::string& last_error() noexcept {
  thread_local std::string message;
  return message;
}

attnspan_status failed(attnspan_status status, const char* message) noexcept {
  try {
    last_error() = message;
  } catch (...) {  // no memory for the message
    last_error().clear();
  }
  return status;
}

namespace {

void throw_unless(const Support& support, const char* backend) {
  if (!support) throw Error(ErrorCode::unsupported, backend, support.reason);
}

const char* named(const char* backend) {
  require(backend != nullptr, "backend", "a null pointer", "a backend's name");
  return backend;
}

// A result that cannot be written is refused before the work is done.
void check_result(attnspan_result* result) { store(Result{}, result); }

}  // namespace
}  // namespace attnspan::capi

using namespace attnspan;  // NOLINT(google-build-using-namespace): this file is the boundary
using namespace attnspan::capi;

extern "C" {

const char* attnspan_version(void) { return ATTNSPAN_VERSION; }

const char* attnspan_last_error(void) { return last_error().c_str(); }

attnspan_status attnspan_forward(const attnspan_forward_args* args, const attnspan_execution* execution,
                                 attnspan_result* result) {
  return guarded([&] {
    check_result(result);
    store(forward(convert(args).args, convert(execution)), result);
  });
}

attnspan_status attnspan_backward(const attnspan_backward_args* args, const attnspan_execution* execution,
                                  attnspan_result* result) {
  return guarded([&] {
    check_result(result);
    store(backward(convert(args).args, convert(execution)), result);
  });
}

attnspan_status attnspan_decode(const attnspan_forward_args* args, const attnspan_execution* execution,
                                attnspan_result* result) {
  return guarded([&] {
    check_result(result);
    const Converted<ForwardArgs> converted = convert(args);
    const ForwardArgs& a = converted.args;
    require(a.cache != nullptr, "cache", "a null pointer", "a cache (forward takes key and value)");
    require(!a.key && !a.value && !a.probs, "args", "key, value or probs together with a cache",
            "none of them");
    store(decode(a.query, *a.cache, a.out, a.lse, a.options, convert(execution)), result);
  });
}

attnspan_status attnspan_merge_states(const attnspan_merge_args* args, const attnspan_execution* execution,
                                      attnspan_result* result) {
  return guarded([&] {
    check_result(result);
    store(merge_states(convert(args).args, convert(execution)), result);
  });
}

attnspan_status attnspan_forward_supports(const attnspan_forward_args* args, const char* backend) {
  return guarded([&] { throw_unless(supports(convert(args).args, named(backend)), backend); });
}

attnspan_status attnspan_backward_supports(const attnspan_backward_args* args, const char* backend) {
  return guarded([&] { throw_unless(supports(convert(args).args, named(backend)), backend); });
}

attnspan_status attnspan_forward_workspace_bytes(const attnspan_forward_args* args,
                                                 const attnspan_execution* execution, size_t* bytes) {
  return guarded([&] {
    require(bytes != nullptr, "bytes", "a null pointer", "an address");
    *bytes = workspace_bytes(convert(args).args, convert(execution));
  });
}

attnspan_status attnspan_backward_workspace_bytes(const attnspan_backward_args* args,
                                                  const attnspan_execution* execution, size_t* bytes) {
  return guarded([&] {
    require(bytes != nullptr, "bytes", "a null pointer", "an address");
    *bytes = workspace_bytes(convert(args).args, convert(execution));
  });
}

attnspan_status attnspan_dense_cache(const attnspan_tensor* key, const attnspan_tensor* value,
                                     const attnspan_tensor* seqlens, attnspan_kv_view* view) {
  return guarded([&] {
    store(dense_cache(convert(key, "key"), convert(value, "value"), convert(seqlens, "seqlens")), view);
  });
}

attnspan_status attnspan_paged_cache(const attnspan_tensor* key, const attnspan_tensor* value,
                                     const attnspan_tensor* block_table, const attnspan_tensor* seqlens,
                                     attnspan_kv_view* view) {
  return guarded([&] {
    store(paged_cache(convert(key, "key"), convert(value, "value"), convert(block_table, "block_table"),
                      convert(seqlens, "seqlens")),
          view);
  });
}

int32_t attnspan_backend_count(void) {
  int32_t count = 0;
  guarded([&] { count = static_cast<int32_t>(list_backends().size()); });
  return count;
}

attnspan_status attnspan_backend_at(int32_t index, attnspan_backend_info* info) {
  return guarded([&] {
    const std::vector<BackendInfo> list = list_backends();
    require(index >= 0 && index < static_cast<int32_t>(list.size()), "index", std::to_string(index),
            "0 to " + std::to_string(list.size() - 1));
    store(list[static_cast<size_t>(index)], info);
  });
}

}  // extern "C"
