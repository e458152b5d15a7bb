// validate(op): everything that can be wrong with an operation's arguments, before any backend sees them. On the CPU the values
// of lists are checked too; values on a GPU are read by the host with INTARSIA_CHECK=1 only (host_lists.h).
#pragma once

#include "intarsia/ops.h"

namespace intarsia {

#define INTARSIA_DECLARE(Op) void validate(const Op&);
INTARSIA_FOR_EACH_OPERATION(INTARSIA_DECLARE)
#undef INTARSIA_DECLARE

}  // namespace intarsia
