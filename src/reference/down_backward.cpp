// down_backward: with da' = dy[row_token] w_down, per row, and a recomputed from z:
//   output, inside  ds = <da', a> + <dy, b_down>   a' = s * a         dz = act'(z) (s * da')
//   input           ds = <g, z>                    a' = act(s * z)    dz = s * g,  with g = act'(s * z) da'
// dy (T, H) or (R, H), z and dz (R, G*I) (may be one buffer), w_down (E, H, I), a' (R, I), ds like scores. (SonicMoE, section
// 3) Verify: intarsia-ops verify down_backward
#include "reference/activate.h"
#include "reference/expert.h"
#include "reference/reference.h"

namespace intarsia::reference {

void run(const DownBackward& op, const Execution&) {
  if (op.dscores.defined()) fill(op.dscores, 0);
  const auto width = static_cast<std::size_t>(op.z.size(1) / gate_factor(op.activation));
  for (std::int64_t e = 0; e < expert_count(op.expert_offsets); ++e) {
    const Matrix w_down = load_weight(op.w_down, e);
    const Vector b_down = load_bias(op.b_down, 0, e, op.dy.size(1));
    for_each_row(op.expert_offsets, e, [&](std::int64_t r) {
      const Vector dy = load_row(op.dy, source_row(op.row_token, r));
      const Vector z = load_row(op.z, r);
      const Vector da = transposed_times(w_down, dy, width);
      const double s = load_score(op.scores, op.row_slot, r);

      Vector dz, a_scaled;
      double ds;
      if (op.score_on == ScorePlacement::input) {
        const Vector g = activate_backward(op.activation, scaled(s, z), da);
        ds = dot(g, z);
        a_scaled = activate(op.activation, scaled(s, z));
        dz = scaled(s, g);
      } else {
        const Vector a = activate(op.activation, z);
        ds = dot(da, a) + dot(dy, b_down);
        a_scaled = scaled(s, a);
        dz = activate_backward(op.activation, z, scaled(s, da));
      }
      store_row(op.dz, dz, r);
      if (op.a_scaled.defined()) store_row(op.a_scaled, a_scaled, r);
      if (op.dscores.defined()) store_score(op.dscores, op.row_slot, r, ds);
    });
  }
}

}  // namespace intarsia::reference
