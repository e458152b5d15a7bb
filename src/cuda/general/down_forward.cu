// down_forward: rows = a w_down^T + b_down; with scores: output: s * (a w_down^T + b_down); inside: a w_down^T + s * b_down.
// m = r_e, n = H, k = I. a (R, I), w_down (E, H, I), rows (R, H). Any dtype, size and weight strides.
// Verify: gemm_check down_forward
#include "cuda/general/gemm.h"
#include "cuda/general/general.h"

namespace intarsia::cuda::general {
namespace {

template <class T, class S_>
struct Operation {
  using S = S_;
  static constexpr int kProducts = 1;
  static constexpr bool kWeightGradient = false, kRowDots = false;
  ScorePlacement on;
  ScoreOfRow<S> score;
  RowBuffer<const T> a;
  ExpertWeights<const T> w_down;
  ExpertBias<T> b_down;
  RowBuffer<T> rows;

  __device__ S left(const Expert& expert, int m, int k) const { return S(a.at(expert, m, k)); }
  __device__ S right(const Expert& expert, int, int n, int k) const { return S(*w_down.at(expert.index, n, k)); }
  __device__ S store(const Expert& expert, int m, int n, const S (&v)[1]) const {
    const S s = score(expert.begin + m), bias = b_down.template at<S>(expert.index, n);
    const S product_factor = on == ScorePlacement::output ? s : S(1), bias_factor = on == ScorePlacement::input ? S(1) : s;
    rows.at(expert, m, n) = T(product_factor * v[0] + bias_factor * bias);
    return S(0);
  }
};

}  // namespace

std::size_t workspace_bytes(const DownForward&) { return 0; }

void run(const DownForward& op, const Execution& execution) {
  dispatch_element(op.a.dtype, [&](auto e) {
    using T = typename decltype(e)::T;
    using S = typename decltype(e)::S;
    Problem<Operation<T, S>> p;
    p.rows = ExpertRows(op.expert_offsets, op.a.size(0));
    p.operation = {op.score_on,
                   op.score_on == ScorePlacement::input ? ScoreOfRow<S>() : ScoreOfRow<S>(op.scores, op.row_slot),
                   RowBuffer<const T>(op.a),
                   ExpertWeights<const T>(op.w_down),
                   ExpertBias<T>(op.b_down),
                   RowBuffer<T>(op.rows)};
    p.n_size = static_cast<int>(op.rows.size(1));
    p.k_size = static_cast<int>(op.a.size(1));
    p.right_along_k = along_in(op.w_down);
    launch_gemm(DownForward::kName, p, op.a.device.index, execution.stream);
  });
}

}  // namespace intarsia::cuda::general
