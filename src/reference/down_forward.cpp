// down_forward: rows = a w_down^T + b_down; with scores
//   output  s * (a w_down^T + b_down)      inside  a w_down^T + s * b_down (a holds s already)      input  as without.
// a (R, I), w_down (E, H, I), rows (R, H). With a weight alone it is a bare grouped GEMM.
// Verify: intarsia-ops verify down_forward
#include "reference/expert.h"
#include "reference/reference.h"

namespace intarsia::reference {

void run(const DownForward& op, const Execution&) {
  for (std::int64_t e = 0; e < expert_count(op.expert_offsets); ++e) {
    const Matrix w_down = load_weight(op.w_down, e);
    const Vector b_down = load_bias(op.b_down, 0, e, out_columns(op.w_down));
    for_each_row(op.expert_offsets, e, [&](std::int64_t r) {
      const double s = load_score(op.scores, op.row_slot, r);
      const double product_factor = op.score_on == ScorePlacement::output ? s : 1;
      const double bias_factor = op.score_on == ScorePlacement::input ? 1 : s;
      Vector row = scaled(product_factor, times(w_down, load_row(op.a, r)));
      add(row, bias_factor, b_down);
      store_row(op.rows, row, r);
    });
  }
}

}  // namespace intarsia::reference
