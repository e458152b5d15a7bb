// What a router ranks by, one row of logits at a time, in S = float, or double for float64 logits. Reference and CPU backend
// call the very same functions, in the same order of additions, so they choose the same experts down to the last bit.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "base/activation.h"

namespace intarsia {

/// False for a token that is routed nowhere: a NaN logit, or a largest logit that is infinite (of either sign).
template <class S>
bool routable(const S* logits, std::int64_t experts) {
  S largest = -std::numeric_limits<S>::infinity();
  for (std::int64_t e = 0; e < experts; ++e) {
    if (std::isnan(logits[e])) return false;
    largest = std::max(largest, logits[e]);
  }
  return std::isfinite(largest);
}

/// probabilities = exp(logits - max) / sum; zeros when every logit is -inf. In place is fine.
template <class S>
void softmax_row(const S* logits, std::int64_t experts, S* probabilities) {
  const S largest = *std::max_element(logits, logits + experts);
  if (largest == -std::numeric_limits<S>::infinity()) {
    std::fill_n(probabilities, experts, S(0));
    return;
  }
  S sum = S(0);
  for (std::int64_t e = 0; e < experts; ++e) sum += probabilities[e] = std::exp(logits[e] - largest);
  for (std::int64_t e = 0; e < experts; ++e) probabilities[e] /= sum;
}

template <class S>
S log_sum_exp(const S* logits, std::int64_t experts) {
  const S largest = *std::max_element(logits, logits + experts);
  S sum = S(0);
  for (std::int64_t e = 0; e < experts; ++e) sum += std::exp(logits[e] - largest);
  return largest + std::log(sum);
}

template <class S>
INTARSIA_HOST_DEVICE S log_sigmoid(S x) {
  using std::exp, std::fabs, std::log1p;
  return (x < S(0) ? x : S(0)) - log1p(exp(-fabs(x)));
}

/// probabilities = sigmoid(logits) / their sum, through the logarithm: logits of -1000 still give a distribution, never 0 / 0.
/// In place is fine.
template <class S>
void sigmoid_share_row(const S* logits, std::int64_t experts, S* probabilities) {
  for (std::int64_t e = 0; e < experts; ++e) probabilities[e] = log_sigmoid(logits[e]);
  softmax_row(probabilities, experts, probabilities);
}

// Of route and round_tokens, checked by the api: scratch and kernels have room for so many.
constexpr std::int64_t kMaxExperts = 4096, kMaxChoices = 64;

/// What sigmoid_group ranks by: sigmoid(logit) + bias, and -inf outside the best `top_groups` of `groups` equal groups.
/// A group is worth the sum of its best two (its only one when it has one); equal groups: the lower one first.
template <class S>
void sigmoid_group_rank_row(const S* logits, const S* bias, std::int64_t experts, std::int64_t groups, std::int64_t top_groups,
                            S* rank) {
  constexpr S kNone = -std::numeric_limits<S>::infinity();
  for (std::int64_t e = 0; e < experts; ++e) rank[e] = sigmoid(logits[e]) + (bias ? bias[e] : S(0));
  if (top_groups >= groups) return;

  const std::int64_t size = experts / groups;
  S worth[kMaxExperts];
  for (std::int64_t g = 0; g < groups; ++g) {
    S best = kNone, second = kNone;
    for (std::int64_t e = g * size; e < (g + 1) * size; ++e) {
      second = std::max(second, std::min(best, rank[e]));
      best = std::max(best, rank[e]);
    }
    worth[g] = size > 1 ? best + second : best;
  }
  for (std::int64_t g = 0; g < groups; ++g) {
    std::int64_t better = 0;
    for (std::int64_t other = 0; other < groups; ++other)
      better += worth[other] > worth[g] || (worth[other] == worth[g] && other < g);
    if (better >= top_groups) std::fill_n(rank + g * size, size, kNone);
  }
}

}  // namespace intarsia
