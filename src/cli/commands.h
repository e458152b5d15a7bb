// The subcommands of intarsia-ops. Each adds itself to the application; its exit status is what its callback stores in
// `status`.
#pragma once

#include <CLI/CLI.hpp>
#include <memory>
#include <string>
#include <vector>

#include "intarsia/config.h"

namespace intarsia::cli {

void add_verify(CLI::App& app, int& status);
void add_bench(CLI::App& app, int& status);
void add_plan(CLI::App& app, int& status);
void add_doctor(CLI::App& app, int& status);

/// The operations, backend and filter that `verify` and `bench` share.
struct Selection {
  std::vector<std::string> operations;
  std::string backend = "automatic";
  std::string filter;

  void add_to(CLI::App& command);
  /// Names of the operations asked for, all without one; throws CLI::ValidationError for an unknown one.
  bool includes(const std::string& operation) const;
};

}  // namespace intarsia::cli
