// Expert weights in any layout, as the one or two plain matrices that tensor maps can describe.
#pragma once

#include <limits>

#include "cuda/sm90/map_layout.h"
#include "intarsia/config.h"

namespace intarsia::cuda::sm90 {

/// The gate or the up rows of a weight, or all of a plain one: (experts, out, in), out in blocks.
struct WeightHalf {
  const void* data;
  DType dtype;
  std::int64_t experts, out, in;
  std::int64_t expert_step, out_step, in_step;
  std::int64_t block, block_step;  ///< rows of a block, out when there is one

  bool in_contiguous() const { return in_step == 1; }
  bool blocked() const { return block < out; }
  /// What a kernel divides row numbers by; more than any of them when there is one block.
  int block_argument() const { return blocked() ? static_cast<int>(block) : std::numeric_limits<int>::max(); }
};

/// Half `half` of `halves` (1: the whole out axis).
inline WeightHalf weight_half(const Weights& w, int halves, int half) {
  const TensorView& v = half == 1 && w.second.defined() ? w.second : w.weight;
  const int out_axis = w.transposed ? 2 : 1, in_axis = w.transposed ? 1 : 2;
  const std::int64_t columns = v.size(out_axis);
  WeightHalf h{v.data, v.dtype, v.size(0), columns, v.size(in_axis), v.step(0), v.step(out_axis), v.step(in_axis), columns, 0};
  if (halves == 1 || w.second.defined()) return h;
  h.out = columns / 2;
  h.block = w.gate_block > 0 ? w.gate_block : h.out;
  h.block_step = 2 * h.block * h.out_step;
  h.data = static_cast<const char*>(v.data) + half * h.block * h.out_step * static_cast<std::int64_t>(size_of(v.dtype));
  return h;
}

/// A box of box_inner elements of the contiguous axis by box_rows of the other one.
inline MatricesMap matrices_of(const WeightHalf& h, int box_inner, int box_rows) {
  if (h.in_contiguous())
    return {h.data, h.dtype, h.in, h.out, h.experts, h.block, h.out_step, h.block_step, h.expert_step, box_inner, box_rows};
  return {h.data, h.dtype, h.out, h.in, h.experts, h.in, h.in_step, 0, h.expert_step, box_inner, box_rows};
}

/// 64 columns by box_rows rows of a row buffer, from column `first`.
inline RowsMap rows_of(const TensorView& v, std::int64_t first, std::int64_t columns, int box_rows) {
  const auto* data = static_cast<const char*>(v.data) + first * static_cast<std::int64_t>(size_of(v.dtype));
  return {data, v.dtype, columns, v.step(0), 64, box_rows};
}

}  // namespace intarsia::cuda::sm90
