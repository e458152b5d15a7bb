// Two operations of one stream at once: combine is bound by memory, a weight gradient by the tensor cores and their power, and
// neither needs the other. combine takes a few multiprocessors and lets the gradient's kernel start beside it on the others.
#pragma once

#include "base/execution.h"
#include "intarsia/ops.h"

namespace intarsia::cuda {

/// combine and up_weight_backward: at once where wgmma kernels run, else one after the other. In the order of the stream both
/// are complete before what follows.
void run_beside(const Combine&, const UpWeightBackward&, const Execution&);

/// combine on so many multiprocessors alone (0: all), one whole block each; what follows in the stream may start before it ends
/// if it says so at its launch.
void run_on_few(const Combine&, int multiprocessors, const Execution&);

}  // namespace intarsia::cuda
