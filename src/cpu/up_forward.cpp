// up_forward: z = x[row_token] w_up^T + b_up;  a = act(z), s * act(z) (inside) or act(s * z) (input).
// x (T, H) or (R, H), w_up (E, G*I, H), z (R, G*I) [gate, up], a (R, I).
// A block of rows is gathered, multiplied by a tile of gates and ups at a time, and finished in fp32: a is computed from z
// before z is rounded. 2 R G I H flops; moves R H + R (G + 1) I elements, and the weights once for each block of rows. Verify:
// intarsia-ops verify up_forward
#include "cpu/activation_rows.h"
#include "cpu/block_loop.h"
#include "cpu/cpu.h"
#include "cpu/row_io.h"
#include "cpu/up_weight.h"

namespace intarsia::cpu {
namespace {

BlockLoop loop(const UpForward& op) { return {op.expert_offsets, op.x.size(1), op.a.size(1), op.activation, op.x.dtype}; }

/// Finishes one row of a tile: `row` holds its product.
void finish(const UpForward& op, const UpWeight& w_up, const GateTile& tile, const float* bias, std::int64_t r, float score,
            float* row, const TensorView& a, std::int64_t a_row) {
  float split[kProductColumns], activated[kProductColumns];
  if (tile.interleaved) {
    split_gates(row, w_up.order().block, tile.count, split, split + tile.count);
    row = split;
  }
  float *gate = row, *up = row + tile.count;
  if (bias) add_scaled(1.0f, bias, 1, tile.columns, row);
  if (op.z.defined()) {
    narrow_row(gate, op.z, r, tile.first, tile.count);
    if (w_up.gated()) narrow_row(up, op.z, r, w_up.width() + tile.first, tile.count);
  }
  if (!a.defined()) return;
  if (op.score_on == ScorePlacement::input) scale(score, tile.columns, row);
  activate(op.activation, gate, up, tile.count, activated);
  if (op.score_on == ScorePlacement::inside) scale(score, tile.count, activated);
  narrow_row(activated, a, a_row, tile.first, tile.count);
}

}  // namespace

void up_forward_block(const UpForward& op, const RowBlock& block, const TensorView& a, const Scratch& scratch) {
  const UpWeight w_up(op.w_up, is_gated(op.activation));
  const std::int64_t hidden = op.x.size(1), m = padded(block.count);
  const bool scored = op.scores.defined() && op.score_on != ScorePlacement::output;
  const ScoreIndex index(op.scores, op.row_slot);
  float bias[kProductColumns];

  gather(op.x, list(op.row_token), block, scratch.left);
  for (std::int64_t first = 0; first < w_up.width();) {
    const GateTile tile = w_up.tile(first);
    w_up.preactivation(block.expert, tile, m, {scratch.left, hidden, 1}, hidden, scratch.product, scratch.packing);
    if (op.b_up.defined()) load_up_bias(op.b_up, block.expert, w_up, tile, bias);
    for (std::int64_t i = 0; i < block.count; ++i) {
      const std::int64_t r = block.first + i;
      const float score = scored ? op.scores.as<const float>()[index(r)] : 1.0f;
      finish(op, w_up, tile, op.b_up.defined() ? bias : nullptr, r, score, scratch.product + i * tile.columns, a, i);
    }
    first += tile.count;
  }
}

std::size_t workspace_bytes(const UpForward& op, int workers) { return loop(op).workspace_bytes(workers); }

void run(const UpForward& op, const Execution& execution) {
  loop(op).run(execution, [&](const RowBlock& block, const Scratch& scratch) {
    up_forward_block(op, block, rows_from(op.a, block.first, block.count), scratch);
  });
}

}  // namespace intarsia::cpu
