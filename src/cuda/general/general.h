// The six products as plain kernels: every dtype, size, stride and alignment. The path of last resort, and the oracle on the
// GPU.
#pragma once

#include <cstddef>

#include "base/execution.h"
#include "intarsia/ops.h"

namespace intarsia::cuda::general {

#define INTARSIA_DECLARE(Op)             \
  void run(const Op&, const Execution&); \
  std::size_t workspace_bytes(const Op&);
INTARSIA_DECLARE(UpForward)
INTARSIA_DECLARE(DownForward)
INTARSIA_DECLARE(DownBackward)
INTARSIA_DECLARE(DownWeightBackward)
INTARSIA_DECLARE(UpBackward)
INTARSIA_DECLARE(UpWeightBackward)
#undef INTARSIA_DECLARE

}  // namespace intarsia::cuda::general
