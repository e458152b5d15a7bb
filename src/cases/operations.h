// All operations with their cases, by name: what the command line and the tests run.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "cases/runner.h"

namespace intarsia::cases {

struct Operation {
  std::string name;
  /// Every case whose name contains `filter`. For the reference backend also the finite differences of gradients.h.
  std::function<std::vector<Outcome>(Backend, std::string_view filter, bool benchmarks)> verify;
  std::function<std::vector<Timing>(Backend, std::string_view filter, double seconds)> bench;
};

const std::vector<Operation>& operations();

}  // namespace intarsia::cases
