// load_balance_loss: c * sum_e f_e P_e over the valid tokens, f_e = slots that chose e / valid tokens, P_e = mean probability
// (softmax, or sigmoid over its sum for the sigmoid families); c = E (Hugging Face) or E / K (Megatron). f (E), logits (T, E).
// load_balance_loss_backward: dlogits, with f constant: dP_e = dloss * c * f_e / valid tokens. Other tokens get zeros.
// Sums over tokens: in double, blocks by size, added in order. Workspace: 2E + 1 sums for each of at most 64 blocks.
// Verify: intarsia-ops verify load_balance_loss, intarsia-ops verify load_balance_loss_backward
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

bool by_sigmoid(RouterScores kind) { return kind == RouterScores::sigmoid || kind == RouterScores::sigmoid_group; }

void probabilities(RouterScores kind, const float* logits, std::int64_t experts, float* p) {
  if (by_sigmoid(kind)) sigmoid_share_row(logits, experts, p);
  else softmax_row(logits, experts, p);
}

double coefficient(BalanceNormalisation normalisation, std::int64_t experts, std::int64_t experts_per_token) {
  const auto e = static_cast<double>(experts), k = static_cast<double>(experts_per_token);
  return normalisation == BalanceNormalisation::huggingface ? e : e / k;
}

struct ForwardScratch {
  Partition blocks;
  std::int64_t sums_step;  // one block's sums: slots (E), probability (E), valid tokens
  double* sums;
  WorkerRows<float> row;

  ForwardScratch(Workspace& workspace, const LoadBalanceLoss& op, int workers)
      : blocks(sum_blocks(op.logits.size(0))),
        sums_step(2 * op.logits.size(1) + 1),
        sums(workspace.take<double>(blocks.count * sums_step)),
        row(workspace, workers, op.logits.size(1)) {}
};

/// Adds token t to the sums of its block.
void add_token(const LoadBalanceLoss& op, std::int64_t t, float* row, double* slots, double* probability) {
  const std::int64_t experts = op.logits.size(1);
  for (std::int64_t k = 0; k < op.ids.size(1); ++k) {
    const std::int64_t e =
        op.ids.dtype == DType::int64 ? *at<const std::int64_t>(op.ids, t, k) : *at<const std::int32_t>(op.ids, t, k);
    if (e >= 0 && e < experts) ++slots[e];
  }
  probabilities(op.scores_kind, row, experts, row);
  for (std::int64_t e = 0; e < experts; ++e) probability[e] += row[e];
}

struct BackwardScratch {
  float* weight;  // (E): the gradient of each probability
  WorkerRows<float> logits, p;

  BackwardScratch(Workspace& workspace, const LoadBalanceLossBackward& op, int workers)
      : weight(workspace.take<float>(op.logits.size(1))),
        logits(workspace, workers, op.logits.size(1)),
        p(workspace, workers, op.logits.size(1)) {}
};

void token_backward(const LoadBalanceLossBackward& op, std::int64_t t, const float* weight, float* logits, float* p) {
  const std::int64_t experts = op.logits.size(1);
  probabilities(op.scores_kind, logits, experts, p);
  float mean = 0.0f;
  for (std::int64_t e = 0; e < experts; ++e) mean += weight[e] * p[e];
  for (std::int64_t e = 0; e < experts; ++e) p[e] *= weight[e] - mean;
  if (by_sigmoid(op.scores_kind))
    for (std::int64_t e = 0; e < experts; ++e) p[e] *= sigmoid(-logits[e]);  // d log sigmoid(l) = 1 - sigmoid(l)
  narrow_row(p, op.dlogits, t, 0, experts);
}

}  // namespace

std::size_t workspace_bytes(const LoadBalanceLoss& op, int workers) {
  Workspace workspace;
  const ForwardScratch scratch(workspace, op, workers);
  return workspace.bytes();
}

std::size_t workspace_bytes(const LoadBalanceLossBackward& op, int workers) {
  Workspace workspace;
  const BackwardScratch scratch(workspace, op, workers);
  return workspace.bytes();
}

void run(const LoadBalanceLoss& op, const Execution& execution) {
  Workspace workspace(execution.workspace);
  const ForwardScratch scratch(workspace, op, execution.workers);
  const Partition& blocks = scratch.blocks;
  const std::int64_t experts = op.logits.size(1);
  const TokenMask mask(op.token_mask);

  parallel_for(blocks.count, execution.workers, [&](std::int64_t block, int worker) {
    double* const slots = scratch.sums + block * scratch.sums_step;
    double* const probability = slots + experts;
    double& valid = probability[experts];
    std::fill_n(slots, scratch.sums_step, 0.0);
    float* const row = scratch.row(worker);
    for (std::int64_t t = blocks.first(block); t < blocks.last(block); ++t) {
      if (!mask(t)) continue;
      widen_row(op.logits, t, 0, experts, row);
      if (!routable_row(row, experts)) continue;
      ++valid;
      add_token(op, t, row, slots, probability);
    }
  });

  const auto total = [&](std::int64_t i) {
    double sum = 0;
    for (std::int64_t block = 0; block < blocks.count; ++block) sum += scratch.sums[block * scratch.sums_step + i];
    return sum;
  };
  const double valid = total(2 * experts), share = valid > 0 ? 1 / valid : 0;
  double loss = 0;
  for (std::int64_t e = 0; e < experts; ++e) {
    const double fraction = total(e) * share;
    loss += fraction * total(experts + e) * share;
    op.expert_fraction.as<float>()[e * op.expert_fraction.step(0)] = static_cast<float>(fraction);
  }
  *op.valid_tokens.as<float>() = static_cast<float>(valid);
  *op.loss.as<float>() = static_cast<float>(coefficient(op.normalisation, experts, op.ids.size(1)) * loss);
}

void run(const LoadBalanceLossBackward& op, const Execution& execution) {
  Workspace workspace(execution.workspace);
  const BackwardScratch scratch(workspace, op, execution.workers);
  const std::int64_t experts = op.logits.size(1);
  const double valid = *op.valid_tokens.as<const float>();
  const double factor =
      valid > 0 ? *op.dloss.as<const float>() * coefficient(op.normalisation, experts, op.experts_per_token) / valid : 0;
  for (std::int64_t e = 0; e < experts; ++e)
    scratch.weight[e] = static_cast<float>(factor * op.expert_fraction.as<const float>()[e * op.expert_fraction.step(0)]);

  const TokenMask mask(op.token_mask);
  const Partition blocks = row_blocks(op.logits.size(0), experts);
  parallel_for(blocks.count, execution.workers, [&](std::int64_t block, int worker) {
    float* const logits = scratch.logits(worker);
    float* const p = scratch.p(worker);
    for (std::int64_t t = blocks.first(block); t < blocks.last(block); ++t) {
      widen_row(op.logits, t, 0, experts, logits);
      if (mask(t) && routable_row(logits, experts)) {
        token_backward(op, t, scratch.weight, logits, p);
      } else {
        std::fill_n(p, experts, 0.0f);
        narrow_row(p, op.dlogits, t, 0, experts);
      }
    }
  });
}

}  // namespace intarsia::cpu
