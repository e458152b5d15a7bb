// layer_forward on every problem of problem.h, against the dense layer.
#include "cases/problem.h"

namespace intarsia::cases {
namespace {

LayerForward make(Experts& experts, Tensors& t, const Problem& p, DType dtype) {
  const Lists& l = experts.lists();
  LayerForward op{.x = experts.token_rows(),
                  .expert_offsets = l.expert_offsets,
                  .row_token = l.row_token,
                  .row_slot = l.row_slot,
                  .slot_row = l.slot_row,
                  .token_offsets = l.token_offsets,
                  .token_rows = l.token_rows,
                  .scores = experts.scores(),
                  .w_up = experts.w_up(),
                  .w_down = experts.w_down(),
                  .b_up = experts.b_up(),
                  .b_down = experts.b_down(),
                  .activation = p.activation,
                  .score_on = p.score_on};
  if (p.addend) op.addend = t.normal(dtype, {l.tokens, p.hidden}, 1, p.rows_layout);
  if (p.optional_outputs && p.keep_z) op.z = experts.out_rows(experts.gates() * p.width);
  const Shape y_shape{p.form == Form::sorted ? l.capacity : l.tokens, p.hidden};
  op.y = t.out(dtype, y_shape, p.rows_layout == Layout::padded ? Layout::padded : Layout::dense);
  return op;
}

}  // namespace

template <>
std::vector<Case<LayerForward>> cases() {
  return expert_cases<LayerForward>(problems(), {.up = 1, .down = 1}, make, true);
}

template <>
std::vector<Case<LayerForward>> benchmarks() {
  return expert_benchmarks<LayerForward>({.up = 1, .down = 1}, make, true);
}

}  // namespace intarsia::cases
