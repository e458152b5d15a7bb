// down_backward, with da' = dy[row_token] w_down and a recomputed from z:
//   output, inside  ds = <da', a> + <dy, b_down>   a' = s * a        dz = act'(z) (s * da')
//   input           ds = <g, z>                    a' = act(s * z)   dz = s * g,  with g = act'(s * z) da'
// m = r_e, n = I, k = H. dy (T, H) or (R, H), z and dz (R, G*I) (may be one buffer), w_down (E, H, I), a' (R, I). Any dtype,
// size and stride. Workspace: R ceil(I / 128) sums. Verify: gemm_check down_backward
#include "cuda/general/gemm.h"
#include "cuda/general/general.h"
#include "cuda/row_dots.h"

namespace intarsia::cuda::general {
namespace {

static_assert(kTileN == kRowDotColumns);

template <class T, class S_, class Act>
struct Operation {
  using S = S_;
  static constexpr int kProducts = 1;
  static constexpr bool kWeightGradient = false, kRowDots = true;
  Act act;
  ScorePlacement on;
  ScoreOfRow<S> score;
  SourceRows<T> dy;
  ExpertWeights<const T> w_down;
  RowBuffer<const T> z;
  RowBuffer<T> dz, a_scaled;
  int width;
  S* row_dots;
  int capacity;

  __device__ S left(const Expert& expert, int m, int k) const {
    const int source = dy.find(expert.begin + m);
    return source < 0 ? S(0) : S(*dy.at(source, k));
  }
  __device__ S right(const Expert& expert, int, int n, int k) const { return S(*w_down.at(expert.index, k, n)); }
  __device__ S store(const Expert& expert, int m, int n, const S (&v)[1]) const {
    const S gate = S(z.at(expert, m, n)), up = Act::kGated ? S(z.at(expert, m, Act::kGated * width + n)) : S(0);
    const DownGradient<S> d = down_gradient<S>(act, gate, up, v[0], score(expert.begin + m), on);
    dz.at(expert, m, n) = T(d.dgate);
    if constexpr (Act::kGated) dz.at(expert, m, width + n) = T(d.dup);
    if (a_scaled.data != nullptr) a_scaled.at(expert, m, n) = T(d.a_scaled);
    return d.ds;
  }
  __device__ void row_dot(const Expert& expert, int m, int tile, S sum) const {
    if (row_dots != nullptr) row_dots[static_cast<std::int64_t>(tile) * capacity + expert.begin + m] = sum;
  }
};

template <class T, class S, class Act>
void launch_down_backward(const DownBackward& op, const Execution& execution, Act act) {
  const int width = static_cast<int>(op.z.size(1) / (Act::kGated ? 2 : 1));
  Problem<Operation<T, S, Act>> p;
  p.rows = ExpertRows(op.expert_offsets, op.z.size(0));
  p.operation = {act,
                 op.score_on,
                 ScoreOfRow<S>(op.scores, op.row_slot),
                 SourceRows<T>(op.dy, op.row_token),
                 ExpertWeights<const T>(op.w_down),
                 RowBuffer<const T>(op.z),
                 RowBuffer<T>(op.dz),
                 RowBuffer<T>(op.a_scaled),
                 width,
                 op.dscores.defined() ? reinterpret_cast<S*>(execution.workspace) : nullptr,
                 p.rows.capacity};
  p.n_size = width;
  p.k_size = static_cast<int>(op.dy.size(1));
  p.right_along_k = !along_in(op.w_down);
  launch_gemm(DownBackward::kName, p, op.dy.device.index, execution.stream);
}

}  // namespace

std::size_t workspace_bytes(const DownBackward& op) { return row_dot_bytes(op); }

void run(const DownBackward& op, const Execution& execution) {
  dispatch_element(op.dy.dtype, [&](auto e) {
    using T = typename decltype(e)::T;
    using S = typename decltype(e)::S;
    if (is_gated(op.activation)) launch_down_backward<T, S>(op, execution, AnyGated{op.activation});
    else launch_down_backward<T, S>(op, execution, AnyPlain{op.activation});
  });
  finish_row_dots(op, execution.workspace, execution.stream);
}

}  // namespace intarsia::cuda::general
