// route_backward: dscores -> dlogits (T, E), for ids (T, K) or for the CSR lists of round_tokens (always softmax).
//   softmax         dlogits = p (g - <g, p>), dense over E; g = dscores at the chosen experts
//   softmax_renorm  s (g - <g, s>)            sigmoid  g s (1 - s)            both at the chosen experts only
//   sigmoid_group   s (g - <g, s> / scale) (1 - raw), or scale g raw (1 - raw) without renormalisation
// Tokens without a choice get zeros. Parallel over tokens. Workspace: two rows of E for each worker.
// Verify: intarsia-ops verify route_backward
#include <algorithm>

#include "base/parallel.h"
#include "base/rows.h"
#include "base/softmax.h"
#include "cpu/cpu.h"
#include "cpu/partition.h"
#include "cpu/row_io.h"
#include "cpu/workspace.h"

namespace intarsia::cpu {
namespace {

struct Scratch {
  WorkerRows<float> probabilities, gradient;

  Scratch(Workspace& workspace, const RouteBackward& op, int workers)
      : probabilities(workspace, workers, op.dlogits.size(1)), gradient(workspace, workers, op.dlogits.size(1)) {}
};

/// A token's chosen expert with its score and gradient; `place` is its k in the (T, K) form.
struct Choice {
  std::int64_t expert, place;
  float score, dscore;
};

/// body(choice) for each chosen expert of token t, in order.
template <class Body>
void for_each_choice(const RouteBackward& op, std::int64_t t, Body&& body) {
  const std::int64_t experts = op.dlogits.size(1);
  if (op.ids.defined()) {
    for (std::int64_t k = 0; k < op.ids.size(1); ++k) {
      const std::int64_t e =
          op.ids.dtype == DType::int64 ? *at<const std::int64_t>(op.ids, t, k) : *at<const std::int32_t>(op.ids, t, k);
      if (e >= 0 && e < experts) body(Choice{e, k, *at<const float>(op.scores, t, k), *at<const float>(op.dscores, t, k)});
    }
    return;
  }
  const std::int32_t* offsets = list(op.expert_offsets);
  for (std::int32_t i = list(op.token_offsets)[t]; i < list(op.token_offsets)[t + 1]; ++i) {
    const std::int32_t row = list(op.token_rows)[i];
    const std::int64_t e = std::upper_bound(offsets, offsets + experts + 1, row) - offsets - 1;
    body(Choice{e, 0, op.scores.as<const float>()[row * op.scores.step(0)],
                op.dscores.as<const float>()[row * op.dscores.step(0)]});
  }
}

/// gradient holds g on entry and dlogits on return.
void softmax_backward(const RouteBackward& op, std::int64_t t, float* probabilities, float* gradient) {
  const std::int64_t experts = op.dlogits.size(1);
  widen_row(op.logits, t, 0, experts, probabilities);
  if (!routable(probabilities, experts)) {  // route chooses nothing there, whatever the ids say
    std::fill_n(gradient, experts, 0.0f);
    return;
  }
  softmax_row(probabilities, experts, probabilities);
  float mean = 0.0f;
  for (std::int64_t e = 0; e < experts; ++e) mean += gradient[e] * probabilities[e];
  for (std::int64_t e = 0; e < experts; ++e) gradient[e] = probabilities[e] * (gradient[e] - mean);
}

/// What the score is a multiple of: sigmoid_group's scores sum to its scale, all others to 1.
float share(const RouteBackward& op, const Choice& c) {
  if (op.scores_kind != RouterScores::sigmoid_group) return c.score;
  return op.scale == 0 ? 0.0f : c.score / static_cast<float>(op.scale);
}

/// The gradient of one chosen logit. `mean` is the sum of dscore * share.
float chosen_gradient(const RouteBackward& op, const Choice& c, float mean, std::int64_t t) {
  if (op.scores_kind == RouterScores::softmax_renorm) return c.score * (c.dscore - mean);
  if (op.scores_kind == RouterScores::sigmoid) return c.dscore * c.score * (1.0f - c.score);
  const float raw = *at<const float>(op.raw_scores, t, c.place);
  if (!op.renormalise) return static_cast<float>(op.scale) * c.dscore * raw * (1.0f - raw);
  return c.score * (c.dscore - mean) * (1.0f - raw);  // score = scale * raw / sum of raw
}

void token_backward(const RouteBackward& op, std::int64_t t, float* probabilities, float* gradient) {
  const std::int64_t experts = op.dlogits.size(1);
  const bool dense = op.scores_kind == RouterScores::softmax || !op.ids.defined();
  bool chosen = false;
  float mean = 0.0f;
  std::fill_n(gradient, experts, 0.0f);
  for_each_choice(op, t, [&](const Choice& c) {
    chosen = true;
    mean += c.dscore * share(op, c);
    if (dense) gradient[c.expert] += c.dscore;
  });
  if (dense && chosen) softmax_backward(op, t, probabilities, gradient);
  if (!dense) for_each_choice(op, t, [&](const Choice& c) { gradient[c.expert] += chosen_gradient(op, c, mean, t); });
  narrow_row(gradient, op.dlogits, t, 0, experts);
}

}  // namespace

std::size_t workspace_bytes(const RouteBackward& op, int workers) {
  Workspace workspace;
  const Scratch scratch(workspace, op, workers);
  return workspace.bytes();
}

void run(const RouteBackward& op, const Execution& execution) {
  Workspace workspace(execution.workspace);
  const Scratch scratch(workspace, op, execution.workers);
  const Partition blocks = row_blocks(op.dlogits.size(0), op.dlogits.size(1));
  parallel_for(blocks.count, execution.workers, [&](std::int64_t block, int worker) {
    for (std::int64_t t = blocks.first(block); t < blocks.last(block); ++t)
      token_backward(op, t, scratch.probabilities(worker), scratch.gradient(worker));
  });
}

}  // namespace intarsia::cpu
