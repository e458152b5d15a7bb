// intarsia-ops verify: every case of an operation on a backend; exits with 1 when one fails.
#include <fmt/core.h>

#include <cmath>

#include "cases/operations.h"
#include "cli/commands.h"

namespace intarsia::cli {
namespace {

/// One line per operation, then every failing case in full. Returns the number of failures.
int print(const std::string& operation, const std::vector<cases::Outcome>& outcomes) {
  const cases::Outcome* worst = nullptr;
  int failures = 0;
  for (const cases::Outcome& outcome : outcomes) {
    failures += !outcome.failure.empty();
    if (!worst || outcome.ratio > worst->ratio) worst = &outcome;
  }
  if (!worst) {
    fmt::print("{:<28} no case\n", operation);
    return 0;
  }
  fmt::print("{:<28} {:>5} cases  {:>4} failed  worst error/tolerance {:.3f} ({})\n", operation, outcomes.size(), failures,
             worst->ratio, worst->name);
  for (const cases::Outcome& outcome : outcomes)
    if (!outcome.failure.empty()) fmt::print("  FAILED {} {}\n         {}\n", operation, outcome.name, outcome.failure);
  return failures;
}

struct Options {
  Selection selection;
  bool benchmarks = false;
};

int verify(const Options& o) {
  int failures = 0;
  std::size_t count = 0;
  for (const auto& operation : cases::operations()) {
    if (!o.selection.includes(operation.name)) continue;
    const auto outcomes = operation.verify(parse<Backend>(o.selection.backend), o.selection.filter, o.benchmarks);
    count += outcomes.size();
    failures += print(operation.name, outcomes);
    std::fflush(stdout);
  }
  if (count == 0) {
    fmt::print("no case was run\n");
    return 1;
  }
  return failures > 0 ? 1 : 0;
}

}  // namespace

void add_verify(CLI::App& app, int& status) {
  auto* command =
      app.add_subcommand("verify", "runs every case against the reference; the reference against float64 and differences");
  auto options = std::make_shared<Options>();
  options->selection.add_to(*command);
  command->add_flag("--benchmarks", options->benchmarks, "the larger cases of `bench` (slow: the reference is plain loops)");
  command->callback([options, &status] { status = verify(*options); });
}

}  // namespace intarsia::cli
