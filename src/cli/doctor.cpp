// intarsia-ops doctor: what the library finds on this machine.
#include <fmt/core.h>

#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "intarsia/c_api.h"

namespace intarsia::cli {
namespace {

int doctor() {
  const char* json = nullptr;
  if (intarsia_doctor(&json) != INTARSIA_OK) {
    fmt::print(stderr, "intarsia-ops doctor: {}\n", intarsia_last_error());
    return 1;
  }
  fmt::print("{}\n", nlohmann::json::parse(json).dump(2));
  return 0;
}

}  // namespace

void add_doctor(CLI::App& app, int& status) {
  auto* command =
      app.add_subcommand("doctor", "versions, processor features, loaded libraries and a numeric self-test, as JSON");
  command->callback([&status] { status = doctor(); });
}

}  // namespace intarsia::cli
