// route: logits (T, E) -> ids, scores (T, K), in descending order of what the family ranks by; ties go to the lowest id.
//   softmax         scores = softmax(logits) of the chosen         softmax_renorm  softmax over the chosen logits
//   sigmoid         sigmoid of the chosen
//   sigmoid_group   ranks by sigmoid(logit) + bias within the best groups; scale * sigmoid (over its sum when `renormalise`)
// route_backward: dscores -> dlogits (T, E), for ids (T, K) or for the CSR lists of round_tokens (always softmax).
// A token that is masked, or not routable (NaN, infinite largest logit), gets ids -1, scores 0 and a zero gradient.
// rounded_logits: those of every token.
// Verify: intarsia-ops verify route, intarsia-ops verify route_backward
#include "reference/expert.h"
#include "reference/reference.h"
#include "reference/routing.h"

namespace intarsia::reference {
namespace {

template <class S>
std::vector<S> rank_row(const Route& op, const std::vector<S>& logits) {
  if (op.scores_kind != RouterScores::sigmoid_group) return logits;
  const auto experts = static_cast<std::int64_t>(logits.size());
  std::vector<S> bias(logits.size(), S(0)), rank(logits.size());
  if (op.expert_bias.defined())
    for (std::int64_t e = 0; e < experts; ++e) bias[static_cast<std::size_t>(e)] = static_cast<S>(load(op.expert_bias, e));
  sigmoid_group_rank_row(logits.data(), bias.data(), experts, op.groups, op.top_groups, rank.data());
  return rank;
}

Vector scores_of(const Route& op, const Vector& logits, const std::vector<std::size_t>& ids) {
  Vector chosen;
  for (const std::size_t id : ids) chosen.push_back(logits[id]);
  switch (op.scores_kind) {
    case RouterScores::softmax_renorm: return softmax(chosen);
    case RouterScores::softmax: {
      const Vector p = softmax(logits);
      for (std::size_t k = 0; k < ids.size(); ++k) chosen[k] = p[ids[k]];
      return chosen;
    }
    case RouterScores::sigmoid_group:
      if (op.renormalise) return scaled(op.scale, sigmoid_share(chosen));
      for (double& value : chosen) value = op.scale * sigmoid(value);
      return chosen;
    case RouterScores::sigmoid:
      for (double& value : chosen) value = sigmoid(value);
      return chosen;
  }
  return chosen;
}

}  // namespace

void run(const Route& op, const Execution&) {
  double nan_tokens = 0;
  fill(op.ids, -1);
  fill(op.scores, 0);
  if (op.raw_scores.defined()) fill(op.raw_scores, 0);
  for (std::int64_t t = 0; t < op.logits.size(0); ++t) {
    const Vector logits = load_row(op.logits, t);
    if (op.rounded_logits.defined()) store_row(op.rounded_logits, logits, t);
    if (masked(op.token_mask, t)) continue;
    if (!routable(logits)) {
      ++nan_tokens;
      continue;
    }
    dispatch_rank(op.logits.dtype, [&](auto s) {
      const std::vector<std::size_t> ids = top_k(rank_row(op, cast<decltype(s)>(logits)), op.ids.size(1));
      store_row(op.ids, Vector(ids.begin(), ids.end()), t);
      store_row(op.scores, scores_of(op, logits, ids), t);
      if (!op.raw_scores.defined()) return;
      for (std::size_t k = 0; k < ids.size(); ++k) store(op.raw_scores, sigmoid(logits[ids[k]]), t, k);
    });
  }
  if (op.nan_tokens.defined()) store(op.nan_tokens, load(op.nan_tokens, 0) + nan_tokens, 0);
}

namespace {

/// A token's chosen expert with its score and gradient; `place` is its k in the (T, K) form.
struct Choice {
  std::int64_t expert, place;
  double score, dscore;
};

std::vector<Choice> choices_of(const RouteBackward& op, std::int64_t t) {
  std::vector<Choice> choices;
  if (op.ids.defined()) {
    for (std::int64_t k = 0; k < op.ids.size(1); ++k) {
      const std::int64_t e = load_integer(op.ids, t, k);
      if (e >= 0 && e < op.dlogits.size(1)) choices.push_back({e, k, load(op.scores, t, k), load(op.dscores, t, k)});
    }
    return choices;
  }
  for (std::int64_t i = load_integer(op.token_offsets, t); i < load_integer(op.token_offsets, t + 1); ++i) {
    const std::int64_t r = load_integer(op.token_rows, i);
    std::int64_t e = 0;
    while (load_integer(op.expert_offsets, e + 1) <= r) ++e;
    choices.push_back({e, 0, load(op.scores, r), load(op.dscores, r)});
  }
  return choices;
}

/// Dense over E: dlogits = p (g - <g, p>), with g the gradient of each expert's probability.
Vector softmax_backward(const RouteBackward& op, std::int64_t t, const std::vector<Choice>& choices) {
  const Vector p = softmax(load_row(op.logits, t));
  Vector g(p.size(), 0.0), dlogits(p.size());
  for (const Choice& c : choices) g[static_cast<std::size_t>(c.expert)] += c.dscore;
  const double mean = dot(g, p);
  for (std::size_t e = 0; e < p.size(); ++e) dlogits[e] = p[e] * (g[e] - mean);
  return dlogits;
}

/// The gradient of one chosen logit. `mean` is sum of dscore * score.
double chosen_gradient(const RouteBackward& op, const Choice& c, double mean, std::int64_t t) {
  if (op.scores_kind == RouterScores::softmax_renorm) return c.score * (c.dscore - mean);
  if (op.scores_kind == RouterScores::sigmoid) return c.dscore * c.score * (1 - c.score);
  const double raw = load(op.raw_scores, t, c.place);
  if (!op.renormalise) return op.scale * c.dscore * raw * (1 - raw);
  return op.scale == 0 ? 0 : c.score * (c.dscore - mean / op.scale) * (1 - raw);  // score = scale * raw / sum of raw
}

}  // namespace

void run(const RouteBackward& op, const Execution&) {
  fill(op.dlogits, 0);
  for (std::int64_t t = 0; t < op.dlogits.size(0); ++t) {
    const std::vector<Choice> choices = choices_of(op, t);
    if (choices.empty()) continue;
    if (op.scores_kind == RouterScores::softmax || !op.ids.defined()) {
      const bool chosen_from = routable(load_row(op.logits, t));  // else route chooses nothing, whatever the ids say
      if (chosen_from) store_row(op.dlogits, softmax_backward(op, t, choices), t);
      continue;
    }
    double mean = 0;
    for (const Choice& c : choices) mean += c.dscore * c.score;
    Vector dlogits(static_cast<std::size_t>(op.dlogits.size(1)), 0.0);
    for (const Choice& c : choices) dlogits[static_cast<std::size_t>(c.expert)] += chosen_gradient(op, c, mean, t);
    store_row(op.dlogits, dlogits, t);
  }
}

}  // namespace intarsia::reference
