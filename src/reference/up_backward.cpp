// up_backward: dx_rows = dz w_up.  dz (R, G*I) [gate, up], w_up (E, G*I, H), dx_rows (R, H).
// Verify: intarsia-ops verify up_backward
#include "reference/expert.h"
#include "reference/reference.h"

namespace intarsia::reference {

void run(const UpBackward& op, const Execution&) {
  const auto hidden = static_cast<std::size_t>(op.dx_rows.size(1));
  for (std::int64_t e = 0; e < expert_count(op.expert_offsets); ++e) {
    const Matrix w_up = load_weight(op.w_up, e);
    for_each_row(op.expert_offsets, e,
                 [&](std::int64_t r) { store_row(op.dx_rows, transposed_times(w_up, load_row(op.dz, r), hidden), r); });
  }
}

}  // namespace intarsia::reference
