// Rows of logits, and choosing from them. Ranks are formed in Rank<logits> (float, or double for float64 logits), because which
// experts are chosen depends on their last bit; everything that is only a number is computed from Vectors of doubles.
#pragma once

#include "base/softmax.h"
#include "reference/element.h"

namespace intarsia::reference {

/// body(S{}) with the type that ranks of these logits are formed in.
template <class Body>
void dispatch_rank(DType logits, Body&& body) {
  if (logits == DType::float64) body(double{});
  else body(float{});
}

template <class S>
std::vector<S> cast(const Vector& values) {
  return std::vector<S>(values.begin(), values.end());
}

inline bool masked(const TensorView& token_mask, std::int64_t t) { return token_mask.defined() && load(token_mask, t) == 0; }

inline bool routable(const Vector& logits) {
  return intarsia::routable(logits.data(), static_cast<std::int64_t>(logits.size()));
}

/// A token counts when it is not masked and its logits can be routed.
inline bool valid_token(const TensorView& logits, const TensorView& token_mask, std::int64_t t) {
  return !masked(token_mask, t) && routable(load_row(logits, t));
}

inline Vector softmax(Vector logits) {
  softmax_row(logits.data(), static_cast<std::int64_t>(logits.size()), logits.data());
  return logits;
}

/// sigmoid over the sum of sigmoids
inline Vector sigmoid_share(Vector logits) {
  sigmoid_share_row(logits.data(), static_cast<std::int64_t>(logits.size()), logits.data());
  return logits;
}

inline bool by_sigmoid(RouterScores kind) { return kind == RouterScores::sigmoid || kind == RouterScores::sigmoid_group; }

/// Indices of the k largest, in descending order, equal ones by ascending index.
template <class S>
std::vector<std::size_t> top_k(const std::vector<S>& rank, std::int64_t k) {
  std::vector<std::size_t> chosen;
  std::vector<bool> taken(rank.size(), false);
  for (std::int64_t i = 0; i < k; ++i) {
    std::size_t best = rank.size();
    for (std::size_t e = 0; e < rank.size(); ++e)
      if (!taken[e] && (best == rank.size() || rank[e] > rank[best])) best = e;
    taken[best] = true;
    chosen.push_back(best);
  }
  return chosen;
}

}  // namespace intarsia::reference
