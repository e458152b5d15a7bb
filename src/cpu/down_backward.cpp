// down_backward: with da' = dy[row_token] w_down, which never leaves the scratch, and a recomputed from z:
//   output, inside  ds = <da', a> + <dy, b_down>   a' = s * a         dz = act'(z) (s * da')
//   input           ds = <g, z>                    a' = act(s * z)    dz = s * g,  with g = act'(s * z) da'
// dy (T, H) or (R, H), z and dz (R, G*I) (may be one buffer), w_down (E, H, I), a' (R, I), ds like scores. 2 R H I flops.
// Verify: intarsia-ops verify down_backward        (SonicMoE, section 3)
#include <algorithm>

#include "cpu/activation_rows.h"
#include "cpu/block_loop.h"
#include "cpu/cpu.h"
#include "cpu/gemm.h"
#include "cpu/row_io.h"

namespace intarsia::cpu {
namespace {

BlockLoop loop(const DownBackward& op) {
  return {op.expert_offsets, op.dy.size(1), op.z.size(1) / gate_factor(op.activation), op.activation, op.dy.dtype};
}

/// Columns [first, first + count) of a.
struct Columns {
  std::int64_t first, count, width;
};

void load_z(const DownBackward& op, const Columns& c, std::int64_t r, float* gate, float* up) {
  widen_row(op.z, r, c.first, c.count, gate);
  if (is_gated(op.activation)) widen_row(op.z, r, c.width + c.first, c.count, up);
}

void store_dz(const DownBackward& op, const Columns& c, std::int64_t r, const float* gate, const float* up) {
  if (!op.dz.defined()) return;
  narrow_row(gate, op.dz, r, c.first, c.count);
  if (is_gated(op.activation)) narrow_row(up, op.dz, r, c.width + c.first, c.count);
}

/// Finishes a tile of row r, score on the output or inside, from its da'. Returns the tile's part of <da', a>.
float finish(const DownBackward& op, const Columns& c, std::int64_t r, float score, const float* da) {
  float gate[kProductColumns], up[kProductColumns], a[kProductColumns], dgate[kProductColumns], dup[kProductColumns];
  load_z(op, c, r, gate, up);
  activate_backward(op.activation, gate, up, score, da, c.count, a, dgate, dup);
  store_dz(op, c, r, dgate, dup);
  const float ds = op.dscores.defined() ? dot(da, a, c.count) : 0.0f;
  if (op.a_scaled.defined()) {
    scale(score, c.count, a);
    narrow_row(a, op.a_scaled, r, c.first, c.count);
  }
  return ds;
}

/// The same with the score on the input. Returns the tile's part of <g, z>.
float finish_input(const DownBackward& op, const Columns& c, std::int64_t r, float score, const float* da) {
  float gate[kProductColumns], up[kProductColumns], a[kProductColumns], dgate[kProductColumns], dup[kProductColumns];
  const bool gated = is_gated(op.activation);
  load_z(op, c, r, gate, up);
  scale(score, c.count, gate);
  if (gated) scale(score, c.count, up);
  activate_backward(op.activation, gate, up, 1.0f, da, c.count, a, dgate, dup);
  load_z(op, c, r, gate, up);
  const float ds = dot(dgate, gate, c.count) + (gated ? dot(dup, up, c.count) : 0.0f);
  scale(score, c.count, dgate);
  if (gated) scale(score, c.count, dup);
  store_dz(op, c, r, dgate, dup);
  if (op.a_scaled.defined()) narrow_row(a, op.a_scaled, r, c.first, c.count);
  return ds;
}

/// ds[i] += <dy, b_down> for the gathered rows of dy.
void add_bias_part(const DownBackward& op, const RowBlock& block, const TensorView& dy, float* ds) {
  float bias[kProductColumns], row[kProductColumns];
  for (std::int64_t first = 0; first < dy.size(1); first += kProductColumns) {
    const std::int64_t n = std::min(kProductColumns, dy.size(1) - first);
    widen_row(op.b_down, block.expert, first, n, bias);
    for (std::int64_t i = 0; i < block.count; ++i) {
      widen_row(dy, i, first, n, row);
      ds[i] += dot(row, bias, n);
    }
  }
}

}  // namespace

void down_backward_block(const DownBackward& op, const RowBlock& block, const Scratch& scratch) {
  const DType dtype = op.dy.dtype;
  const std::int64_t hidden = op.dy.size(1), width = op.z.size(1) / gate_factor(op.activation), m = padded(block.count);
  const WeightMatrix w = expert_weight(op.w_down.weight, op.w_down.transposed, block.expert);
  const bool on_input = op.score_on == ScorePlacement::input;
  const ScoreIndex index(op.scores, op.row_slot);
  float ds[kMaxBlockRows] = {};

  gather(op.dy, list(op.row_token), block, scratch.left);
  for (std::int64_t first = 0; first < width; first += kProductColumns) {
    const Columns c{first, std::min(kProductColumns, width - first), width};
    const std::byte* part = w.data + first * w.in_step * static_cast<std::int64_t>(size_of(dtype));
    gemm(dtype, m, c.count, hidden, {scratch.left, hidden, 1}, {part, w.out_step, w.in_step}, scratch.product, c.count, false,
         scratch.packing);
    for (std::int64_t i = 0; i < block.count; ++i) {
      const std::int64_t r = block.first + i;
      const float score = op.scores.defined() ? op.scores.as<const float>()[index(r)] : 1.0f;
      const float* da = scratch.product + i * c.count;
      ds[i] += on_input ? finish_input(op, c, r, score, da) : finish(op, c, r, score, da);
    }
  }
  if (!op.dscores.defined()) return;
  if (op.b_down.defined() && !on_input) add_bias_part(op, block, scratch_rows(scratch.left, dtype, block.count, hidden), ds);
  for (std::int64_t i = 0; i < block.count; ++i) op.dscores.as<float>()[index(block.first + i)] = ds[i];
}

std::size_t workspace_bytes(const DownBackward& op, int workers) { return loop(op).workspace_bytes(workers); }

void run(const DownBackward& op, const Execution& execution) {
  if (op.dscores.defined()) std::fill_n(op.dscores.as<float>(), op.dscores.numel(), 0.0f);
  loop(op).run(execution, [&](const RowBlock& block, const Scratch& scratch) { down_backward_block(op, block, scratch); });
}

}  // namespace intarsia::cpu
