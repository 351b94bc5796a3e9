// attnspan info: what this machine offers.

#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "attnspan/attention.hpp"
#include "commands.hpp"
#include "print.hpp"

namespace attnspan::cli {
namespace {

void print_json() {
  nlohmann::json report = {{"version", ATTNSPAN_VERSION}, {"backends", nlohmann::json::array()}};
  for (const BackendInfo& info : list_backends()) {
    nlohmann::json row = {{"name", info.name}, {"available", info.available}};
    row[info.available ? "description" : "reason"] = info.description;
    if (info.available) row["device"] = name_of(info.device);
    report["backends"].push_back(row);
  }
  std::printf("%s\n", report.dump(2, ' ', false, nlohmann::json::error_handler_t::replace).c_str());
}

void print_table() {
  std::printf("attnspan %s\n\n", ATTNSPAN_VERSION);
  Table table("llll", {"backend", "here", "tensors on", "what, or why not"});
  for (const BackendInfo& info : list_backends()) {
    table.add({info.name, info.available ? "yes" : "no", info.available ? name_of(info.device) : "",
               one_line(info.description)});
  }
  table.print();
  std::printf(
      "\nauto takes the first one that is here, works where the tensors are and supports the problem.\n"
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
