// intarsia-ops: verify, bench, plan, doctor.
#include <algorithm>
#include <cstdio>
#include <exception>

#include "cases/operations.h"
#include "cli/commands.h"
#include "intarsia/version.h"

namespace intarsia::cli {

void Selection::add_to(CLI::App& command) {
  std::vector<std::string> names;
  for (const auto& operation : cases::operations()) names.push_back(operation.name);
  command.add_option("operation", operations, "operations; all when left out")->check(CLI::IsMember(names));
  command.add_option("--backend", backend, "automatic, reference, cpu or cuda")
      ->check(CLI::IsMember({"automatic", "reference", "cpu", "cuda"}))
      ->capture_default_str();
  command.add_option("--filter", filter, "only cases whose name contains this");
}

bool Selection::includes(const std::string& operation) const {
  return operations.empty() || std::find(operations.begin(), operations.end(), operation) != operations.end();
}

}  // namespace intarsia::cli

int main(int argc, char** argv) try {
  CLI::App app{"Checks and times the operations of Intarsia, plans a layer's memory, examines the installation."};
  app.set_version_flag("--version", INTARSIA_VERSION);
  app.require_subcommand(1);
  int status = 0;
  intarsia::cli::add_verify(app, status);
  intarsia::cli::add_bench(app, status);
  intarsia::cli::add_plan(app, status);
  intarsia::cli::add_doctor(app, status);
  CLI11_PARSE(app, argc, argv);
  return status;
} catch (const std::exception& error) {
  std::fprintf(stderr, "intarsia-ops: %s\n", error.what());
  return 2;
}
