// down_forward: rows = a w_down^T + b_down; with scores: output: s * (a w_down^T + b_down); inside: a w_down^T + s * b_down.
// m = r_e, n = H, k = I. a (R, I), w_down (E, H, I), rows (R, H).
// Bytes: 2 R I, 2 E H I, 2 R H written. H and I multiples of 8; bfloat16, float16.
// Verify: gemm_check down_forward
#include "cuda/sm80/launch.h"
#include "cuda/sm80/sm80.h"

namespace intarsia::cuda::sm80 {
namespace {

template <class T, bool kMnMajor>
void launch_down_forward(const DownForward& op, const Execution& execution) {
  const int n = static_cast<int>(op.rows.size(1)), k = static_cast<int>(op.a.size(1));
  Problem<T, RowsOperand<T>, ForwardWeights<T, kMnMajor, false>, RowsEpilogue<T>> p;
  p.rows = ExpertRows(op.expert_offsets, op.a.size(0));
  p.left = {SourceRows<T>(op.a), k};
  p.right = {ExpertWeights<T>(op.w_down), {n, n}, k};
  p.epilogue = {op.score_on,
                op.score_on == ScorePlacement::input ? ScoreOfRow<float>() : ScoreOfRow<float>(op.scores, op.row_slot),
                ExpertBias<T>(op.b_down), rows_of<T>(op.rows), op.rows.step(0)};
  p.n_size = n;
  p.k_size = k;
  launch_gemm(DownForward::kName, p, op.a.device.index, execution.stream);
}

}  // namespace

std::size_t workspace_bytes(const DownForward&) { return 0; }

void run(const DownForward& op, const Execution& execution) {
  dispatch_half(op.a.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (contiguous_axis(op.w_down) == Contiguous::in) launch_down_forward<T, false>(op, execution);
    else launch_down_forward<T, true>(op, execution);
  });
}

}  // namespace intarsia::cuda::sm80
