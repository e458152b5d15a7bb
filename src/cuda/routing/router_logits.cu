// router_logits: logits = x w_router^T + bias.   x (T, H), w_router (E, H), bias (E), logits (T, E).
// router_logits_backward: dx = dlogits w_router, dw_router = dlogits^T x, dbias = column sums of dlogits.
// On Hopper bfloat16 x, and float16 logits of a float16 weight, run on wgmma (router_wgmma.h). Elsewhere products are on the
// tensor cores by mma.sync (mma_product.cuh) for bfloat16 and float16 x, fp32 weights and gradients included; plain FMAs for
// float32 and float64 (product.cuh). fp32 accumulation. k is cut into slices by the shapes alone where tiles are few (T for
// dw_router), partial sums added in order: the same bits every run. Any T, H, E and strides. One launch a product, one more
// where k is cut. Workspace: the partial sums. Bytes moved: x, w_router and logits once; the products are bound by x (2 T H
// bytes) for E up to about 200. Verify: intarsia-ops verify router_logits, intarsia-ops verify router_logits_backward
#include "cuda/routing/mma_product.cuh"
#include "cuda/routing/router_parts.h"
#include "cuda/routing/router_wgmma.h"

namespace intarsia::cuda {
namespace {

constexpr std::int64_t kLeastSlice = 256;  // of k: below that a slice costs more than it gives

// ---- kernels

constexpr int kColumnWarps = 8;

/// Grid (groups of 32 columns, slices): sums of a slice of rows -> partial (slices, 1, n) of p, whose a is (m = n, k = rows).
template <class S>
__global__ void __launch_bounds__(kColumnWarps* kWarpSize) column_kernel(const __grid_constant__ Product p) {
  __shared__ S of_warp[kColumnWarps][kWarpSize];
  const std::int64_t column = std::int64_t{blockIdx.x} * kWarpSize + lane_index();
  const std::int64_t first = blockIdx.y * p.slice, last = min(first + p.slice, static_cast<std::int64_t>(p.k));
  S sum = S(0);
  if (column < p.n) {
#pragma unroll 4
    for (std::int64_t t = first + warp_index(); t < last; t += kColumnWarps) sum += p.a.load<S>(t, column);
  }
  of_warp[warp_index()][lane_index()] = sum;
  __syncthreads();
  if (warp_index() != 0 || column >= p.n) return;
  sum = S(0);
  for (int w = 0; w < kColumnWarps; ++w) sum += of_warp[w][lane_index()];
  static_cast<S*>(p.partial)[blockIdx.y * p.n + column] = sum;
}

// ---- the products

AnyRows absent() { return AnyRows(TensorView()); }
AnyRows row_vector(const TensorView& v) { return AnyRows(v).transposed(); }

bool on_tensor_cores(DType x) { return x == DType::bfloat16 || x == DType::float16; }

Product logits_product(const RouterLogits& op) {
  Product p{op.x,
            AnyRows(op.w_router).transposed(),
            op.logits,
            row_vector(op.bias),
            op.x.size(0),
            op.w_router.size(0),
            op.x.size(1),
            0,
            1,
            nullptr};
  cut_k(p, mma_tiles(p), 2 * kLeastSlice);
  return p;
}
Product dx_product(const RouterLogitsBackward& op) {
  Product p{op.dlogits, op.w_router, op.dx, absent(), op.dlogits.size(0), op.x.size(1), op.dlogits.size(1), 0, 1, nullptr};
  p.slice = ceil_div(std::max<std::int64_t>(1, p.k), 64) * 64;
  p.add = op.add_to_dx;
  return p;
}
Product dw_product(const RouterLogitsBackward& op) {
  Product p{AnyRows(op.dlogits).transposed(),
            op.x,
            op.dw_router,
            absent(),
            op.dlogits.size(1),
            op.x.size(1),
            op.x.size(0),
            0,
            1,
            nullptr};
  cut_k(p, mma_tiles(p), kLeastSlice);
  return p;
}
/// Columns of dlogits; always through partial sums, because column_kernel writes nothing else.
Product dbias_product(const RouterLogitsBackward& op) {
  Product p{op.dlogits, absent(), row_vector(op.dbias), absent(), 1, op.dlogits.size(1), op.dlogits.size(0), 0, 1, nullptr};
  cut_k(p, ceil_div(p.n, kWarpSize), kLeastSlice);
  return p;
}

/// x w_router^T: both operands run along k. Few experts get narrower tiles.
template <class T, int kXParts, int kWeightParts>
void launch_logits(const Product& p, cudaStream_t stream) {
  if (p.n <= 64) launch_mma<T, MmaConfig<true, true, kXParts, kWeightParts, 64>>(RouterLogits::kName, p, stream);
  else launch_mma<T, MmaConfig<true, true, kXParts, kWeightParts, 128>>(RouterLogits::kName, p, stream);
}

void launch_logits(const Product& p, DType x, cudaStream_t stream) {
  const bool wide = p.b.dtype == DType::float32;
  if (x == DType::float64) launch_plain_product<double>(RouterLogits::kName, p, stream);
  else if (x == DType::float32) launch_plain_product<float>(RouterLogits::kName, p, stream);
  else if (x == DType::bfloat16 && wide) launch_logits<__nv_bfloat16, 1, 3>(p, stream);
  else if (x == DType::bfloat16) launch_logits<__nv_bfloat16, 1, 1>(p, stream);
  else if (wide) launch_logits<__nv_bfloat16, 2, 3>(p, stream);
  else launch_logits<__half, 1, 1>(p, stream);
}

/// dlogits w_router (kLeftAlongK) or dlogits^T x: the right operand runs along n.
template <class T, bool kLeftAlongK, int kLeftParts, int kRightParts>
void launch_gradient(const Product& p, cudaStream_t stream) {
  launch_mma<T, MmaConfig<kLeftAlongK, false, kLeftParts, kRightParts, 128>>(RouterLogitsBackward::kName, p, stream);
}

template <bool kLeftAlongK>
void launch_gradient(const Product& p, DType x, cudaStream_t stream) {
  const bool left_wide = p.a.dtype == DType::float32, right_wide = p.b.dtype == DType::float32;
  if (x == DType::float64) launch_plain_product<double>(RouterLogitsBackward::kName, p, stream);
  else if (x == DType::float32) launch_plain_product<float>(RouterLogitsBackward::kName, p, stream);
  else if (!left_wide && !right_wide && x == DType::bfloat16) launch_gradient<__nv_bfloat16, kLeftAlongK, 1, 1>(p, stream);
  else if (!left_wide && !right_wide) launch_gradient<__half, kLeftAlongK, 1, 1>(p, stream);
  else if (x == DType::bfloat16 && !right_wide) launch_gradient<__nv_bfloat16, kLeftAlongK, 2, 1>(p, stream);
  else
    launch_gradient<__nv_bfloat16, kLeftAlongK, 2, 2>(p, stream);  // exact enough for a bfloat16 or float16 beside an fp32 too
}

template <class Op>
std::string explain_products(const Op& op) {
  std::string why_not;
  if (wgmma::supports(op, &why_not)) return "cuda: wgmma, fp32 operands in bfloat16 parts";
  return (on_tensor_cores(op.x.dtype) ? "cuda: mma.sync, fp32 operands in bfloat16 parts"
                                      : "cuda: plain products in " + std::string(to_string(op.x.dtype))) +
         "; no wgmma kernels: " + why_not;
}

std::size_t partial_bytes(const Product& p, DType x) {
  return x == DType::float64 ? partial_bytes<double>(p) : partial_bytes<float>(p);
}

/// A number for each token: whether it takes part in dw_router.
std::size_t taking_part_bytes(const RouterLogitsBackward& op) {
  return align_up(static_cast<std::size_t>(op.x.size(0)) * sizeof(std::int32_t));
}

std::size_t dbias_bytes(const RouterLogitsBackward& op) {
  const Product p = dbias_product(op);
  return align_up(static_cast<std::size_t>(p.slices * p.n) * (op.x.dtype == DType::float64 ? 8 : 4));
}

template <class S>
void launch_dbias(Product p, cudaStream_t stream) {
  const dim3 grid(blocks(p.n, kWarpSize), static_cast<unsigned>(p.slices));
  launch(RouterLogitsBackward::kName, column_kernel<S>, grid, kColumnWarps * kWarpSize, stream, 0, p);
  launch(RouterLogitsBackward::kName, sum_kernel<S>, blocks(p.n, kSumThreads), kSumThreads, stream, 0, p);
}

}  // namespace

// ---- launchers

std::size_t workspace_bytes(const RouterLogits& op) {
  return wgmma::supports(op) ? wgmma::workspace_bytes(op) : partial_bytes(logits_product(op), op.x.dtype);
}

std::size_t workspace_bytes(const RouterLogitsBackward& op) {
  std::size_t bytes = op.dbias.defined() ? dbias_bytes(op) : 0;
  if (wgmma::supports(op)) bytes = std::max(bytes, wgmma::workspace_bytes(op));
  else if (op.dw_router.defined()) bytes = std::max(bytes, taking_part_bytes(op) + partial_bytes(dw_product(op), op.x.dtype));
  return bytes;
}

std::string explain(const RouterLogits& op) { return explain_products(op); }
std::string explain(const RouterLogitsBackward& op) { return explain_products(op); }

void run(const RouterLogits& op, const Execution& execution) {
  const DeviceGuard guard(op.x.device.index);
  if (wgmma::supports(op)) return wgmma::run(op, execution);
  Product p = logits_product(op);
  p.partial = execution.workspace;
  launch_logits(p, op.x.dtype, stream_of(execution.stream));
}

void run(const RouterLogitsBackward& op, const Execution& execution) {
  const DeviceGuard guard(op.x.device.index);
  const cudaStream_t stream = stream_of(execution.stream);
  if (wgmma::supports(op)) {
    wgmma::run(op, execution);
  } else {
    if (op.dx.defined()) launch_gradient<true>(dx_product(op), op.x.dtype, stream);
    if (op.dw_router.defined()) {
      Product p = dw_product(op);
      auto* const token = reinterpret_cast<std::int32_t*>(execution.workspace);
      split_rows(RouterLogitsBackward::kName, op.dlogits, 0, nullptr, nullptr, token, execution.stream);
      p.taking_part = token;
      p.partial = execution.workspace + taking_part_bytes(op);
      launch_gradient<false>(p, op.x.dtype, stream);
    }
  }
  if (op.dbias.defined()) {  // after the others in the stream: it may take the same workspace
    Product p = dbias_product(op);
    p.partial = execution.workspace;
    if (op.x.dtype == DType::float64) launch_dbias<double>(p, stream);
    else launch_dbias<float>(p, stream);
  }
}

}  // namespace intarsia::cuda
