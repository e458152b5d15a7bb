// up_backward: dx_rows = dz w_up.
// m = r_e, n = H, k = G*I. dz (R, G*I) [gate, up], w_up (E, G*I, H), dx_rows (R, H). Any dtype, size and weight strides.
// Verify: gemm_check up_backward
#include "cuda/general/gemm.h"
#include "cuda/general/general.h"

namespace intarsia::cuda::general {
namespace {

template <class T, class S_>
struct Operation {
  using S = S_;
  static constexpr int kProducts = 1;
  static constexpr bool kWeightGradient = false, kRowDots = false;
  RowBuffer<const T> dz;
  ExpertWeights<const T> w_up;
  RowBuffer<T> dx_rows;

  __device__ S left(const Expert& expert, int m, int k) const { return S(dz.at(expert, m, k)); }
  __device__ S right(const Expert& expert, int, int n, int k) const { return S(*w_up.at(expert.index, k, n)); }
  __device__ S store(const Expert& expert, int m, int n, const S (&v)[1]) const {
    dx_rows.at(expert, m, n) = T(v[0]);
    return S(0);
  }
};

}  // namespace

std::size_t workspace_bytes(const UpBackward&) { return 0; }

void run(const UpBackward& op, const Execution& execution) {
  dispatch_element(op.dz.dtype, [&](auto e) {
    using T = typename decltype(e)::T;
    Problem<Operation<T, typename decltype(e)::S>> p;
    p.rows = ExpertRows(op.expert_offsets, op.dz.size(0));
    p.operation = {RowBuffer<const T>(op.dz), ExpertWeights<const T>(op.w_up), RowBuffer<T>(op.dx_rows)};
    p.n_size = static_cast<int>(op.dx_rows.size(1));
    p.k_size = static_cast<int>(op.dz.size(1));
    p.right_along_k = !along_in(op.w_up);
    launch_gemm(UpBackward::kName, p, op.dz.device.index, execution.stream);
  });
}

}  // namespace intarsia::cuda::general
