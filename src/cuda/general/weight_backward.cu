// down_weight_backward: dw_down[e] = grad_scale * dy[row_token]^T a'      dw_down (E, H, I)
// up_weight_backward:   dw_up[e]   = grad_scale * dz^T x[row_token]       dw_up (E, G*I, H), in the caller's layout
// m = out, n = in, k = r_e. Experts without rows: zeros, or untouched when `accumulate`, which adds to what is there and rounds
// once. Any dtype, size and stride; gradients in the dtype of the rows or float32.
// Verify: gemm_check down_weight_backward, gemm_check up_weight_backward
#include "cuda/general/gemm.h"
#include "cuda/general/general.h"

namespace intarsia::cuda::general {
namespace {

template <class T, class G, class S_>
struct Operation {
  using S = S_;
  static constexpr int kProducts = 1;
  static constexpr bool kWeightGradient = true, kRowDots = false;
  SourceRows<T> out, in;  // rows whose columns are the out axis, and the in axis
  ExpertWeights<G> dw;
  bool accumulate;
  S grad_scale;

  __device__ S left(const Expert& expert, int m, int k) const {
    const int source = out.find(expert.begin + k);
    return source < 0 ? S(0) : S(*out.at(source, m));
  }
  __device__ S right(const Expert& expert, int, int n, int k) const {
    const int source = in.find(expert.begin + k);
    return source < 0 ? S(0) : S(*in.at(source, n));
  }
  __device__ S store(const Expert& expert, int m, int n, const S (&v)[1]) const {
    G& to = *dw.at(expert.index, m, n);
    to = G((accumulate ? S(to) : S(0)) + grad_scale * v[0]);
    return S(0);
  }
};

void run_gradient(const char* name, const TensorView& out, const TensorView& out_token, const TensorView& in,
                  const TensorView& in_token, const TensorView& expert_offsets, std::int64_t rows, const Weights& dw,
                  bool accumulate, double grad_scale, const Execution& execution) {
  dispatch_element(out.dtype, [&](auto e) {
    using T = typename decltype(e)::T;
    using S = typename decltype(e)::S;
    const auto launch_as = [&](auto gradient) {
      using G = typename decltype(gradient)::type;
      Problem<Operation<T, G, S>> p;
      p.rows = ExpertRows(expert_offsets, rows);
      p.operation = {SourceRows<T>(out, out_token), SourceRows<T>(in, in_token), ExpertWeights<G>(dw), accumulate,
                     static_cast<S>(grad_scale)};
      p.m_size = static_cast<int>(out.size(1));
      p.n_size = static_cast<int>(in.size(1));
      p.skip_empty = accumulate;
      p.left_along_k = p.right_along_k = false;
      launch_gemm(name, p, out.device.index, execution.stream);
    };
    if constexpr (sizeof(T) == 2) {
      if (dw.weight.dtype == DType::float32) return launch_as(Tag<float>{});
    }
    launch_as(Tag<T>{});
  });
}

}  // namespace

std::size_t workspace_bytes(const DownWeightBackward&) { return 0; }
std::size_t workspace_bytes(const UpWeightBackward&) { return 0; }

void run(const DownWeightBackward& op, const Execution& execution) {
  run_gradient(op.kName, op.dy, op.row_token, op.a_scaled, {}, op.expert_offsets, op.a_scaled.size(0), op.dw_down,
               op.accumulate, op.grad_scale, execution);
}

void run(const UpWeightBackward& op, const Execution& execution) {
  run_gradient(op.kName, op.dz, {}, op.x, op.row_token, op.expert_offsets, op.dz.size(0), op.dw_up, op.accumulate,
               op.grad_scale, execution);
}

}  // namespace intarsia::cuda::general
