// update_expert_bias: bias[e] += rate * sign(mean(counts) - counts[e]), exactly nothing at balance. counts, bias (E).
// Verify: intarsia-ops verify update_expert_bias                                       (DeepSeek-V3, auxiliary-loss-free
// balancing)
#include "reference/element.h"
#include "reference/reference.h"

namespace intarsia::reference {

void run(const UpdateExpertBias& op, const Execution&) {
  const std::int64_t experts = op.counts.size(0);
  double total = 0;
  for (std::int64_t e = 0; e < experts; ++e) total += load(op.counts, e);
  for (std::int64_t e = 0; e < experts; ++e) {
    const double share =
        load(op.counts, e) * static_cast<double>(experts);  // compared with the total: no division, no rounding
    const double sign = share < total ? 1 : share > total ? -1 : 0;
    store(op.bias, load(op.bias, e) + op.rate * sign, e);
  }
}

}  // namespace intarsia::reference
