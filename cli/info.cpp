// attnspan info: what this machine offers.

#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "commands.hpp"
#include "print.hpp"
#include "registry/registry.hpp"

namespace attnspan::cli {
namespace {

void print_json() {
  nlohmann::json report = {{"version", ATTNSPAN_VERSION}, {"backends", nlohmann::json::array()}};
  for (const RegisteredBackend& entry : backends()) {
    nlohmann::json row = {{"name", entry.name}, {"available", entry.backend != nullptr}};
    if (entry.backend != nullptr) {
      row["device"] = name_of(entry.backend->device());
      row["description"] = entry.backend->description();
    } else {
      row["reason"] = entry.reason;
    }
    report["backends"].push_back(row);
  }
  std::printf("%s\n", report.dump(2, ' ', false, nlohmann::json::error_handler_t::replace).c_str());
}

void print_table() {
  std::printf("attnspan %s\n\n", ATTNSPAN_VERSION);
  Table table("llll", {"backend", "available", "tensors on", ""});
  for (const RegisteredBackend& entry : backends()) {
    if (entry.backend != nullptr) {
      table.add(
          {entry.name, "yes", name_of(entry.backend->device()), one_line(entry.backend->description())});
    } else {
      table.add({entry.name, "no", "", one_line(entry.reason)});
    }
  }
  table.print();
  std::printf(
      "\nauto takes the first available one that works where the tensors are and supports the problem.\n"
      "ATTNSPAN_BACKEND=NAME or --backend NAME forces one.\n");
}

}  // namespace

Command add_info(CLI::App& root) {
  CLI::App* app =
      root.add_subcommand("info", "this machine: backends, devices, and why one is not available");
  const auto json = std::make_shared<bool>(false);
  app->add_flag("--json", *json, "report as JSON");
  return {app, [json] {
            *json ? print_json() : print_table();
            return 0;
          }};
}

}  // namespace attnspan::cli
