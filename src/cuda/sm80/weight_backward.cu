// down_weight_backward: dw_down[e] = grad_scale * dy[row_token]^T a'      dw_down (E, H, I)
// up_weight_backward:   dw_up[e]   = grad_scale * dz^T x[row_token]       dw_up (E, G*I, H), in the caller's layout
// m = out, n = in, k = r_e; a gradient whose out axis is the contiguous one is computed with m and n exchanged.
// Experts without rows: zeros, or untouched when `accumulate`, which adds to what is there and rounds once.
// Bytes: 2 R H gathered, 2 R G I, and the gradient. H and G*I multiples of 8; bfloat16, float16; any gradient layout.
// Verify: gemm_check down_weight_backward, gemm_check up_weight_backward
#include "cuda/sm80/launch.h"
#include "cuda/sm80/sm80.h"

namespace intarsia::cuda::sm80 {
namespace {

/// Whether elements 2i and 2i + 1 along `axis` are neighbours at an even address, everywhere in the tensor.
bool in_pairs(const TensorView& v, int axis) {
  if (!v.defined()) return true;
  if (v.step(axis) != 1 || reinterpret_cast<std::uintptr_t>(v.data) % (2 * size_of(v.dtype)) != 0) return false;
  for (int other = 0; other < 3; ++other)
    if (other != axis && v.step(other) % 2 != 0) return false;
  return true;
}

struct Call {
  TensorView out_rows, out_token, in_rows, in_token;  // columns of out_rows are the out axis, those of in_rows the in axis
  const TensorView& expert_offsets;
  const Weights& dw;
  bool accumulate;
  double grad_scale;
  const char* name;
};

template <class T, class G, bool kSwapped>
void launch_gradient(const Call& call, const Execution& execution) {
  const TensorView &left = kSwapped ? call.in_rows : call.out_rows, &right = kSwapped ? call.out_rows : call.in_rows;
  const TensorView &left_token = kSwapped ? call.in_token : call.out_token,
                   &right_token = kSwapped ? call.out_token : call.in_token;
  const int axis = kSwapped == call.dw.transposed ? 2 : 1;  // of dw, along the columns of a tile
  const int m = static_cast<int>(left.size(1)), n = static_cast<int>(right.size(1));
  const std::int64_t rows =
      (call.out_token.defined() ? call.in_rows : call.out_rows).size(0);  // the side without a gather has R rows
  Problem<T, ColumnsOperand<T>, ColumnsOperand<T>, GradientEpilogue<G, kSwapped>> p;
  p.rows = ExpertRows(call.expert_offsets, rows);
  p.left = {SourceRows<T>(left, left_token), m};
  p.right = {SourceRows<T>(right, right_token), n};
  const bool whole_pairs = !kSwapped || call.dw.gate_block % 2 == 0;
  p.epilogue = {ExpertWeights<G>(call.dw), call.accumulate,
                whole_pairs && in_pairs(call.dw.weight, axis) && in_pairs(call.dw.second, axis),
                static_cast<float>(call.grad_scale)};
  p.m_size = m;
  p.n_size = n;
  p.skip_empty = call.accumulate;
  launch_gemm(call.name, p, left.device.index, execution.stream);
}

void run_gradient(const Call& call, const Execution& execution) {
  const bool swapped = call.dw.weight.step(call.dw.transposed ? 1 : 2) != 1;  // the in axis is not the contiguous one
  dispatch_half(call.out_rows.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto launch_as = [&](auto gradient) {
      using G = typename decltype(gradient)::type;
      if (swapped) launch_gradient<T, G, true>(call, execution);
      else launch_gradient<T, G, false>(call, execution);
    };
    if (call.dw.weight.dtype == DType::float32) launch_as(Tag<float>{});
    else launch_as(Tag<T>{});
  });
}

}  // namespace

std::size_t workspace_bytes(const DownWeightBackward&) { return 0; }
std::size_t workspace_bytes(const UpWeightBackward&) { return 0; }

void run(const DownWeightBackward& op, const Execution& execution) {
  run_gradient({op.dy, op.row_token, op.a_scaled, {}, op.expert_offsets, op.dw_down, op.accumulate, op.grad_scale, op.kName},
               execution);
}

void run(const UpWeightBackward& op, const Execution& execution) {
  run_gradient({op.dz, {}, op.x, op.row_token, op.expert_offsets, op.dw_up, op.accumulate, op.grad_scale, op.kName}, execution);
}

}  // namespace intarsia::cuda::sm80
