// up_forward: z = x[row_token] w_up^T + b_up;  a = act(z), s * act(z) (inside) or act(s * z) (input).
// m = r_e, n = I (gate and up of a column in one thread), k = H. x (T, H) gathered, w_up (E, G*I, H), z (R, G*I), a (R, I).
// Bytes: 2 R H gathered, 2 G E I H, 2 R I (G + 1) written. H and I multiples of 8; bfloat16, float16.
// Verify: gemm_check up_forward
#include "cuda/sm80/launch.h"
#include "cuda/sm80/sm80.h"

namespace intarsia::cuda::sm80 {
namespace {

template <class T, bool kMnMajor, bool kPairs, class Act>
void launch_up_forward(const UpForward& op, const Execution& execution, Act act) {
  const std::int64_t width = op.a.size(1), hidden = op.x.size(1);
  const int n = static_cast<int>(width), k = static_cast<int>(hidden);
  Problem<T, RowsOperand<T>, ForwardWeights<T, kMnMajor, Act::kGated && !kPairs, kPairs>, UpForwardEpilogue<T, Act>> p;
  p.rows = ExpertRows(op.expert_offsets, op.a.size(0));
  p.left = {SourceRows<T>(op.x, op.row_token), k};
  p.right = {ExpertWeights<T>(op.w_up), {kPairs ? 2 * n : n, n}, k};
  if constexpr (kPairs) p.right.w.out = OutAxis();
  p.epilogue = {act,
                op.score_on,
                op.score_on == ScorePlacement::output ? ScoreOfRow<float>() : ScoreOfRow<float>(op.scores, op.row_slot),
                ExpertBias<T>(op.b_up, op.w_up.gate_block),
                rows_of<T>(op.z),
                rows_of<T>(op.a),
                op.z.step(0),
                op.a.step(0),
                n};
  p.n_size = n;
  p.k_size = k;
  launch_gemm(UpForward::kName, p, op.x.device.index, execution.stream);
}

}  // namespace

std::size_t workspace_bytes(const UpForward&) { return 0; }

void run(const UpForward& op, const Execution& execution) {
  dispatch_half(op.x.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const Contiguous axis = contiguous_axis(op.w_up);
    if (axis == Contiguous::out_pairs) return launch_up_forward<T, true, true>(op, execution, AnyGated{op.activation});
    dispatch_epilogue(op.activation, [&](auto act) {
      if (axis == Contiguous::in) launch_up_forward<T, false, false>(op, execution, act);
      else launch_up_forward<T, true, false>(op, execution, act);
    });
  });
}

}  // namespace intarsia::cuda::sm80
