// route: logits (T, E) -> ids, scores (T, K), in descending order of what the family ranks by; ties go to the lowest id.
//   softmax         scores = softmax(logits) of the chosen         softmax_renorm  softmax over the chosen logits
//   sigmoid         sigmoid of the chosen
//   sigmoid_group   ranks by sigmoid(logit) + bias within the best groups; scale * sigmoid (over its sum when `renormalise`)
// A token that is masked, or not routable (NaN, infinite largest logit), gets ids -1 and scores 0; the latter is counted.
// Reads T*E logits once and rounds them on the way where asked; parallel over tokens. Workspace: rows of E and K for each
// worker, one row of E.
// Verify: intarsia-ops verify route
#include <atomic>
#include <cmath>

#include "base/dispatch.h"
#include "base/parallel.h"
#include "base/rows.h"
#include "base/softmax.h"
#include "cpu/cpu.h"
#include "cpu/partition.h"
#include "cpu/row_io.h"
#include "cpu/row_scan.h"
#include "cpu/token_mask.h"
#include "cpu/workspace.h"

namespace intarsia::cpu {
namespace {

struct Scratch {
  float* bias;
  WorkerRows<float> logits, rank, scores;
  WorkerRows<std::int32_t> chosen;
  WorkerRows<std::uint64_t> keys;

  Scratch(Workspace& workspace, const Route& op, int workers)
      : bias(workspace.take<float>(op.expert_bias.defined() ? op.logits.size(1) : 0)),
        logits(workspace, workers, op.logits.size(1)),
        rank(workspace, workers, op.scores_kind == RouterScores::sigmoid_group ? op.logits.size(1) : 0),
        scores(workspace, workers, op.ids.size(1)),
        chosen(workspace, workers, op.ids.size(1)),
        keys(workspace, workers, top_k_scratch(op.logits.size(1))) {}
};

/// scores[k] from the logits of the token and its chosen experts.
void score_chosen(const Route& op, float* logits, const std::int32_t* chosen, std::int64_t k_count, float* scores) {
  const auto scale = static_cast<float>(op.scale);
  for (std::int64_t k = 0; k < k_count; ++k) scores[k] = logits[chosen[k]];
  switch (op.scores_kind) {
    case RouterScores::softmax_renorm: return softmax_row(scores, k_count, scores);
    case RouterScores::softmax:
      softmax_row(logits, op.logits.size(1), logits);
      for (std::int64_t k = 0; k < k_count; ++k) scores[k] = logits[chosen[k]];
      return;
    case RouterScores::sigmoid:
      for (std::int64_t k = 0; k < k_count; ++k) scores[k] = sigmoid(scores[k]);
      return;
    case RouterScores::sigmoid_group:
      if (!op.renormalise) {
        for (std::int64_t k = 0; k < k_count; ++k) scores[k] = scale * sigmoid(scores[k]);
      } else if (std::isinf(*std::max_element(scores, scores + k_count))) {
        std::fill_n(scores, k_count, 0.0f);  // the bias chose experts whose sigmoid is exactly zero: nothing to share out
      } else {
        sigmoid_share_row(scores, k_count, scores);
        for (std::int64_t k = 0; k < k_count; ++k) scores[k] *= scale;
      }
  }
}

template <class Id>
class Router {
 public:
  Router(const Route& op, const Scratch& scratch) : op_(op), scratch_(scratch), mask_(op.token_mask) {}

  void route_token(std::int64_t t, int worker, std::int32_t& nan_tokens) const {
    const std::int64_t experts = op_.logits.size(1), k_count = op_.ids.size(1);
    float* const logits = scratch_.logits(worker);
    widen_row(op_.logits, t, 0, experts, logits);
    if (op_.rounded_logits.defined()) narrow_row(logits, op_.rounded_logits, t, 0, experts);
    if (!mask_(t)) return store_none(t);
    if (!routable_row(logits, experts)) {
      ++nan_tokens;
      return store_none(t);
    }
    float* const scores = scratch_.scores(worker);
    std::int32_t* const chosen = scratch_.chosen(worker);
    top_k(rank(logits, worker), experts, k_count, scratch_.keys(worker), chosen);
    if (op_.raw_scores.defined())
      for (std::int64_t k = 0; k < k_count; ++k) *at<float>(op_.raw_scores, t, k) = sigmoid(logits[chosen[k]]);
    score_chosen(op_, logits, chosen, k_count, scores);
    for (std::int64_t k = 0; k < k_count; ++k) {
      *at<Id>(op_.ids, t, k) = chosen[k];
      *at<float>(op_.scores, t, k) = scores[k];
    }
  }

 private:
  const float* rank(const float* logits, int worker) const {
    if (op_.scores_kind != RouterScores::sigmoid_group) return logits;
    sigmoid_group_rank_row(logits, op_.expert_bias.defined() ? scratch_.bias : nullptr, op_.logits.size(1), op_.groups,
                           op_.top_groups, scratch_.rank(worker));
    return scratch_.rank(worker);
  }

  void store_none(std::int64_t t) const {
    for (std::int64_t k = 0; k < op_.ids.size(1); ++k) {
      *at<Id>(op_.ids, t, k) = -1;
      *at<float>(op_.scores, t, k) = 0.0f;
      if (op_.raw_scores.defined()) *at<float>(op_.raw_scores, t, k) = 0.0f;
    }
  }

  const Route& op_;
  const Scratch& scratch_;
  TokenMask mask_;
};

}  // namespace

std::size_t workspace_bytes(const Route& op, int workers) {
  Workspace workspace;
  const Scratch scratch(workspace, op, workers);
  return workspace.bytes();
}

void run(const Route& op, const Execution& execution) {
  Workspace workspace(execution.workspace);
  const Scratch scratch(workspace, op, execution.workers);
  if (op.expert_bias.defined())
    widen(op.expert_bias.as<const float>(), op.expert_bias.step(0), op.logits.size(1), scratch.bias);

  std::atomic<std::int32_t> nan_tokens = 0;  // a sum of integers: the same in any order
  const Partition blocks = row_blocks(op.logits.size(0), op.logits.size(1));
  dispatch_index(op.ids.dtype, [&](auto tag) {
    const Router<typename decltype(tag)::type> router(op, scratch);
    parallel_for(blocks.count, execution.workers, [&](std::int64_t block, int worker) {
      std::int32_t found = 0;
      for (std::int64_t t = blocks.first(block); t < blocks.last(block); ++t) router.route_token(t, worker, found);
      nan_tokens += found;
    });
  });
  if (op.nan_tokens.defined()) *op.nan_tokens.as<std::int32_t>() += nan_tokens;
}

}  // namespace intarsia::cpu
