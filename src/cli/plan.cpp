// intarsia-ops plan: the memory plan of one layer as a table or JSON.
#include "intarsia/plan.h"

#include <fmt/core.h>

#include <type_traits>

#include "api/plan_fields.h"
#include "cli/commands.h"

namespace intarsia::cli {
namespace {

struct Options {
  LayerShape shape{.tokens = 4096, .hidden = 1024, .width = 512, .experts = 8, .experts_per_token = 2};
  PlanOptions plan;
  bool json = false;
};

/// Every field as an option: experts_per_token is --experts-per-token.
struct AddOptions {
  CLI::App* command;

  template <class T>
  void value(const char* name, T& field) {
    std::string flag = std::string("--") + name;
    for (char& c : flag)
      if (c == '_') c = '-';
    if constexpr (std::is_enum_v<T>) {
      command->add_option_function<std::string>(flag, [&field](const std::string& text) { field = parse<T>(text); })
          ->default_str(std::string(to_string(field)));
    } else {
      command->add_option(flag, field)->capture_default_str();
    }
  }
};

}  // namespace

void add_plan(CLI::App& app, int& status) {
  auto* command = app.add_subcommand("plan", "every buffer of a layer's forward and backward with bytes and lifetime");
  auto options = std::make_shared<Options>();
  AddOptions add{command};
  fields(add, options->shape);
  fields(add, options->plan);
  command->add_flag("--json", options->json, "JSON instead of a table");
  command->callback([options, &status] {
    const Plan plan = plan_layer(options->shape, options->plan);
    fmt::print("{}\n", options->json ? to_json(plan) : to_table(plan));
    status = 0;
  });
}

}  // namespace intarsia::cli
