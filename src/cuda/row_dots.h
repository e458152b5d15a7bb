// The last step of down_backward's dscores: GEMM kernels leave the sums of ds over kRowDotColumns columns each in the
// workspace, (ceil(I / kRowDotColumns), R); this adds them up in order, adds <dy, b_down>, and writes dscores, zeros for slots
// without a row.
#pragma once

#include "base/execution.h"
#include "intarsia/ops.h"
#include "plan/blocking.h"

namespace intarsia::cuda {

inline std::int64_t row_dot_parts(const DownBackward& op) {
  const std::int64_t width = op.z.size(1) / gate_factor(op.activation);
  return op.dscores.defined() ? (width + kRowDotColumns - 1) / kRowDotColumns : 0;
}

/// Bytes of the parts, float or, for float64, double.
inline std::size_t row_dot_bytes(const DownBackward& op) {
  return align_up(static_cast<std::size_t>(row_dot_parts(op) * op.z.size(0)) *
                  size_of(op.z.dtype == DType::float64 ? DType::float64 : DType::float32));
}

/// `parts` holds row_dot_parts(op) sums per row. Does nothing when dscores is absent.
void finish_row_dots(const DownBackward& op, const void* parts, void* stream);

}  // namespace intarsia::cuda
