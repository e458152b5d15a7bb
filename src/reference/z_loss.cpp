// z_loss: mean over the valid tokens of logsumexp(logits)^2.   logits (T, E), loss (1), valid_tokens (1).          (ST-MoE)
// z_loss_backward: dlogits = dloss * 2 logsumexp * softmax / valid tokens; zeros for the other tokens.
// Verify: intarsia-ops verify z_loss, intarsia-ops verify z_loss_backward
#include "reference/reference.h"
#include "reference/routing.h"

namespace intarsia::reference {
namespace {

double log_sum_exp(const Vector& logits) {
  return intarsia::log_sum_exp(logits.data(), static_cast<std::int64_t>(logits.size()));
}

}  // namespace

void run(const ZLoss& op, const Execution&) {
  double sum = 0, valid = 0;
  for (std::int64_t t = 0; t < op.logits.size(0); ++t) {
    if (!valid_token(op.logits, op.token_mask, t)) continue;
    const double lse = log_sum_exp(load_row(op.logits, t));
    sum += lse * lse;
    ++valid;
  }
  store(op.loss, valid > 0 ? sum / valid : 0, 0);
  store(op.valid_tokens, valid, 0);
}

void run(const ZLossBackward& op, const Execution&) {
  const double valid = load(op.valid_tokens, 0);
  fill(op.dlogits, 0);
  for (std::int64_t t = 0; t < op.logits.size(0); ++t) {
    if (!valid_token(op.logits, op.token_mask, t)) continue;
    const Vector logits = load_row(op.logits, t);
    Vector dlogits = softmax(logits);
    const double factor = load(op.dloss, 0) * 2 * log_sum_exp(logits) / valid;
    for (double& value : dlogits) value *= factor;
    store_row(op.dlogits, dlogits, t);
  }
}

}  // namespace intarsia::reference
