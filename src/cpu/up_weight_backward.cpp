// up_weight_backward: dw_up[e] = grad_scale * dz^T x[row_token], in the caller's layout; zeros, or untouched when `accumulate`,
// for experts without rows. dz (R, G*I) [gate, up], x (T, H) or (R, H), dw_up (E, G*I, H) in x's dtype or fp32. 2 R G I H
// flops. Verify: intarsia-ops verify up_weight_backward
#include "base/rows.h"
#include "cpu/cpu.h"
#include "cpu/weight_gradient.h"

namespace intarsia::cpu {

WeightGradient up_weight_gradient(const UpWeightBackward& op) {
  return {.left = {op.dz},
          .right = {op.x, list(op.row_token)},
          .expert_offsets = op.expert_offsets,
          .accumulate = op.accumulate,
          .grad_scale = op.grad_scale,
          .gated = op.dw_up.second.defined() || op.dw_up.gate_block > 0,
          .dw = op.dw_up};
}

std::size_t workspace_bytes(const UpWeightBackward& op, int workers) {
  return weight_gradient_bytes(up_weight_gradient(op), workers);
}

void run(const UpWeightBackward& op, const Execution& execution) { weight_gradient(up_weight_gradient(op), execution); }

}  // namespace intarsia::cpu
