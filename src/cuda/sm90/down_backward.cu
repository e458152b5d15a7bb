// down_backward: with da' = dy[row_token] w_down, which never leaves the chip, dz, a' and ds from z; see
// epilogue_down_backward.h. m = r_e, n = I, k = H. Gathered left rows; right: w_down (E, H, I). dz may be z itself. Bytes: 2 R
// H gathered, 2 E H I, 2 R I (2 G + 1). H, I multiples of 8. Workspace: 4 R ceil(I / 128), partial sums of ds. Verify:
// gemm_check down_backward
#include <type_traits>

#include "cuda/sm90/epilogue_down_backward.h"
#include "cuda/sm90/launch.h"
#include "cuda/sm90/sm90.h"

namespace intarsia::cuda::sm90 {
namespace {

std::int64_t width_of(const DownBackward& op) { return op.z.size(1) / gate_factor(op.activation); }

bool score_on_input(const DownBackward& op) { return op.scores.defined() && op.score_on == ScorePlacement::input; }

/// Scores on the input, and clamping, take more registers than two tiles in turn leave: half a tile each.
template <class Act, bool kScoreOnInput>
inline constexpr bool kHalfEach = kScoreOnInput || std::is_same_v<Act, ClampedSwiglu>;

Choice choice_of(const DownBackward& op) {
  const bool on_input = score_on_input(op);
  const bool half_each = dispatch_activation(
      op.activation, [&](auto act) { return on_input ? kHalfEach<decltype(act), true> : kHalfEach<decltype(act), false>; });
  const bool common = op.dy.dtype == DType::bfloat16 && op.activation == Activation::swiglu && !on_input &&
                      weight_half(op.w_down, 1, 0).in_contiguous();
  return settled(choose(Product::down_backward, {op.z.size(0), op.expert_offsets.size(0) - 1, op.dy.size(1), width_of(op)}),
                 common, half_each ? Kernel::tile_128 : Kernel::tile_128_ping_pong,
                 {Kernel::tile_256, Kernel::tile_128_ping_pong_deep});
}

template <GemmConfig kConfig, bool kMnMajor, class Act, bool kScoreOnInput, class Element>
void launch_down(const DownBackward& op, GemmArguments<Element>& a, void* stream) {
  using Gemm = Operands<Element, kConfig, Left::gathered_rows, kMnMajor ? Right::panels : Right::rows, Halves::none>;
  a.right[0] = weight_map(weight_half(op.w_down, 1, 0), 64, kMnMajor ? kTileK / Gemm::kCluster : Gemm::kTileN / 2);
  launch_gemm<Gemm, DownBackwardEpilogue<Gemm, Act, kScoreOnInput>>(
      DownBackward::kName, a, static_cast<int>(ceil_div(a.n_size, Gemm::kTileN)), op.dy.device.index, stream);
}

/// The product's first kernel, in the weight's layout.
template <class Act, bool kScoreOnInput, class Element>
void launch_first(const DownBackward& op, GemmArguments<Element>& a, void* stream) {
  constexpr GemmConfig kConfig = kHalfEach<Act, kScoreOnInput> ? kTile128 : kTile128PingPong;
  // MN-major where n, which is I, is the contiguous axis of the weight.
  if (weight_half(op.w_down, 1, 0).in_contiguous()) launch_down<kConfig, true, Act, kScoreOnInput>(op, a, stream);
  else launch_down<kConfig, false, Act, kScoreOnInput>(op, a, stream);
}

/// The kernel of one activation.
template <class Act, class Element>
void launch_activation(const DownBackward& op, Kernel kernel, GemmArguments<Element>& a, void* stream) {
  if constexpr (std::is_same_v<Act, Swiglu> && kCommon<Element>) {
    if (kernel == Kernel::tile_256) return launch_down<kTile256Three, true, Act, false>(op, a, stream);
    if (kernel == Kernel::tile_128_ping_pong_deep) return launch_down<kTile128PingPongDeep, true, Act, false>(op, a, stream);
  }
  if (score_on_input(op)) launch_first<Act, true>(op, a, stream);
  else launch_first<Act, false>(op, a, stream);
}

template <class Element>
void run_down(const DownBackward& op, const Execution& execution) {
  const Choice choice = choice_of(op);
  const std::int64_t width = width_of(op);
  auto a = gemm_arguments<Element>(op.expert_offsets, op.z.size(0), choice.raster);
  a.gathered = SourceRows<Element>(op.dy, op.row_token);
  a.k_size = static_cast<int>(op.dy.size(1));
  a.n_size = static_cast<int>(width);
  a.scores = ScoreOfRow<float>(op.scores, op.row_slot);
  a.store_a = op.a_scaled.defined();
  if (a.store_a) a.store[2] = rows_map(op.a_scaled, 0, width);
  for (int half = 0; half < gate_factor(op.activation); ++half) {
    a.z[half] = rows_map(op.z, half * width, width);
    a.store[half] = rows_map(op.dz, half * width, width);
  }
  a.dot_parts = op.dscores.defined() ? reinterpret_cast<float*>(execution.workspace) : nullptr;

  dispatch_activation(op.activation,
                      [&](auto act) { launch_activation<decltype(act)>(op, choice.kernel, a, execution.stream); });
}

}  // namespace

std::size_t workspace_bytes(const DownBackward& op) { return row_dot_bytes(op); }

void run(const DownBackward& op, const Execution& execution) {
  dispatch_half(op.dy.dtype, [&](auto tag) { run_down<typename decltype(tag)::type>(op, execution); });
  finish_row_dots(op, execution.workspace, execution.stream);
}

std::string explain(const DownBackward& op) { return describe(choice_of(op)); }

}  // namespace intarsia::cuda::sm90
