// down_forward: rows = a w_down^T, with b_down and the score where score_on says.
// m = r_e, n = H, k = I. Left: a (R, I) by TMA; right: w_down (E, H, I).
// Bytes: 2 R I + 2 E H I read, 2 R H written. H, I multiples of 8.
// Verify: gemm_check down_forward
#include "cuda/sm90/epilogue_rows.h"
#include "cuda/sm90/launch.h"
#include "cuda/sm90/sm90.h"

namespace intarsia::cuda::sm90 {
namespace {

bool plain(const DownForward& op) { return !op.b_down.defined() && !op.scores.defined(); }

Choice choice_of(const DownForward& op) {
  const bool common = op.a.dtype == DType::bfloat16 && plain(op) && weight_half(op.w_down, 1, 0).in_contiguous();
  return settled(choose(Product::down_forward, {op.a.size(0), op.expert_offsets.size(0) - 1, op.rows.size(1), op.a.size(1)}),
                 common, Kernel::tile_256, {Kernel::tile_256_pair, Kernel::tile_192_ping_pong});
}

template <class Element, GemmConfig kConfig, bool kMnMajor, bool kPlain>
void launch_down(const DownForward& op, GemmArguments<Element>& a, void* stream) {
  using Gemm = Operands<Element, kConfig, Left::rows, kMnMajor ? Right::panels : Right::rows, Halves::none>;
  a.right[0] = weight_map(weight_half(op.w_down, 1, 0), 64, kMnMajor ? kTileK / Gemm::kCluster : Gemm::kTileN / 2);
  launch_gemm<Gemm, StoreEpilogue<Gemm, kPlain>>(DownForward::kName, a, static_cast<int>(ceil_div(a.n_size, Gemm::kTileN)),
                                                 op.a.device.index, stream);
}

template <class Element>
void run_down(const DownForward& op, const Execution& execution) {
  const Choice choice = choice_of(op);
  auto a = gemm_arguments<Element>(op.expert_offsets, op.a.size(0), choice.raster);
  a.k_size = static_cast<int>(op.a.size(1));
  a.n_size = static_cast<int>(op.rows.size(1));
  a.left[0] = rows_map(op.a, 0, a.k_size, 128);
  a.store[0] = rows_map(op.rows, 0, a.n_size);
  a.scores = ScoreOfRow<float>(op.scores, op.row_slot);
  a.score_on = op.score_on;
  a.bias = ExpertBias<Element>(op.b_down);

  void* stream = execution.stream;
  if (!weight_half(op.w_down, 1, 0).in_contiguous()) return launch_down<Element, kTile256, true, false>(op, a, stream);
  if (!plain(op)) return launch_down<Element, kTile256, false, false>(op, a, stream);
  if constexpr (kCommon<Element>) {
    if (choice.kernel == Kernel::tile_256_pair) return launch_down<Element, kTile256Pair, false, true>(op, a, stream);
    if (choice.kernel == Kernel::tile_192_ping_pong) return launch_down<Element, kTile192PingPong, false, true>(op, a, stream);
  }
  launch_down<Element, kTile256, false, true>(op, a, stream);
}

}  // namespace

std::size_t workspace_bytes(const DownForward&) { return 0; }

void run(const DownForward& op, const Execution& execution) {
  dispatch_half(op.a.dtype, [&](auto tag) { run_down<typename decltype(tag)::type>(op, execution); });
}

std::string explain(const DownForward& op) { return describe(choice_of(op)); }

}  // namespace intarsia::cuda::sm90
