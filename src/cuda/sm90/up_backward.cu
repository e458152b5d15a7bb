// up_backward: dx_rows = dz w_up. m = r_e, n = H, k = G*I, gate then up. Left: dz (R, G*I) by TMA; right: w_up (E, G*I, H).
// Bytes: 2 R G I + 2 E G I H read, 2 R H written. H, I multiples of 8.
// Verify: gemm_check up_backward
#include "cuda/sm90/epilogue_rows.h"
#include "cuda/sm90/launch.h"
#include "cuda/sm90/sm90.h"

namespace intarsia::cuda::sm90 {
namespace {

Choice choice_of(const UpBackward& op) {
  const bool common = op.dz.dtype == DType::bfloat16 && weight_half(op.w_up, 1, 0).in_contiguous();
  return settled(
      choose(Product::up_backward, {op.dz.size(0), op.expert_offsets.size(0) - 1, op.dx_rows.size(1), op.dz.size(1) / 2}),
      common, Kernel::tile_256, {Kernel::tile_256_pair, Kernel::tile_192_ping_pong});
}

template <class Element, GemmConfig kConfig, bool kMnMajor, Halves kHalves>
void launch_up(const UpBackward& op, GemmArguments<Element>& a, void* stream) {
  constexpr int kCount = kHalves == Halves::none ? 1 : 2;
  using Gemm = Operands<Element, kConfig, Left::rows, kMnMajor ? Right::panels : Right::rows, kHalves>;
  for (int half = 0; half < kCount; ++half) {
    const WeightHalf w = weight_half(op.w_up, kCount, half);
    a.right[half] = weight_map(w, 64, kMnMajor ? kTileK / Gemm::kCluster : Gemm::kTileN / 2);
    a.right_block = w.block_argument();
  }
  launch_gemm<Gemm, StoreEpilogue<Gemm, true>>(UpBackward::kName, a, static_cast<int>(ceil_div(a.n_size, Gemm::kTileN)),
                                               op.dz.device.index, stream);
}

template <class Element, Halves kHalves>
void launch_halves(const UpBackward& op, GemmArguments<Element>& a, Kernel kernel, void* stream) {
  // w_up (E, G*I, H) with H contiguous is MN-major here: n is H.
  if (!weight_half(op.w_up, 1, 0).in_contiguous()) return launch_up<Element, kTile256, false, kHalves>(op, a, stream);
  if constexpr (kCommon<Element>) {
    if (kernel == Kernel::tile_256_pair) return launch_up<Element, kTile256Pair, true, kHalves>(op, a, stream);
    if (kernel == Kernel::tile_192_ping_pong) return launch_up<Element, kTile192PingPong, true, kHalves>(op, a, stream);
  }
  launch_up<Element, kTile256, true, kHalves>(op, a, stream);
}

template <class Element>
void run_up(const UpBackward& op, const Execution& execution) {
  const Choice choice = choice_of(op);
  const int halves = halves_of(op.w_up);
  const std::int64_t width = op.dz.size(1) / halves;
  auto a = gemm_arguments<Element>(op.expert_offsets, op.dz.size(0), choice.raster);
  a.k_size = static_cast<int>(width);
  a.n_size = static_cast<int>(op.dx_rows.size(1));
  for (int half = 0; half < halves; ++half) a.left[half] = rows_map(op.dz, half * width, width, 128);
  a.store[0] = rows_map(op.dx_rows, 0, a.n_size);
  if (halves == 2) launch_halves<Element, Halves::along_k>(op, a, choice.kernel, execution.stream);
  else launch_halves<Element, Halves::none>(op, a, choice.kernel, execution.stream);
}

}  // namespace

std::size_t workspace_bytes(const UpBackward&) { return 0; }

void run(const UpBackward& op, const Execution& execution) {
  dispatch_half(op.dz.dtype, [&](auto tag) { run_up<typename decltype(tag)::type>(op, execution); });
}

std::string explain(const UpBackward& op) { return describe(choice_of(op)); }

}  // namespace intarsia::cuda::sm90
