// up_forward: z = x[row_token] w_up^T + b_up;  a = act(z), s * act(z) (inside) or act(s * z) (input).
// m = r_e, n = I, k = H. x (T, H) or (R, H), w_up (E, G*I, H), z (R, G*I) [gate, up], a (R, I). Any dtype, size and stride.
// Verify: gemm_check up_forward
#include "cuda/general/gemm.h"
#include "cuda/general/general.h"

namespace intarsia::cuda::general {
namespace {

template <class T, class S_, class Act>
struct Operation {
  using S = S_;
  static constexpr int kProducts = Act::kGated ? 2 : 1;
  static constexpr bool kWeightGradient = false, kRowDots = false;
  Act act;
  ScorePlacement on;
  ScoreOfRow<S> score;
  SourceRows<T> x;
  ExpertWeights<const T> w_up;
  ExpertBias<T> b_up;
  RowBuffer<T> z, a;
  int width;

  __device__ S left(const Expert& expert, int m, int k) const {
    const int source = x.find(expert.begin + m);
    return source < 0 ? S(0) : S(*x.at(source, k));
  }
  __device__ S right(const Expert& expert, int product, int n, int k) const {
    return S(*w_up.at(expert.index, product * width + n, k));
  }
  __device__ S store(const Expert& expert, int m, int n, const S (&v)[kProducts]) const {
    S values[2] = {S(0), S(0)};
    for (int i = 0; i < kProducts; ++i) {
      values[i] = v[i] + b_up.template at<S>(expert.index, i * width + n);
      if (z.data != nullptr) z.at(expert, m, i * width + n) = T(values[i]);
    }
    a.at(expert, m, n) = T(activated<S>(act, values[0], values[1], score(expert.begin + m), on));
    return S(0);
  }
};

template <class T, class S, class Act>
void launch_up_forward(const UpForward& op, const Execution& execution, Act act) {
  const int width = static_cast<int>(op.a.size(1));
  Problem<Operation<T, S, Act>> p;
  p.rows = ExpertRows(op.expert_offsets, op.a.size(0));
  p.operation = {act,
                 op.score_on,
                 op.score_on == ScorePlacement::output ? ScoreOfRow<S>() : ScoreOfRow<S>(op.scores, op.row_slot),
                 SourceRows<T>(op.x, op.row_token),
                 ExpertWeights<const T>(op.w_up),
                 ExpertBias<T>(op.b_up, op.w_up.gate_block),
                 RowBuffer<T>(op.z),
                 RowBuffer<T>(op.a),
                 width};
  p.n_size = width;
  p.k_size = static_cast<int>(op.x.size(1));
  p.right_along_k = along_in(op.w_up);
  launch_gemm(UpForward::kName, p, op.x.device.index, execution.stream);
}

}  // namespace

std::size_t workspace_bytes(const UpForward&) { return 0; }

void run(const UpForward& op, const Execution& execution) {
  dispatch_element(op.x.dtype, [&](auto e) {
    using T = typename decltype(e)::T;
    using S = typename decltype(e)::S;
    if (is_gated(op.activation)) launch_up_forward<T, S>(op, execution, AnyGated{op.activation});
    else launch_up_forward<T, S>(op, execution, AnyPlain{op.activation});
  });
}

}  // namespace intarsia::cuda::general
