#pragma once
// Flags with errors that name the flag, what was found and what was expected.

#include <CLI/CLI.hpp>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "io/tensor_file.hpp"

namespace attnspan::cli {

// `text` as a number. Throws Error(invalid_argument, flag, "found '...', expected ...").
int64_t parse_integer(const std::string& flag, const std::string& text, int64_t lowest, int64_t highest);
double parse_number(const std::string& flag, const std::string& text);

// Targets must live as long as `app` parses.
void add_integer(CLI::App& app, const std::string& flag, int64_t& target, int64_t lowest,
                 const std::string& description, int64_t highest = std::numeric_limits<int64_t>::max());
void add_number(CLI::App& app, const std::string& flag, double& target, const std::string& description);
void add_choice(CLI::App& app, const std::string& flag, std::string& target,
                const std::vector<std::string>& choices, const std::string& description);
// FILE.npy or FILE.safetensors:TENSOR
void add_tensor(CLI::App& app, const std::string& flag, std::optional<io::TensorAddress>& target,
                const std::string& description);
// --backend: auto, or a name that this build knows
void add_backend(CLI::App& app, std::string& target, const std::string& description);

}  // namespace attnspan::cli
