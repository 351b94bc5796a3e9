#include "commands.hpp"

#include <algorithm>
#include <cstdio>
#include <exception>
#include <new>

#include "core/validation.hpp"
#include "print.hpp"

namespace attnspan::cli {
namespace {

constexpr const char* kDescription =
    "Exact attention in one pass over memory.\n"
    "Tensors are FILE.npy or FILE.safetensors:TENSOR.";

void describe(CLI::App& root) {
  root.description(kDescription);
  root.name("attnspan");
  root.set_version_flag("--version", "attnspan " ATTNSPAN_VERSION);
  root.require_subcommand(1);
  root.get_formatter()->column_width(34);
}

// "--k k.npy: found ..." after the name of the subcommand, if one was parsed
int print_error(const CLI::App& root, const std::string& message) {
  std::string command = "attnspan";
  for (const CLI::App* sub : root.get_subcommands()) command += " " + sub->get_name();
  std::fprintf(stderr, "%s: %s\n", command.c_str(), one_line(message).c_str());
  return kBadInput;
}

}  // namespace

std::vector<Command> add_commands(CLI::App& root) {
  return {
      add_run(root),   add_check(root), add_bench(root), add_plan(root),
      add_cache(root), add_demo(root),  add_info(root),
  };
}

Command parse(CLI::App& root, const std::vector<Command>& commands, std::vector<std::string> arguments) {
  const auto named = [&](const Command& command) { return command.app->get_name() == arguments[0]; };
  if (!arguments.empty() && !arguments[0].starts_with('-') &&
      std::none_of(commands.begin(), commands.end(), named)) {
    refuse("", "'" + arguments[0] + "'", "a subcommand; see attnspan --help");
  }
  std::reverse(arguments.begin(), arguments.end());  // CLI11 takes them from the back
  root.parse(std::move(arguments));
  for (const Command& command : commands) {
    if (command.app->parsed()) return command;
  }
  throw Error(ErrorCode::invalid_argument, "", "no subcommand; see attnspan --help");
}

int main_with(const std::vector<std::string>& arguments) {
  CLI::App root;
  describe(root);
  const std::vector<Command> commands = add_commands(root);
  try {
    if (arguments.empty()) {
      std::fputs(root.help().c_str(), stderr);
      return kBadInput;
    }
    const int status = parse(root, commands, arguments).run();
    if (std::fflush(stdout) != 0) return print_error(root, "standard output cannot be written");
    return status;
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return root.exit(error);  // --help, --version
    return print_error(root, std::string(error.what()) + "; see --help");
  } catch (const std::bad_alloc&) {
    return print_error(root, "out of memory");
  } catch (const std::exception& error) {
    return print_error(root, error.what());
  }
}

}  // namespace attnspan::cli
