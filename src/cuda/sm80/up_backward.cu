// up_backward: dx_rows = dz w_up.
// m = r_e, n = H, k = G*I. dz (R, G*I) [gate, up], w_up (E, G*I, H), dx_rows (R, H).
// Bytes: 2 R G I, 2 E G I H, 2 R H written. H and I multiples of 8; bfloat16, float16.
// Verify: gemm_check up_backward
#include "cuda/sm80/launch.h"
#include "cuda/sm80/sm80.h"

namespace intarsia::cuda::sm80 {
namespace {

template <class T, bool kMnMajor, bool kPairs>
void launch_up_backward(const UpBackward& op, const Execution& execution) {
  const int n = static_cast<int>(op.dx_rows.size(1)), k = static_cast<int>(op.dz.size(1));
  Problem<T, RowsOperand<T, kPairs>, BackwardWeights<T, kMnMajor, kPairs>, RowsEpilogue<T>> p;
  p.rows = ExpertRows(op.expert_offsets, op.dz.size(0));
  p.left = {SourceRows<T>(op.dz), k};
  p.right = {ExpertWeights<T>(op.w_up), n, k};
  if constexpr (kPairs) p.right.w.out = OutAxis();
  p.epilogue = {ScorePlacement::output, {}, {}, rows_of<T>(op.dx_rows), op.dx_rows.step(0)};
  p.n_size = n;
  p.k_size = k;
  launch_gemm(UpBackward::kName, p, op.dz.device.index, execution.stream);
}

}  // namespace

std::size_t workspace_bytes(const UpBackward&) { return 0; }

void run(const UpBackward& op, const Execution& execution) {
  dispatch_half(op.dz.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    switch (contiguous_axis(op.w_up)) {
      case Contiguous::in: return launch_up_backward<T, true, false>(op, execution);
      case Contiguous::out_pairs: return launch_up_backward<T, false, true>(op, execution);
      default: return launch_up_backward<T, false, false>(op, execution);
    }
  });
}

}  // namespace intarsia::cuda::sm80
