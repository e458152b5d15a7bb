// Rows past the last one of a row buffer become zeros: outputs of the layer whose rows the caller sorted.
#pragma once

#include "intarsia/types.h"

namespace intarsia::cuda {

/// rows (R, H), unit stride along a row; rows from expert_offsets[E] on are written.
void zero_rows_past_last(const TensorView& rows, const TensorView& expert_offsets, void* stream);

}  // namespace intarsia::cuda
