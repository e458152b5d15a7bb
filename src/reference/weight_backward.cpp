// down_weight_backward: dw_down[e] = grad_scale * dy[row_token]^T a'      dw_down (E, H, I)
// up_weight_backward:   dw_up[e]   = grad_scale * dz^T x[row_token]       dw_up (E, G*I, H), in the caller's layout
// Experts without rows: zeros, or untouched when `accumulate`, which adds to what is there and rounds once.
// Verify: intarsia-ops verify down_weight_backward, intarsia-ops verify up_weight_backward
#include "reference/expert.h"
#include "reference/reference.h"

namespace intarsia::reference {
namespace {

/// dw[e] = grad_scale * sum over rows of out(r) in(r)^T
template <class Out, class In>
void weight_gradient(const Weights& dw, const TensorView& expert_offsets, bool accumulate, double grad_scale, Out out, In in) {
  const std::int64_t columns = dw.weight.size(dw.transposed ? 1 : 2);
  for (std::int64_t e = 0; e < expert_count(expert_offsets); ++e) {
    const bool empty = load_integer(expert_offsets, e) == load_integer(expert_offsets, e + 1);
    if (empty && accumulate) continue;
    Matrix gradient(static_cast<std::size_t>(out_columns(dw)), Vector(static_cast<std::size_t>(columns), 0.0));
    for_each_row(expert_offsets, e, [&](std::int64_t r) { add_outer(gradient, grad_scale, out(r), in(r)); });
    store_weight_gradient(dw, e, gradient, accumulate);
  }
}

}  // namespace

void run(const DownWeightBackward& op, const Execution&) {
  weight_gradient(
      op.dw_down, op.expert_offsets, op.accumulate, op.grad_scale,
      [&](std::int64_t r) { return load_row(op.dy, source_row(op.row_token, r)); },
      [&](std::int64_t r) { return load_row(op.a_scaled, r); });
}

void run(const UpWeightBackward& op, const Execution&) {
  weight_gradient(
      op.dw_up, op.expert_offsets, op.accumulate, op.grad_scale, [&](std::int64_t r) { return load_row(op.dz, r); },
      [&](std::int64_t r) { return load_row(op.x, source_row(op.row_token, r)); });
}

}  // namespace intarsia::reference
