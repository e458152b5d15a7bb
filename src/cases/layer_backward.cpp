// layer_backward on every problem of problem.h, against the dense layer, and each gradient alone.
#include "cases/problem.h"

namespace intarsia::cases {
namespace {

LayerBackward make(Experts& experts, Tensors& t, const Problem& p, DType dtype) {
  const Lists& l = experts.lists();
  LayerBackward op{.dy = experts.token_rows(),
                   .x = experts.token_rows(),
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
                   .score_on = p.score_on,
                   .overwrite_z = p.in_place,
                   .accumulate = p.accumulate,
                   .grad_scale = p.grad_scale};
  if (p.keep_z) op.z = experts.expert_rows(experts.gates() * p.width);
  if (p.addend) op.addend = t.normal(dtype, {l.tokens, p.hidden}, 1, p.rows_layout);
  const Shape dx_shape{p.form == Form::sorted ? l.capacity : l.tokens, p.hidden};
  op.dx = t.out(dtype, dx_shape, p.rows_layout == Layout::padded ? Layout::padded : Layout::dense);
  if (!p.optional_outputs) return op;
  op.dscores = experts.like_scores();
  op.dw_up = experts.dw_up();
  op.dw_down = experts.dw_down();
  if (!p.biases) return op;
  op.db_up = experts.db_up();
  op.db_down = experts.db_down();
  return op;
}

/// Each gradient alone: no other output may be needed for it.
template <class Keep>
std::vector<Case<LayerBackward>> one_gradient(const std::string& name, Keep keep) {
  const std::vector<Problem> table{{.name = "only_" + name, .biases = true},
                                   {.name = "only_" + name + "_recompute", .biases = true, .keep_z = false}};
  return expert_cases<LayerBackward>(
      table, {.up = 2, .down = 2},
      [=](Experts& experts, Tensors& t, const Problem& p, DType dtype) {
        const LayerBackward all = make(experts, t, p, dtype);
        LayerBackward op = all;
        op.dx = op.dscores = op.db_up = op.db_down = {};
        op.dw_up = op.dw_down = {};
        keep(op, all);
        return op;
      },
      true);
}

}  // namespace

template <>
std::vector<Case<LayerBackward>> cases() {
  auto result = expert_cases<LayerBackward>(problems(), {.up = 2, .down = 2}, make, true);
  const auto append = [&](std::vector<Case<LayerBackward>> more) {
    std::move(more.begin(), more.end(), std::back_inserter(result));
  };
  append(one_gradient("dx", [](LayerBackward& op, const LayerBackward& all) { op.dx = all.dx; }));
  append(one_gradient("dscores", [](LayerBackward& op, const LayerBackward& all) { op.dscores = all.dscores; }));
  append(one_gradient("dw_up", [](LayerBackward& op, const LayerBackward& all) { op.dw_up = all.dw_up; }));
  append(one_gradient("dw_down", [](LayerBackward& op, const LayerBackward& all) { op.dw_down = all.dw_down; }));
  append(one_gradient("db_up", [](LayerBackward& op, const LayerBackward& all) { op.db_up = all.db_up; }));
  append(one_gradient("db_down", [](LayerBackward& op, const LayerBackward& all) { op.db_down = all.db_down; }));
  return result;
}

template <>
std::vector<Case<LayerBackward>> benchmarks() {
  return expert_benchmarks<LayerBackward>({.up = 2, .down = 2}, make, true);
}

}  // namespace intarsia::cases
