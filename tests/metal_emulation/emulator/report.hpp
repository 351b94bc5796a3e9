#pragma once
// How the emulator speaks of faults: a kind, a sentence, and the line of the kernel.

#include <source_location>
#include <stdexcept>
#include <string>

namespace emu {

// Thrown to the host by dispatch() once a threadgroup has failed.
class Fault : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Ends the GPU thread that runs now; dispatch() throws `message`. Never returns.
[[noreturn]] void fail(const std::string& message);
// The same with the kernel line of a machine address inside it appended, as debug information tells it.
[[noreturn]] void fail_at(const std::string& message, const void* address);

inline std::string text_of(const std::source_location& site) {
  std::string file = site.file_name();
  return file.substr(file.rfind('/') + 1) + ":" + std::to_string(site.line());
}

}  // namespace emu
