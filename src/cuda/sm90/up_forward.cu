// up_forward: z = x[row_token] w_up^T + b_up, a = act(z) (with the score where score_on says).
// m = r_e, n = G*I, k = H. Gathered left rows; right: w_up (E, G*I, H), gate and up rows stacked in one tile.
// Bytes: 2 R H gathered (2 T H when tokens stay in the L2), 2 E G I H, 2 R I (G + 1) written. H, I multiples of 8.
// Verify: gemm_check up_forward
#include "cuda/sm90/epilogue_rows.h"
#include "cuda/sm90/launch.h"
#include "cuda/sm90/sm90.h"

namespace intarsia::cuda::sm90 {
namespace {

bool plain(const UpForward& op) {
  return !op.b_up.defined() && !(op.scores.defined() && op.score_on != ScorePlacement::output);
}

Choice choice_of(const UpForward& op) {
  const bool common = op.x.dtype == DType::bfloat16 && plain(op) && op.activation == Activation::swiglu &&
                      weight_half(op.w_up, 1, 0).in_contiguous();
  return settled(choose(Product::up_forward, {op.a.size(0), op.expert_offsets.size(0) - 1, op.x.size(1), op.a.size(1)}), common,
                 Kernel::tile_256, {Kernel::tile_256_pair});
}

template <class Element, GemmConfig kConfig, bool kMnMajor, class Act, bool kPlain>
void launch_up(const UpForward& op, GemmArguments<Element>& a, void* stream) {
  constexpr int kHalves = Act::kGated ? 2 : 1;
  using Gemm = Operands<Element, kConfig, Left::gathered_rows, kMnMajor ? Right::panels : Right::rows,
                        Act::kGated ? Halves::stacked : Halves::none>;
  for (int half = 0; half < kHalves; ++half) {
    const WeightHalf w = weight_half(op.w_up, kHalves, half);
    a.right[half] = weight_map(w, 64, kMnMajor ? kTileK / Gemm::kCluster : Gemm::kTileN / 2);
    a.right_block = w.block_argument();
  }
  const int columns = Gemm::kTileN / kHalves;  // of a per tile
  launch_gemm<Gemm, UpEpilogue<Gemm, Act, kPlain>>(UpForward::kName, a, static_cast<int>(ceil_div(a.n_size, columns)),
                                                   op.x.device.index, stream);
}

template <class Element>
void run_up(const UpForward& op, const Execution& execution) {
  const Choice choice = choice_of(op);
  const std::int64_t width = op.a.size(1);
  auto a = gemm_arguments<Element>(op.expert_offsets, op.a.size(0), choice.raster);
  a.gathered = SourceRows<Element>(op.x, op.row_token);
  a.k_size = static_cast<int>(op.x.size(1));
  a.n_size = static_cast<int>(width);
  a.scores = ScoreOfRow<float>(op.scores, op.row_slot);
  a.score_on = op.score_on;
  a.bias = ExpertBias<Element>(op.b_up, op.w_up.gate_block);
  a.store_z = op.z.defined();
  a.store[2] = rows_map(op.a, 0, width);
  for (int half = 0; half < gate_factor(op.activation) && a.store_z; ++half)
    a.store[half] = rows_map(op.z, half * width, width);

  void* stream = execution.stream;
  const bool mn_major = !weight_half(op.w_up, 1, 0).in_contiguous();
  if (!mn_major && plain(op) && op.activation == Activation::swiglu) {
    if constexpr (kCommon<Element>)
      if (choice.kernel == Kernel::tile_256_pair) return launch_up<Element, kTile256Pair, false, Swiglu, true>(op, a, stream);
    return launch_up<Element, kTile256, false, Swiglu, true>(op, a, stream);
  }
  if (!mn_major && plain(op) && op.activation == Activation::silu)
    return launch_up<Element, kTile256, false, Silu, true>(op, a, stream);
  dispatch_activation(op.activation, [&](auto act) {
    if (mn_major) launch_up<Element, kTile256, true, decltype(act), false>(op, a, stream);
    else launch_up<Element, kTile256, false, decltype(act), false>(op, a, stream);
  });
}

}  // namespace

std::size_t workspace_bytes(const UpForward&) { return 0; }

void run(const UpForward& op, const Execution& execution) {
  dispatch_half(op.x.dtype, [&](auto tag) { run_up<typename decltype(tag)::type>(op, execution); });
}

std::string explain(const UpForward& op) { return describe(choice_of(op)); }

}  // namespace intarsia::cuda::sm90
