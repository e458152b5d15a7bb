// The router's products as operations of one expert: logits = x w^T is a rows operation with all tokens, dx = dlogits w
// another, dw = dlogits^T x a weight operation whose "experts" are slices of the tokens, so that there is work for every
// SM; the slices' sums are added in order afterwards.
// Bytes: 2 T H read for logits and for dw, 2 T H written for dx; they bound the products for E up to about 200.
// Verify: routing_check --only router_logits
#include "cuda/sm90/router.h"

#include "cuda/sm90/epilogue_weight.h"
#include "cuda/sm90/launch.h"

namespace intarsia::cuda::sm90 {
namespace {

// Rings as deep as shared memory allows: x and dx stream from and to memory, products are short beside that.
constexpr GemmConfig kLogitsTile{.tile_n = 128, .stages = 7, .ping_pong = true};
constexpr GemmConfig kDxTile{.tile_n = 128, .stages = 5, .ping_pong = true, .store_tiles = 4, .store_round = 4};
constexpr GemmConfig kDwTile{.tile_n = 128, .stages = 6};

WeightHalf matrix(const TensorView& v) {
  return {v.data, v.dtype, 1, v.size(0), v.size(1), v.size(0) * v.step(0), v.step(0), 1, v.size(0), 0};
}

/// Arguments of one expert with all rows.
template <class Element>
GemmArguments<Element> one_expert(std::int64_t rows) {
  return gemm_arguments<Element>({nullptr, 1, static_cast<int>(rows), 0, 0, {}, static_cast<int>(rows)});
}

/// A bias (E) as that of the one expert.
template <class Element>
ExpertBias<Element> one_bias(const TensorView& bias) {
  if (!bias.defined()) return {};
  TensorView rows(bias.data, bias.dtype, {1, bias.size(0)}, bias.device);
  rows.stride[1] = bias.step(0);
  return ExpertBias<Element>(rows);
}

template <class Element, Halves kParts>
void launch_logits(const TensorView& x, const TensorView (&w)[kMostParts], int parts, const TensorView& bias,
                   const TensorView& logits, void* stream) {
  using Gemm = Operands<Element, kLogitsTile, Left::rows, Right::rows, kParts>;
  auto a = one_expert<Element>(x.size(0));
  a.k_size = static_cast<int>(x.size(1));
  a.n_size = static_cast<int>(logits.size(1));
  for (int p = 0; p < parts; ++p) {
    a.left[p] = rows_map(x, 0, a.k_size, 128);
    a.right[p] = weight_map(matrix(w[p]), 64, Gemm::kTileN / 2);
  }
  a.bias = one_bias<Element>(bias);
  a.logits = {logits.data, logits.step(0), logits.dtype == DType::float32};
  launch_gemm<Gemm, LogitsEpilogue<Gemm>>("router_logits", a, static_cast<int>(ceil_div(a.n_size, Gemm::kTileN)),
                                          x.device.index, stream);
}

template <Halves kParts>
void launch_dx(const TensorView (&left)[kMostParts], const TensorView (&right)[kMostParts], int parts, bool add,
               const TensorView& dx, void* stream) {
  using Gemm = Operands<__nv_bfloat16, kDxTile, Left::rows, Right::panels, kParts>;
  auto a = one_expert<__nv_bfloat16>(dx.size(0));
  a.k_size = static_cast<int>(left[0].size(1));
  a.n_size = static_cast<int>(dx.size(1));
  a.accumulate = add;
  for (int p = 0; p < parts; ++p) {
    a.left[p] = rows_map(left[p], 0, a.k_size, 128);
    a.right[p] = weight_map(matrix(right[p]), 64, kTileK);
  }
  a.store[0] = rows_map(dx, 0, a.n_size);
  launch_gemm<Gemm, StoreEpilogue<Gemm, true>>("router_logits_backward", a, static_cast<int>(ceil_div(a.n_size, Gemm::kTileN)),
                                               dx.device.index, stream);
}

/// Columns of a tile of dw: panels of 64 experts, those of one part after those of the other.
std::int64_t panels_of(std::int64_t experts, int parts) { return parts * ceil_div(experts, 64); }
bool narrow(std::int64_t experts, int parts) { return panels_of(experts, parts) <= 2; }

template <bool kNarrow, Halves kParts>
void launch_dw(const TensorView (&left)[kMostParts], int parts, const TensorView& x, const TensorView& row_token,
               const TokenSlices& slices, float* partial, void* stream) {
  constexpr GemmConfig kConfig = kNarrow ? kDwTile : kTile256;
  using Gemm = Operands<__nv_bfloat16, kConfig, Left::gathered_along_k, Right::ragged_panels, kParts>;
  const std::int64_t experts = left[0].size(1), hidden = x.size(1), plane = experts * hidden;
  auto a = one_expert<__nv_bfloat16>(x.size(0));
  a.schedule.experts = static_cast<int>(slices.slices);
  a.schedule.slice = static_cast<int>(slices.rows);
  a.gathered = SourceRows<__nv_bfloat16>(x, row_token);
  a.hidden = static_cast<int>(hidden);
  a.n_size = static_cast<int>(experts);
  for (int p = 0; p < parts; ++p) {
    a.right[p] = rows_map(left[p], 0, a.n_size, kTileK);
    a.store[p] = weight_map(
        WeightHalf{partial + p * plane, DType::float32, slices.slices, experts, hidden, parts * plane, hidden, 1, experts, 0},
        32, 32);
  }
  launch_gemm<Gemm, FloatWeightEpilogue<Gemm, true>>("router_logits_backward", a,
                                                     static_cast<int>(ceil_div(panels_of(experts, parts), Gemm::kTileN / 64)),
                                                     x.device.index, stream);
}

template <bool kNarrow>
void launch_parts(const TensorView (&left)[kMostParts], int parts, const TensorView& x, const TensorView& row_token,
                  const TokenSlices& slices, float* partial, void* stream) {
  if (parts == 1) launch_dw<kNarrow, Halves::none>(left, parts, x, row_token, slices, partial, stream);
  else launch_dw<kNarrow, Halves::along_n>(left, parts, x, row_token, slices, partial, stream);
}

}  // namespace

void run_router_logits(const TensorView& x, const TensorView (&w)[kMostParts], int parts, const TensorView& bias,
                       const TensorView& logits, void* stream) {
  dispatch_half(x.dtype, [&](auto tag) {
    using Element = typename decltype(tag)::type;
    if (parts == 1) launch_logits<Element, Halves::none>(x, w, parts, bias, logits, stream);
    else launch_logits<Element, Halves::along_k_three>(x, w, parts, bias, logits, stream);
  });
}

void run_router_dx(const TensorView (&left)[kMostParts], const TensorView (&right)[kMostParts], int parts, bool add,
                   const TensorView& dx, void* stream) {
  if (parts == 1) launch_dx<Halves::none>(left, right, parts, add, dx, stream);
  else if (parts == 2) launch_dx<Halves::along_k>(left, right, parts, add, dx, stream);
  else launch_dx<Halves::along_k_three>(left, right, parts, add, dx, stream);
}

TokenSlices token_slices(std::int64_t tokens, std::int64_t hidden, std::int64_t experts, int parts, int device) {
  constexpr std::int64_t kLeastRows = 512;  // below that a slice costs more than it gives
  const std::int64_t tiles = ceil_div(hidden, 128) * ceil_div(panels_of(experts, parts), narrow(experts, parts) ? 2 : 4);
  const std::int64_t wanted = device_figures(device).multiprocessors / tiles;
  const std::int64_t slices = std::clamp<std::int64_t>(wanted, 1, std::max<std::int64_t>(1, tokens / kLeastRows));
  const std::int64_t rows = std::max<std::int64_t>(1, ceil_div(ceil_div(tokens, slices), kTileK)) * kTileK;
  return {std::max<std::int64_t>(1, ceil_div(tokens, rows)), rows};
}

void run_router_dw(const TensorView (&left)[kMostParts], int parts, const TensorView& x, const TensorView& row_token,
                   const TokenSlices& slices, float* partial, void* stream) {
  if (narrow(left[0].size(1), parts)) launch_parts<true>(left, parts, x, row_token, slices, partial, stream);
  else launch_parts<false>(left, parts, x, row_token, slices, partial, stream);
}

}  // namespace intarsia::cuda::sm90
