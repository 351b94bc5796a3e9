#pragma once
// What a function of the C ABI returns: nothing that is thrown passes it.

#include <exception>
#include <new>
#include <string>

#include "attnspan/attnspan.h"
#include "attnspan/error.hpp"

namespace attnspan::capi {

// The message of this thread, for attnspan_last_error().
std::string& last_error() noexcept;
attnspan_status failed(attnspan_status status, const char* message) noexcept;

template <typename Call>
attnspan_status guarded(Call call) noexcept {
  try {
    call();
    return ATTNSPAN_OK;
  } catch (const Error& error) {
    return failed(static_cast<attnspan_status>(error.code()), error.what());
  } catch (const std::bad_alloc&) {
    return failed(ATTNSPAN_OUT_OF_MEMORY, "out of memory");
  } catch (const std::exception& error) {
    return failed(ATTNSPAN_INTERNAL, error.what());
  } catch (...) {
    return failed(ATTNSPAN_INTERNAL, "an exception of unknown type");
  }
}

}  // namespace attnspan::capi
