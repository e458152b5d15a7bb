// What this installation can do, as JSON: for `intarsia doctor`, `intarsia-ops doctor` and bug reports.
#pragma once

#include <string>

namespace intarsia {

std::string doctor_json();

}  // namespace intarsia
