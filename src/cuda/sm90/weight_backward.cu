// down_weight_backward: dw_down[e] = grad_scale dy[row_token]^T a'.    m = H, n = I,   k = r_e
// up_weight_backward:   dw_up[e] = grad_scale dz^T x[row_token].       m = H, n = G*I, k = r_e, stored transposed
// The left operand is gathered along k; the right one is the expert's rows, zeros past its end. Experts without rows get zeros.
// Bytes: 2 R H gathered, 2 R I (or 2 R G I), and the gradient. H, I multiples of 8; 16-bit or fp32 gradients. Verify:
// gemm_check down_weight_backward, gemm_check up_weight_backward
#include "cuda/sm90/epilogue_weight.h"
#include "cuda/sm90/launch.h"
#include "cuda/sm90/sm90.h"

namespace intarsia::cuda::sm90 {
namespace {

Choice settled_choice(Product product, const Shape& shape, const Weights& gradient) {
  return settled(choose(product, shape), gradient.weight.dtype == DType::bfloat16, Kernel::tile_256, {Kernel::tile_256_pair});
}
Choice choice_of(const DownWeightBackward& op) {
  return settled_choice(Product::down_weight_backward,
                        {op.a_scaled.size(0), op.expert_offsets.size(0) - 1, op.dy.size(1), op.a_scaled.size(1)}, op.dw_down);
}
Choice choice_of(const UpWeightBackward& op) {
  return settled_choice(Product::up_weight_backward,
                        {op.dz.size(0), op.expert_offsets.size(0) - 1, op.x.size(1), op.dz.size(1) / 2}, op.dw_up);
}

/// Both gradients: `halves` matrices, m along `m_in` ? the weight's in axis : its out axis.
struct WeightProduct {
  const char* name;
  const TensorView &gathered, &row_token, &rows, &expert_offsets;
  const Weights& gradient;
  int halves;
  bool m_is_in;
  bool accumulate;
  double grad_scale;
  Choice choice;
};

template <class Element, GemmConfig kConfig, Halves kHalves, bool kFloat, bool kTransposed>
void launch_weight(const WeightProduct& p, GemmArguments<Element>& a, void* stream) {
  using Gemm = Operands<Element, kConfig, Left::gathered_along_k, Right::ragged_panels, kHalves>;
  constexpr int kInner = kFloat ? 32 : 64, kRows = kFloat && kTransposed ? 32 : 64;
  for (int half = 0; half < p.halves; ++half) {
    const WeightHalf w = weight_half(p.gradient, p.halves, half);
    a.store[half] = weight_map(w, kInner, kRows);
    a.store_block = w.in_contiguous() ? w.block_argument() : std::numeric_limits<int>::max();
    a.right[half] = rows_map(p.rows, half * a.n_size, a.n_size, kTileK / Gemm::kCluster);
  }
  const std::int64_t panels = p.halves * ceil_div(a.n_size, 64);
  launch_gemm<Gemm, std::conditional_t<kFloat, FloatWeightEpilogue<Gemm, kTransposed>, WeightEpilogue<Gemm, kTransposed>>>(
      p.name, a, static_cast<int>(ceil_div(panels, Gemm::kTileN / 64)), p.gathered.device.index, stream);
}

/// 16-bit gradients.
template <class Element, Halves kHalves, bool kTransposed>
void launch_half(const WeightProduct& p, GemmArguments<Element>& a, void* stream) {
  if constexpr (kCommon<Element>)
    if (p.choice.kernel == Kernel::tile_256_pair)
      return launch_weight<Element, kTile256Pair, kHalves, false, kTransposed>(p, a, stream);
  launch_weight<Element, kTile256, kHalves, false, kTransposed>(p, a, stream);
}

template <class Element, Halves kHalves>
void run_weight(const WeightProduct& p, void* stream) {
  auto a = gemm_arguments<Element>(p.expert_offsets, p.rows.size(0), p.choice.raster);
  a.gathered = SourceRows<Element>(p.gathered, p.row_token);
  a.hidden = static_cast<int>(p.gathered.size(1));
  a.n_size = static_cast<int>(p.rows.size(1) / p.halves);
  a.accumulate = p.accumulate;
  a.grad_scale = static_cast<float>(p.grad_scale);
  const bool transposed = weight_half(p.gradient, 1, 0).in_contiguous() == p.m_is_in,
             is_float = p.gradient.weight.dtype == DType::float32;
  if (is_float) {
    if (transposed) return launch_weight<Element, kTile256, kHalves, true, true>(p, a, stream);
    return launch_weight<Element, kTile256, kHalves, true, false>(p, a, stream);
  }
  if (transposed) return launch_half<Element, kHalves, true>(p, a, stream);
  launch_half<Element, kHalves, false>(p, a, stream);
}

void run_product(const WeightProduct& p, void* stream) {
  dispatch_half(p.gathered.dtype, [&](auto tag) {
    using Element = typename decltype(tag)::type;
    if (p.halves == 2) run_weight<Element, Halves::along_n>(p, stream);
    else run_weight<Element, Halves::none>(p, stream);
  });
}

}  // namespace

std::size_t workspace_bytes(const DownWeightBackward&) { return 0; }
std::size_t workspace_bytes(const UpWeightBackward&) { return 0; }

void run(const DownWeightBackward& op, const Execution& execution) {
  run_product({DownWeightBackward::kName, op.dy, op.row_token, op.a_scaled, op.expert_offsets, op.dw_down, 1, false,
               op.accumulate, op.grad_scale, choice_of(op)},
              execution.stream);
}

void run(const UpWeightBackward& op, const Execution& execution) {
  const int halves = halves_of(op.dw_up);
  run_product({UpWeightBackward::kName, op.x, op.row_token, op.dz, op.expert_offsets, op.dw_up, halves, true, op.accumulate,
               op.grad_scale, choice_of(op)},
              execution.stream);
}

std::string explain(const DownWeightBackward& op) { return describe(choice_of(op)); }
std::string explain(const UpWeightBackward& op) { return describe(choice_of(op)); }

}  // namespace intarsia::cuda::sm90
