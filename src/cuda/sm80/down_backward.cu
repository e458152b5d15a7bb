// down_backward, with da' = dy[row_token] w_down, which never leaves the chip, and a recomputed from z:
//   output, inside  ds = <da', a> + <dy, b_down>   a' = s * a        dz = act'(z) (s * da')
//   input           ds = <g, z>                    a' = act(s * z)   dz = s * g,  with g = act'(s * z) da'
// m = r_e, n = I, k = H. dy (T, H) gathered, z and dz (R, G*I) (may be one buffer), w_down (E, H, I), a' (R, I).
// Bytes: 2 R H gathered, 2 E H I, 2 R I (2 G + 1). H and I multiples of 8; bfloat16, float16. Workspace: 4 R ceil(I / 128).
// Verify: gemm_check down_backward
#include "cuda/row_dots.h"
#include "cuda/sm80/launch.h"
#include "cuda/sm80/sm80.h"

namespace intarsia::cuda::sm80 {
namespace {

static_assert(kTile == kRowDotColumns);

template <class T, bool kMnMajor, class Act>
void launch_down_backward(const DownBackward& op, const Execution& execution, Act act) {
  const int n = static_cast<int>(op.z.size(1) / (Act::kGated ? 2 : 1)), k = static_cast<int>(op.dy.size(1));
  Problem<T, RowsOperand<T>, BackwardWeights<T, kMnMajor>, DownBackwardEpilogue<T, Act>> p;
  p.rows = ExpertRows(op.expert_offsets, op.z.size(0));
  p.left = {SourceRows<T>(op.dy, op.row_token), k};
  p.right = {ExpertWeights<T>(op.w_down), n, k};
  p.epilogue = {act,
                op.score_on,
                ScoreOfRow<float>(op.scores, op.row_slot),
                rows_of<const T>(op.z),
                rows_of<T>(op.dz),
                rows_of<T>(op.a_scaled),
                op.z.step(0),
                op.dz.step(0),
                op.a_scaled.step(0),
                n,
                op.dscores.defined() ? reinterpret_cast<float*>(execution.workspace) : nullptr,
                p.rows.capacity};
  p.n_size = n;
  p.k_size = k;
  launch_gemm(DownBackward::kName, p, op.dy.device.index, execution.stream);
}

}  // namespace

std::size_t workspace_bytes(const DownBackward& op) { return row_dot_bytes(op); }

void run(const DownBackward& op, const Execution& execution) {
  dispatch_half(op.dy.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    dispatch_epilogue(op.activation, [&](auto act) {
      if (contiguous_axis(op.w_down) == Contiguous::in) launch_down_backward<T, true>(op, execution, act);
      else launch_down_backward<T, false>(op, execution, act);
    });
  });
  finish_row_dots(op, execution.workspace, execution.stream);
}

}  // namespace intarsia::cuda::sm80
