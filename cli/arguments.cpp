#include "arguments.hpp"

#include <cctype>
#include <cerrno>
#include <charconv>
#include <cstdlib>

#include "core/validation.hpp"
#include "registry/make_backends.hpp"

namespace attnspan::cli {
namespace {

bool parse_whole(const std::string& text, int64_t& value) {
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  return error == std::errc{} && stop == end;
}

// std::from_chars of a double is missing from Apple's library.
bool parse_whole(const std::string& text, double& value) {
  if (text.empty() || std::isspace(static_cast<unsigned char>(text[0]))) return false;
  char* stop = nullptr;
  errno = 0;
  value = std::strtod(text.c_str(), &stop);
  return errno == 0 && stop == text.c_str() + text.size();
}

std::string in_quotes(const std::string& text) { return "'" + text + "'"; }

}  // namespace

int64_t parse_integer(const std::string& flag, const std::string& text, int64_t lowest, int64_t highest) {
  int64_t value = 0;
  const bool ok = parse_whole(text, value) && value >= lowest && value <= highest;
  std::string expected = "an integer";
  if (highest != std::numeric_limits<int64_t>::max()) {
    expected += " from " + std::to_string(lowest) + " to " + std::to_string(highest);
  } else if (lowest != std::numeric_limits<int64_t>::min()) {
    expected += " of " + std::to_string(lowest) + " or more";
  }
  require(ok, flag, in_quotes(text), expected);
  return value;
}

double parse_number(const std::string& flag, const std::string& text) {
  double value = 0;
  require(parse_whole(text, value), flag, in_quotes(text), "a number");
  return value;
}

void add_integer(CLI::App& app, const std::string& flag, int64_t& target, int64_t lowest,
                 const std::string& description, int64_t highest) {
  app.add_option_function<std::string>(
         flag,
         [&target, flag, lowest, highest](const std::string& text) {
           target = parse_integer(flag, text, lowest, highest);
         },
         description)
      ->type_name("N");
}

void add_number(CLI::App& app, const std::string& flag, double& target, const std::string& description) {
  app.add_option_function<std::string>(
         flag, [&target, flag](const std::string& text) { target = parse_number(flag, text); }, description)
      ->type_name("X");
}

void add_choice(CLI::App& app, const std::string& flag, std::string& target,
                const std::vector<std::string>& choices, const std::string& description) {
  std::string names;
  for (const std::string& choice : choices) names += (names.empty() ? "" : "|") + choice;
  app.add_option_function<std::string>(
         flag,
         [&target, flag, choices, names](const std::string& text) {
           bool known = false;
           for (const std::string& choice : choices) known = known || choice == text;
           require(known, flag, in_quotes(text), names);
           target = text;
         },
         description)
      ->type_name(names);
}

void add_tensor(CLI::App& app, const std::string& flag, std::optional<io::TensorAddress>& target,
                const std::string& description) {
  app.add_option_function<std::string>(
         flag,
         [&target, flag](const std::string& text) {
           try {
             target = io::parse_address(text);
           } catch (const Error& error) {
             throw Error(error.code(), flag + " " + error.argument(), error.detail());
           }
         },
         description)
      ->type_name("TENSOR");
}

void add_backend(CLI::App& app, std::string& target, const std::string& description) {
  std::vector<std::string> names = {"auto"};
  for (const BackendEntry& entry : backend_entries()) names.push_back(entry.name);
  add_choice(app, "--backend", target, names, description);
}

}  // namespace attnspan::cli
