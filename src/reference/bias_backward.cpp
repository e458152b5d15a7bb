// bias_backward: db_up[e] = grad_scale * sum dz;  db_down[e] = grad_scale * sum s * dy[row_token] (input: sum dy).
// dz (R, G*I) [gate, up], dy (T, H) or (R, H), db_up (E, G*I) in the order of gate_block, db_down (E, H).
// Experts without rows: zeros, or untouched when `accumulate`.
// Verify: intarsia-ops verify bias_backward
#include "reference/expert.h"
#include "reference/reference.h"

namespace intarsia::reference {
namespace {

/// db[e] = sum over rows of row(r)
template <class Row>
void bias_gradient(const BiasBackward& op, const TensorView& db, std::int64_t gate_block, Row row) {
  for (std::int64_t e = 0; e < expert_count(op.expert_offsets); ++e) {
    const bool empty = load_integer(op.expert_offsets, e) == load_integer(op.expert_offsets, e + 1);
    if (empty && op.accumulate) continue;
    Vector sum(static_cast<std::size_t>(db.size(1)), 0.0);
    for_each_row(op.expert_offsets, e, [&](std::int64_t r) { add(sum, op.grad_scale, row(r)); });
    store_bias_gradient(db, gate_block, e, sum, op.accumulate);
  }
}

}  // namespace

void run(const BiasBackward& op, const Execution&) {
  if (op.db_up.defined()) bias_gradient(op, op.db_up, op.gate_block, [&](std::int64_t r) { return load_row(op.dz, r); });
  if (op.db_down.defined()) {
    bias_gradient(op, op.db_down, 0, [&](std::int64_t r) {
      const double s = op.score_on == ScorePlacement::input ? 1 : load_score(op.scores, op.row_slot, r);
      return scaled(s, load_row(op.dy, source_row(op.row_token, r)));
    });
  }
}

}  // namespace intarsia::reference
