// The reference's gradients against central differences of its own forward operations, every element, in float64.
#pragma once

#include <string_view>
#include <vector>

#include "cases/runner.h"

namespace intarsia::cases {

/// The checks of one backward operation whose names contain `filter`; none for the others.
std::vector<Outcome> verify_gradients(std::string_view operation, std::string_view filter);

}  // namespace intarsia::cases
