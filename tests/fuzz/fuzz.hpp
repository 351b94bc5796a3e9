#pragma once
// What every parser promises, whatever it is given: a result that keeps its word, or one Error with a message
// of one line. Anything else ends the program, which is how a fuzzer learns of it.

#include <cstdio>
#include <cstdlib>
#include <span>
#include <string>

#include "attnspan/error.hpp"

namespace attnspan::fuzz {

inline void check(bool ok, const char* promise) {
  if (ok) return;
  std::fprintf(stderr, "broken promise: %s\n", promise);
  std::abort();
}

// Runs `parse`; an Error is an answer, if its message is one line of plain text.
template <typename Parse>
void expect_result_or_error(Parse parse) {
  try {
    parse();
  } catch (const Error& error) {
    const std::string message = error.what();
    check(!message.empty(), "an error says what is wrong");
    check(message.find('\n') == std::string::npos, "an error is one line");
  }
}

}  // namespace attnspan::fuzz
