// up_backward: dx_rows = dz w_up.
// dz (R, G*I) [gate, up], w_up (E, G*I, H), dx_rows (R, H). 2 R G I H flops.
// Verify: intarsia-ops verify up_backward
#include <algorithm>

#include "cpu/block_loop.h"
#include "cpu/cpu.h"
#include "cpu/row_io.h"
#include "cpu/up_weight.h"

namespace intarsia::cpu {
namespace {

bool gated(const UpBackward& op) { return op.w_up.second.defined() || op.w_up.gate_block > 0; }

BlockLoop loop(const UpBackward& op) {
  return {op.expert_offsets, op.dx_rows.size(1), op.dz.size(1), Activation::silu, op.dz.dtype};
}

}  // namespace

void up_backward_block(const UpBackward& op, const RowBlock& block, const RowTarget& target, const Scratch& scratch) {
  const UpWeight w_up(op.w_up, gated(op));
  const std::int64_t hidden = target.rows.size(1), used = list(op.expert_offsets)[op.expert_offsets.size(0) - 1];
  std::int64_t m = std::min(padded(block.count), used - block.first);  // padding reads other rows, never one past the last
  const TensorView rows = rows_from(op.dz, block.first, m);
  Matrix dz{rows.data, rows.step(0), rows.step(1)};
  if (!w_up.concatenated()) {
    m = padded(block.count);
    interleave_gates(op.dz, block, w_up.order(), scratch.left);
    dz = {scratch.left, w_up.columns(), 1};
  }
  for (std::int64_t first = 0; first < hidden; first += kProductColumns) {
    const std::int64_t n = std::min(kProductColumns, hidden - first);
    w_up.input_gradient(block.expert, first, n, m, dz, scratch.product, scratch.packing);
    for (std::int64_t i = 0; i < block.count; ++i)
      narrow_row(scratch.product + i * n, target.rows, target(block.first + i), first, n);
  }
}

std::size_t workspace_bytes(const UpBackward& op, int workers) { return loop(op).workspace_bytes(workers); }

void run(const UpBackward& op, const Execution& execution) {
  loop(op).run(execution, [&](const RowBlock& block, const Scratch& scratch) {
    up_backward_block(op, block, {.rows = op.dx_rows}, scratch);
  });
}

}  // namespace intarsia::cpu
