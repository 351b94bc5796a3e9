// The command line: one argument a line. Nothing runs.

#include <string>
#include <vector>

#include "../../cli/commands.hpp"
#include "fuzz.hpp"

using namespace attnspan;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::vector<std::string> arguments(1);
  for (size_t i = 0; i < size; ++i) {
    if (data[i] == '\n') {
      arguments.emplace_back();
    } else if (data[i] != 0) {  // no argument of a process has one
      arguments.back() += static_cast<char>(data[i]);
    }
  }
  CLI::App root;
  const std::vector<cli::Command> commands = cli::add_commands(root);
  try {
    fuzz::expect_result_or_error([&] { cli::parse(root, commands, arguments); });
  } catch (const CLI::ParseError& error) {
    fuzz::check(error.what()[0] != '\0', "an error says what is wrong");
  }
  return 0;
}
