#pragma once
/// Errors: every refusal names one argument, what was found and what was expected, in one line.

#include <stdexcept>
#include <string>

namespace attnspan {

enum class ErrorCode : int {
  invalid_argument = 1,  ///< an argument contradicts the contract
  unsupported = 2,       ///< the contract allows it, the chosen backend does not (the message says why)
  unavailable = 3,       ///< the backend or device is not on this machine
  io = 4,                ///< a file is missing, torn, foreign or cannot be written
  out_of_memory = 5,
  internal = 6,
};

class Error : public std::runtime_error {
 public:
  /// `argument` is the name used in the public headers ("key", "window_left", ...), or a file.
  Error(ErrorCode code, std::string argument, const std::string& detail)
      : std::runtime_error(argument.empty() ? detail : argument + ": " + detail),
        code_(code),
        argument_(std::move(argument)),
        detail_(detail) {}

  ErrorCode code() const { return code_; }
  const std::string& argument() const { return argument_; }
  const std::string& detail() const { return detail_; }

 private:
  ErrorCode code_;
  std::string argument_;
  std::string detail_;
};

}  // namespace attnspan
