// intarsia-ops bench: medians of the larger cases.
#include <fmt/core.h>

#include "cases/operations.h"
#include "cli/commands.h"

namespace intarsia::cli {
namespace {

struct Options {
  Selection selection;
  double seconds = 0.5;
};

int bench(const Options& o) {
  int failures = 0;
  fmt::print("{:<28} {:<40} {:>11} {:>10} {:>10}\n", "operation", "case", "median ms", "GFLOP/s", "GB/s");
  for (const auto& operation : cases::operations()) {
    if (!o.selection.includes(operation.name)) continue;
    for (const cases::Timing& t : operation.bench(parse<Backend>(o.selection.backend), o.selection.filter, o.seconds)) {
      if (!t.failure.empty()) {
        ++failures;
        fmt::print("{:<28} {:<40} {}\n", operation.name, t.name, t.failure);
        continue;
      }
      const std::string rate = t.flops > 0 ? fmt::format("{:.1f}", t.flops / t.seconds * 1e-9) : "-";
      fmt::print("{:<28} {:<40} {:>11.3f} {:>10} {:>10.2f}\n", operation.name, t.name, t.seconds * 1e3, rate,
                 t.bytes / t.seconds * 1e-9);
      std::fflush(stdout);
    }
  }
  return failures > 0 ? 1 : 0;
}

}  // namespace

void add_bench(CLI::App& app, int& status) {
  auto* command = app.add_subcommand("bench", "times the larger cases; GB/s counts every argument once");
  auto options = std::make_shared<Options>();
  options->selection.add_to(*command);
  command->add_option("--seconds", options->seconds, "per case")->capture_default_str()->check(CLI::PositiveNumber);
  command->callback([options, &status] { status = bench(*options); });
}

}  // namespace intarsia::cli
