// combine: y[t] = addend[t] + sum over the rows r of token t of s * rows[r], in slot order, rounded once.
// rows (R, H), y (T, H); the rows of a token come from slot_row (T, K) with scores (T, K), or from the CSR pair with scores
// (R). Verify: intarsia-ops verify combine
#include "reference/expert.h"
#include "reference/reference.h"

namespace intarsia::reference {

void run(const Combine& op, const Execution&) {
  for (std::int64_t t = 0; t < op.y.size(0); ++t) {
    Vector y = op.addend.defined() ? load_row(op.addend, t) : Vector(static_cast<std::size_t>(op.y.size(1)), 0.0);
    if (op.slot_row.defined()) {
      for (std::int64_t k = 0; k < op.slot_row.size(1); ++k) {
        const std::int64_t r = load_integer(op.slot_row, t, k);
        if (r >= 0) add(y, op.scores.defined() ? load(op.scores, t, k) : 1, load_row(op.rows, r));
      }
    } else {
      for (std::int64_t i = load_integer(op.token_offsets, t); i < load_integer(op.token_offsets, t + 1); ++i) {
        const std::int64_t r = load_integer(op.token_rows, i);
        add(y, op.scores.defined() ? load(op.scores, r) : 1, load_row(op.rows, r));
      }
    }
    store_row(op.y, y, t);
  }
}

}  // namespace intarsia::reference
