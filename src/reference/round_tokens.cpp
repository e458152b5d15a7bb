// round_tokens: each token's top-k by softmax, then every expert's count f is rounded to a multiple of `tile`: down drops its
// rows of lowest probability, up adds the tokens of highest probability that did not choose it (ties to the lowest token).
// Counts are capped at the valid tokens, and `balanced` sums the deviations of capped counts. Rows carry their softmax
// probability as it is. expert_offsets (E+1), row_token, row_slot, token_rows, row_score (R), token_offsets (T+1); entries past
// the last row: -1, score 0. Verify: intarsia-ops verify round_tokens (SonicMoE, section 5)
#include <numeric>

#include "base/rounded_count.h"
#include "reference/reference.h"
#include "reference/routing.h"

namespace intarsia::reference {
namespace {

template <class S>
struct Probabilities {
  std::vector<std::vector<S>> p;          // (T, E); empty for a token that is not valid
  std::vector<std::vector<bool>> chosen;  // (T, E): among the token's top-k
  std::vector<std::size_t> valid;         // tokens, ascending

  explicit Probabilities(const RoundTokens& op) {
    const auto tokens = static_cast<std::size_t>(op.logits.size(0)), experts = static_cast<std::size_t>(op.logits.size(1));
    p.resize(tokens);
    chosen.resize(tokens);
    for (std::size_t t = 0; t < tokens; ++t) {
      if (!valid_token(op.logits, op.token_mask, static_cast<std::int64_t>(t))) continue;
      valid.push_back(t);
      p[t] = cast<S>(load_row(op.logits, static_cast<std::int64_t>(t)));
      chosen[t].assign(experts, false);
      for (const std::size_t e : top_k(p[t], op.experts_per_token)) chosen[t][e] = true;
      softmax_row(p[t].data(), op.logits.size(1), p[t].data());
    }
  }
};

/// The tokens of expert e in ascending order.
template <class S>
std::vector<std::size_t> tokens_of(const RoundTokens& op, const Probabilities<S>& probabilities, std::size_t e,
                                   std::int64_t& deviation) {
  std::vector<std::size_t> order = probabilities.valid;
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    const bool a_chosen = probabilities.chosen[a][e], b_chosen = probabilities.chosen[b][e];
    return a_chosen != b_chosen ? a_chosen : probabilities.p[a][e] > probabilities.p[b][e];
  });
  const auto count = std::count_if(order.begin(), order.end(), [&](std::size_t t) { return probabilities.chosen[t][e]; });
  const auto valid = static_cast<std::int64_t>(order.size());
  order.resize(static_cast<std::size_t>(rounded_count(op, static_cast<std::int64_t>(e), count, valid, deviation)));
  std::sort(order.begin(), order.end());
  return order;
}

template <class S>
void round_tokens(const RoundTokens& op) {
  const Probabilities<S> probabilities(op);
  std::vector<std::vector<std::int64_t>> rows_of(probabilities.p.size());  // of each token, ascending
  fill(op.row_token, -1);
  fill(op.row_slot, -1);
  fill(op.token_rows, -1);
  fill(op.row_score, 0);

  std::int64_t row = 0, deviation = 0;
  store(op.expert_offsets, 0, 0);
  for (std::size_t e = 0; e < static_cast<std::size_t>(op.logits.size(1)); ++e) {
    for (const std::size_t t : tokens_of(op, probabilities, e, deviation)) {
      store(op.row_token, static_cast<double>(t), row);
      store(op.row_score, probabilities.p[t][e], row);
      rows_of[t].push_back(row++);
    }
    store(op.expert_offsets, static_cast<double>(row), e + 1);
  }

  std::int64_t position = 0;
  for (std::size_t t = 0; t < rows_of.size(); ++t) {
    store(op.token_offsets, static_cast<double>(position), t);
    for (const std::int64_t r : rows_of[t]) {
      store(op.token_rows, static_cast<double>(r), position);
      store(op.row_slot, static_cast<double>(position++), r);
    }
  }
  store(op.token_offsets, static_cast<double>(position), rows_of.size());
}

}  // namespace

void run(const RoundTokens& op, const Execution&) {
  dispatch_rank(op.logits.dtype, [&](auto s) { round_tokens<decltype(s)>(op); });
}

}  // namespace intarsia::reference
