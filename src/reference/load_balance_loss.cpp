// load_balance_loss: c * sum_e f_e P_e over the valid tokens, f_e = slots that chose e / valid tokens, P_e = mean probability
// (softmax, or sigmoid over its sum for the sigmoid families); c = E (Hugging Face) or E / K (Megatron). f (E), logits (T, E).
// load_balance_loss_backward: dlogits, with f constant: dP_e = dloss * c * f_e / valid tokens.
// Verify: intarsia-ops verify load_balance_loss, intarsia-ops verify load_balance_loss_backward
#include "reference/reference.h"
#include "reference/routing.h"

namespace intarsia::reference {
namespace {

Vector probabilities(RouterScores kind, const Vector& logits) {
  return by_sigmoid(kind) ? sigmoid_share(logits) : softmax(logits);
}

double coefficient(BalanceNormalisation normalisation, std::int64_t experts, std::int64_t experts_per_token) {
  const auto e = static_cast<double>(experts), k = static_cast<double>(experts_per_token);
  return normalisation == BalanceNormalisation::huggingface ? e : e / k;
}

}  // namespace

void run(const LoadBalanceLoss& op, const Execution&) {
  const std::int64_t experts = op.logits.size(1), k_count = op.ids.size(1);
  Vector slots(static_cast<std::size_t>(experts), 0.0), probability(slots);
  double valid = 0;
  for (std::int64_t t = 0; t < op.logits.size(0); ++t) {
    if (!valid_token(op.logits, op.token_mask, t)) continue;
    ++valid;
    for (std::int64_t k = 0; k < k_count; ++k) {
      const std::int64_t e = load_integer(op.ids, t, k);
      if (e >= 0 && e < experts) ++slots[static_cast<std::size_t>(e)];
    }
    const Vector p = probabilities(op.scores_kind, load_row(op.logits, t));
    for (std::size_t e = 0; e < p.size(); ++e) probability[e] += p[e];
  }
  const double share = valid > 0 ? 1 / valid : 0;
  for (std::int64_t e = 0; e < experts; ++e) store(op.expert_fraction, slots[static_cast<std::size_t>(e)] * share, e);
  store(op.valid_tokens, valid, 0);
  store(op.loss, coefficient(op.normalisation, experts, k_count) * dot(slots, probability) * share * share, 0);
}

void run(const LoadBalanceLossBackward& op, const Execution&) {
  const std::int64_t experts = op.logits.size(1);
  const double valid = load(op.valid_tokens, 0);
  const double c = coefficient(op.normalisation, experts, op.experts_per_token);
  fill(op.dlogits, 0);
  for (std::int64_t t = 0; t < op.logits.size(0); ++t) {
    if (!valid_token(op.logits, op.token_mask, t)) continue;
    const Vector logits = load_row(op.logits, t);
    const Vector p = probabilities(op.scores_kind, logits);
    Vector dp(p.size()), dlogits(p.size());
    for (std::size_t e = 0; e < p.size(); ++e) dp[e] = load(op.dloss, 0) * c * load(op.expert_fraction, e) / valid;
    const double mean = dot(dp, p);
    for (std::size_t e = 0; e < p.size(); ++e) {
      dlogits[e] = p[e] * (dp[e] - mean);
      if (by_sigmoid(op.scores_kind)) dlogits[e] *= sigmoid(-logits[e]);  // d log sigmoid(l) = 1 - sigmoid(l)
    }
    store_row(op.dlogits, dlogits, t);
  }
}

}  // namespace intarsia::reference
