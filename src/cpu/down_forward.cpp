// down_forward: rows = a w_down^T + b_down. With scores: output: s * (a w_down^T + b_down); inside: a w_down^T + s * b_down.
// a (R, I), w_down (E, H, I), rows (R, H). 2 R H I flops.
// Verify: intarsia-ops verify down_forward
#include <algorithm>

#include "cpu/activation_rows.h"
#include "cpu/block_loop.h"
#include "cpu/cpu.h"
#include "cpu/gemm.h"
#include "cpu/row_io.h"

namespace intarsia::cpu {
namespace {

BlockLoop loop(const DownForward& op) {
  return {op.expert_offsets, op.rows.size(1), op.a.size(1), Activation::silu, op.a.dtype};
}

}  // namespace

void down_forward_block(const DownForward& op, const RowBlock& block, const TensorView& a, const RowTarget& target,
                        const Scratch& scratch) {
  const DType dtype = a.dtype;
  const std::int64_t hidden = target.rows.size(1), width = a.size(1), m = std::min(padded(block.count), a.size(0));
  const WeightMatrix w = expert_weight(op.w_down.weight, op.w_down.transposed, block.expert);
  const bool scored = op.scores.defined() && op.score_on != ScorePlacement::input;
  const bool score_rows = op.score_on == ScorePlacement::output;
  const ScoreIndex index(op.scores, op.row_slot);
  float bias[kProductColumns];

  for (std::int64_t first = 0; first < hidden; first += kProductColumns) {
    const std::int64_t n = std::min(kProductColumns, hidden - first);
    const std::byte* part = w.data + first * w.out_step * static_cast<std::int64_t>(size_of(dtype));
    gemm(dtype, m, n, width, {a.data, a.step(0), a.step(1)}, {part, w.in_step, w.out_step}, scratch.product, n, false,
         scratch.packing);
    if (op.b_down.defined()) widen_row(op.b_down, block.expert, first, n, bias);
    for (std::int64_t i = 0; i < block.count; ++i) {
      const std::int64_t r = block.first + i;
      const float score = scored ? op.scores.as<const float>()[index(r)] : 1.0f;
      float* row = scratch.product + i * n;
      if (op.b_down.defined()) add_scaled(score_rows ? 1.0f : score, bias, 1, n, row);
      if (scored && score_rows) scale(score, n, row);
      narrow_row(row, target.rows, target(r), first, n);
    }
  }
}

std::size_t workspace_bytes(const DownForward& op, int workers) { return loop(op).workspace_bytes(workers); }

void run(const DownForward& op, const Execution& execution) {
  const BlockLoop blocks = loop(op);
  blocks.run(execution, [&](const RowBlock& block, const Scratch& scratch) {
    // Padding reads rows of the next experts, never one past the last.
    const std::int64_t readable = std::min(padded(block.count), blocks.used_rows() - block.first);
    down_forward_block(op, block, rows_from(op.a, block.first, readable), {.rows = op.rows}, scratch);
  });
}

}  // namespace intarsia::cpu
