// The oracle: every operation as plain loops in double, stored in the tensors' dtypes. Slow on purpose.
#pragma once

#include <string>

#include "base/execution.h"
#include "intarsia/ops.h"

namespace intarsia::reference {

#define INTARSIA_DECLARE(Op) void run(const Op&, const Execution&);
INTARSIA_FOR_EACH_OPERATION(INTARSIA_DECLARE)
#undef INTARSIA_DECLARE

}  // namespace intarsia::reference
