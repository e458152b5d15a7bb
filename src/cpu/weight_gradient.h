// The product that both weight gradients are: dw[e](out, in) = grad_scale * sum over the rows r of e of left[r](out) *
// right[r](in).
#pragma once

#include <cstdint>

#include "base/execution.h"
#include "intarsia/ops.h"
#include "plan/blocking.h"

namespace intarsia::cpu {

/// Rows of a tensor, in the order of the row lists: row r is row_token[r], or r without a list.
struct ListedRows {
  TensorView rows;
  const std::int32_t* row_token = nullptr;
};

struct WeightGradient {
  ListedRows left;   // the out axis of dw, as [gate, up]
  ListedRows right;  // the in axis of dw
  TensorView expert_offsets;
  bool accumulate;
  double grad_scale;
  bool gated;  // the out axis of dw has gates and ups
  Weights dw;
};

/// `memory`: blocking.scratch_bytes for each worker; `segments`: E + 1 entries.
void weight_gradient(const WeightGradient& gradient, const CpuBlocking& blocking, std::int32_t* segments, std::byte* memory,
                     int workers);

/// The same in a workspace of its own.
std::size_t weight_gradient_bytes(const WeightGradient& gradient, int workers);
void weight_gradient(const WeightGradient& gradient, const Execution& execution);

WeightGradient down_weight_gradient(const DownWeightBackward& op);
WeightGradient up_weight_gradient(const UpWeightBackward& op);

}  // namespace intarsia::cpu
