#pragma once
// The subcommands: each has one file, with one function that declares its flags and says what runs it.

#include <CLI/CLI.hpp>
#include <functional>
#include <string>
#include <vector>

namespace attnspan::cli {

// Exit statuses: 0, or
inline constexpr int kMissed = 1;    // a check found a wrong result
inline constexpr int kBadInput = 2;  // an error that was printed

struct Command {
  CLI::App* app = nullptr;
  std::function<int()> run;  // after parsing; returns the exit status
};

Command add_bench(CLI::App& root);
Command add_cache(CLI::App& root);
Command add_check(CLI::App& root);
Command add_demo(CLI::App& root);
Command add_info(CLI::App& root);
Command add_plan(CLI::App& root);
Command add_run(CLI::App& root);

// Declares every subcommand, in the order in which --help lists them.
std::vector<Command> add_commands(CLI::App& root);

// Parses without running anything: the command that was chosen. Throws CLI::ParseError or Error.
Command parse(CLI::App& root, const std::vector<Command>& commands, std::vector<std::string> arguments);

// The whole command: parses, runs, prints errors as one line, returns the exit status.
int main_with(const std::vector<std::string>& arguments);

}  // namespace attnspan::cli
