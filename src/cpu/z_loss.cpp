// z_loss: mean over the valid tokens of logsumexp(logits)^2.   logits (T, E), loss (1), valid_tokens (1).          (ST-MoE)
// z_loss_backward: dlogits = dloss * 2 logsumexp * softmax / valid tokens; zeros for the other tokens.
// Sums over tokens: in double, blocks by size, added in order. Workspace: 2 sums for each of at most 64 blocks, rows of E.
// Verify: intarsia-ops verify z_loss, intarsia-ops verify z_loss_backward
#include "base/parallel.h"
#include "base/softmax.h"
#include "cpu/cpu.h"
#include "cpu/partition.h"
#include "cpu/row_io.h"
#include "cpu/row_scan.h"
#include "cpu/token_mask.h"
#include "cpu/workspace.h"

namespace intarsia::cpu {
namespace {

struct Sums {
  double squares, valid;
};

struct ForwardScratch {
  Partition blocks;
  Sums* sums;
  WorkerRows<float> logits;

  ForwardScratch(Workspace& workspace, const ZLoss& op, int workers)
      : blocks(sum_blocks(op.logits.size(0))),
        sums(workspace.take<Sums>(blocks.count)),
        logits(workspace, workers, op.logits.size(1)) {}
};

}  // namespace

std::size_t workspace_bytes(const ZLoss& op, int workers) {
  Workspace workspace;
  const ForwardScratch scratch(workspace, op, workers);
  return workspace.bytes();
}

std::size_t workspace_bytes(const ZLossBackward& op, int workers) {
  Workspace workspace;
  const WorkerRows<float> logits(workspace, workers, op.logits.size(1));
  return workspace.bytes();
}

void run(const ZLoss& op, const Execution& execution) {
  Workspace workspace(execution.workspace);
  const ForwardScratch scratch(workspace, op, execution.workers);
  const Partition& blocks = scratch.blocks;
  const std::int64_t experts = op.logits.size(1);
  const TokenMask mask(op.token_mask);
  parallel_for(blocks.count, execution.workers, [&](std::int64_t block, int worker) {
    Sums& sums = scratch.sums[block] = {0, 0};
    float* const logits = scratch.logits(worker);
    for (std::int64_t t = blocks.first(block); t < blocks.last(block); ++t) {
      if (!mask(t)) continue;
      widen_row(op.logits, t, 0, experts, logits);
      if (!routable_row(logits, experts)) continue;
      const double lse = log_sum_exp(logits, experts);
      sums.squares += lse * lse;
      sums.valid += 1;
    }
  });

  Sums total{0, 0};
  for (std::int64_t block = 0; block < blocks.count; ++block) {
    total.squares += scratch.sums[block].squares;
    total.valid += scratch.sums[block].valid;
  }
  *op.loss.as<float>() = static_cast<float>(total.valid > 0 ? total.squares / total.valid : 0);
  *op.valid_tokens.as<float>() = static_cast<float>(total.valid);
}

void run(const ZLossBackward& op, const Execution& execution) {
  Workspace workspace(execution.workspace);
  const std::int64_t experts = op.logits.size(1);
  const WorkerRows<float> rows(workspace, execution.workers, experts);
  const TokenMask mask(op.token_mask);
  const float valid = *op.valid_tokens.as<const float>();
  const float factor = valid > 0 ? 2 * *op.dloss.as<const float>() / valid : 0;
  const Partition blocks = row_blocks(op.logits.size(0), experts);
  parallel_for(blocks.count, execution.workers, [&](std::int64_t block, int worker) {
    float* const row = rows(worker);
    for (std::int64_t t = blocks.first(block); t < blocks.last(block); ++t) {
      widen_row(op.logits, t, 0, experts, row);
      if (mask(t) && routable_row(row, experts)) {
        const float weight = factor * log_sum_exp(row, experts);
        softmax_row(row, experts, row);
        for (std::int64_t e = 0; e < experts; ++e) row[e] *= weight;
      } else {
        std::fill_n(row, experts, 0.0f);
      }
      narrow_row(row, op.dlogits, t, 0, experts);
    }
  });
}

}  // namespace intarsia::cpu
