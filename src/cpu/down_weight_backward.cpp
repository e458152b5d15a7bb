// down_weight_backward: dw_down[e] = grad_scale * dy[row_token]^T a', in the caller's layout; zeros, or untouched when
// `accumulate`, for experts without rows. dy (T, H) or (R, H), a' (R, I), dw_down (E, H, I) in x's dtype or fp32. 2 R H I
// flops. Verify: intarsia-ops verify down_weight_backward
#include "base/rows.h"
#include "cpu/cpu.h"
#include "cpu/weight_gradient.h"

namespace intarsia::cpu {

WeightGradient down_weight_gradient(const DownWeightBackward& op) {
  return {.left = {op.dy, list(op.row_token)},
          .right = {op.a_scaled},
          .expert_offsets = op.expert_offsets,
          .accumulate = op.accumulate,
          .grad_scale = op.grad_scale,
          .gated = false,
          .dw = op.dw_down};
}

std::size_t workspace_bytes(const DownWeightBackward& op, int workers) {
  return weight_gradient_bytes(down_weight_gradient(op), workers);
}

void run(const DownWeightBackward& op, const Execution& execution) { weight_gradient(down_weight_gradient(op), execution); }

}  // namespace intarsia::cpu
