// up_forward: z = x[row_token] w_up^T + b_up;  a = act(z), s * act(z) (inside) or act(s * z) (input).
// x (T, H) or (R, H), w_up (E, G*I, H), z (R, G*I) [gate, up], a (R, I).
// Verify: intarsia-ops verify up_forward
#include "reference/activate.h"
#include "reference/expert.h"
#include "reference/reference.h"

namespace intarsia::reference {

void run(const UpForward& op, const Execution&) {
  for (std::int64_t e = 0; e < expert_count(op.expert_offsets); ++e) {
    const Matrix w_up = load_weight(op.w_up, e);
    const Vector b_up = load_bias(op.b_up, op.w_up.gate_block, e, out_columns(op.w_up));
    for_each_row(op.expert_offsets, e, [&](std::int64_t r) {
      Vector z = times(w_up, load_row(op.x, source_row(op.row_token, r)));
      add(z, 1, b_up);
      if (op.z.defined()) store_row(op.z, z, r);

      const double s = op.score_on == ScorePlacement::output ? 1 : load_score(op.scores, op.row_slot, r);
      if (op.score_on == ScorePlacement::input) store_row(op.a, activate(op.activation, scaled(s, z)), r);
      else store_row(op.a, scaled(s, activate(op.activation, z)), r);
    });
  }
}

}  // namespace intarsia::reference
