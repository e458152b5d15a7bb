// layer_forward and layer_backward from the mathematics, row by row and dense, without the other operations: their oracle.
//   expert_e(x, s) = output: s * (act(z) w_down^T + b_down)    inside: the same    input: act(s * z) w_down^T + b_down,
//   with z = x w_up^T + b_up;    y[t] = addend[t] + sum over the rows of token t, or y[r] for sorted rows.
// Nothing is rounded between x and y: z only where it is stored, so backward sees the rounded one when it is kept.
// Verify: intarsia-ops verify layer_forward, intarsia-ops verify layer_backward
#include "reference/activate.h"
#include "reference/expert.h"
#include "reference/reference.h"

namespace intarsia::reference {
namespace {

/// Everything about one expert that its rows need.
struct Expert {
  Matrix w_up, w_down;  // (G*I, H), (H, I)
  Vector b_up, b_down;

  template <class Op>
  Expert(const Op& op, std::int64_t e)
      : w_up(load_weight(op.w_up, e)),
        w_down(load_weight(op.w_down, e)),
        b_up(load_bias(op.b_up, op.w_up.gate_block, e, out_columns(op.w_up))),
        b_down(load_bias(op.b_down, 0, e, out_columns(op.w_down))) {}

  Vector preactivation(const Vector& x) const {
    Vector z = times(w_up, x);
    add(z, 1, b_up);
    return z;
  }
};

}  // namespace

void run(const LayerForward& op, const Execution&) {
  const std::int64_t out_rows = op.y.size(0);
  Matrix y(static_cast<std::size_t>(out_rows), Vector(static_cast<std::size_t>(op.y.size(1)), 0.0));
  if (op.addend.defined())
    for (std::int64_t t = 0; t < out_rows; ++t) y[static_cast<std::size_t>(t)] = load_row(op.addend, t);

  for (std::int64_t e = 0; e < expert_count(op.expert_offsets); ++e) {
    const Expert expert(op, e);
    for_each_row(op.expert_offsets, e, [&](std::int64_t r) {
      const std::int64_t t = source_row(op.row_token, r);
      const double s = load_score(op.scores, op.row_slot, r);
      const Vector z = expert.preactivation(load_row(op.x, t));
      if (op.z.defined()) store_row(op.z, z, r);

      const bool on_input = op.score_on == ScorePlacement::input;
      Vector row = times(expert.w_down, activate(op.activation, on_input ? scaled(s, z) : z));
      add(row, 1, expert.b_down);
      add(y[static_cast<std::size_t>(t)], on_input ? 1 : s, row);
    });
  }
  for (std::int64_t t = 0; t < out_rows; ++t) store_row(op.y, y[static_cast<std::size_t>(t)], t);
}

namespace {

/// Gradients of one row, from dy of its token: those of z and s, and the operand a' of the down weight.
struct RowGradient {
  Vector dz, a_scaled;
  double ds, s_bias;  // s_bias: the factor of dy in db_down
};

RowGradient row_gradient(const LayerBackward& op, const Expert& expert, const Vector& dy, const Vector& z, double s) {
  const auto width = z.size() / static_cast<std::size_t>(gate_factor(op.activation));
  const Vector da = transposed_times(expert.w_down, dy, width);  // gradient of w_down's operand for s = 1
  if (op.score_on == ScorePlacement::input) {
    const Vector sz = scaled(s, z);
    const Vector dsz = activate_backward(op.activation, sz, da);
    return {scaled(s, dsz), activate(op.activation, sz), dot(dsz, z), 1};
  }
  const Vector a = activate(op.activation, z);
  return {activate_backward(op.activation, z, scaled(s, da)), scaled(s, a), dot(da, a) + dot(dy, expert.b_down), s};
}

Matrix zeros(std::int64_t rows, std::int64_t columns) {
  return Matrix(static_cast<std::size_t>(rows), Vector(static_cast<std::size_t>(columns), 0.0));
}

/// Sums over the rows of one expert, as far as somebody wants them.
struct ExpertGradient {
  Matrix dw_up, dw_down;
  Vector db_up, db_down;

  ExpertGradient(const LayerBackward& op, const Expert& expert)
      : db_up(expert.w_up.size(), 0.0), db_down(expert.w_down.size(), 0.0) {
    if (op.dw_up.defined()) dw_up = Matrix(expert.w_up.size(), Vector(expert.w_down.size(), 0.0));
    if (op.dw_down.defined())
      dw_down = zeros(static_cast<std::int64_t>(expert.w_down.size()),
                      static_cast<std::int64_t>(expert.w_up.size()) / gate_factor(op.activation));
  }

  void add_row(const LayerBackward& op, const RowGradient& row, const Vector& x, const Vector& dy) {
    if (op.dw_up.defined()) add_outer(dw_up, op.grad_scale, row.dz, x);
    if (op.dw_down.defined()) add_outer(dw_down, op.grad_scale, dy, row.a_scaled);
    add(db_up, op.grad_scale, row.dz);
    add(db_down, op.grad_scale * row.s_bias, dy);
  }

  void store(const LayerBackward& op, std::int64_t e) const {
    if (op.dw_up.defined()) store_weight_gradient(op.dw_up, e, dw_up, op.accumulate);
    if (op.dw_down.defined()) store_weight_gradient(op.dw_down, e, dw_down, op.accumulate);
    if (op.db_up.defined()) store_bias_gradient(op.db_up, op.w_up.gate_block, e, db_up, op.accumulate);
    if (op.db_down.defined()) store_bias_gradient(op.db_down, 0, e, db_down, op.accumulate);
  }
};

}  // namespace

void run(const LayerBackward& op, const Execution&) {
  const std::int64_t out_rows = op.x.size(0), hidden = op.x.size(1);
  Matrix dx = zeros(out_rows, hidden);
  if (op.addend.defined())
    for (std::int64_t t = 0; t < out_rows; ++t) dx[static_cast<std::size_t>(t)] = load_row(op.addend, t);
  if (op.dscores.defined()) fill(op.dscores, 0);

  for (std::int64_t e = 0; e < expert_count(op.expert_offsets); ++e) {
    const Expert expert(op, e);
    ExpertGradient gradient(op, expert);
    for_each_row(op.expert_offsets, e, [&](std::int64_t r) {
      const std::int64_t t = source_row(op.row_token, r);
      const Vector x = load_row(op.x, t), dy = load_row(op.dy, t);
      const Vector z = op.z.defined() ? load_row(op.z, r) : expert.preactivation(x);
      const RowGradient row = row_gradient(op, expert, dy, z, load_score(op.scores, op.row_slot, r));

      gradient.add_row(op, row, x, dy);
      add(dx[static_cast<std::size_t>(t)], 1, transposed_times(expert.w_up, row.dz, static_cast<std::size_t>(hidden)));
      if (op.dscores.defined()) store_score(op.dscores, op.row_slot, r, row.ds);
      if (op.overwrite_z && op.z.defined()) store_row(op.z, row.dz, r);
    });
    const bool empty = load_integer(op.expert_offsets, e) == load_integer(op.expert_offsets, e + 1);
    if (!(empty && op.accumulate)) gradient.store(op, e);
  }
  if (op.dx.defined())
    for (std::int64_t t = 0; t < out_rows; ++t) store_row(op.dx, dx[static_cast<std::size_t>(t)], t);
}

}  // namespace intarsia::reference
