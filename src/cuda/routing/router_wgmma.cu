// logits = x w^T with an fp32 w as three bfloat16 parts. dx = dlogits w and dw = dlogits^T x are as exact as the router's
// weight: beside a 16-bit w fp32 dlogits are rounded to 16 bits, beside an fp32 one both enter as two parts, 16 bits of each.
// fp32 accumulation. dw is summed slice by slice of the tokens, the slices added in order. Launches: logits 1 (and 1 to split
// w); backward 1 to split dlogits, 1 for dx, 2 for dw. Workspace: the parts, dw's slices. Verify: routing_check --only
// router_logits
#include "cuda/routing/router_wgmma.h"

#include "cuda/reason.h"
#include "cuda/routing/product.cuh"
#include "cuda/routing/router_parts.h"
#if defined(INTARSIA_SM90)
#include "cuda/sm90/router.h"
#endif

namespace intarsia::cuda::wgmma {

#if defined(INTARSIA_SM90)
namespace {

using sm90::kMostParts;

constexpr int kExactParts = 3, kGradientParts = 2;

int parts_of(const TensorView& v, int parts) { return v.dtype == DType::float32 ? parts : 1; }

class Reason : public cuda::Reason {
 public:
  Reason(const TensorView& x, std::int64_t experts) : cuda::Reason("wgmma") {
    const DeviceFigures& d = device_figures(x.device.index);
    need(d.major == 9,
         "they need compute capability 9.0, this device has " + std::to_string(d.major) + "." + std::to_string(d.minor));
    need(x.size(0) > 0 && experts > 0, "there are no tokens or no experts");
    chunks("H", x.size(1));
    rows("x", x);
  }
  /// Tensor maps have no rows that overlap.
  void rows(const char* name, const TensorView& v) {
    cuda::Reason::rows(name, v);
    if (v.defined()) need(v.step(0) >= v.size(1), std::string(name) + ": rows must not overlap");
  }
};

/// dlogits that products can take as they lie.
bool taken_as_they_are(const TensorView& dlogits) {
  return dlogits.dtype == DType::bfloat16 && dlogits.step(1) == 1 && dlogits.step(0) % kChunk == 0 &&
         dlogits.step(0) >= dlogits.size(1) && on_chunk(dlogits.data);
}

/// The pieces of the workspace of router_logits_backward.
struct Pieces {
  std::byte *dlogits, *w;
  std::int32_t* token = nullptr;
  float* partial = nullptr;
  sm90::TokenSlices slices{};
  int dlogits_parts, w_parts;
  std::size_t bytes;

  Pieces(const RouterLogitsBackward& op, std::byte* memory)
      : dlogits_parts(op.w_router.dtype == DType::float32 ? parts_of(op.dlogits, kGradientParts) : 1),
        w_parts(parts_of(op.w_router, kGradientParts)) {
    const std::int64_t tokens = op.dlogits.size(0), experts = op.dlogits.size(1), hidden = op.x.size(1);
    Workspace space(memory);
    const auto take = [&](std::size_t n) { return space.take<std::byte>(static_cast<std::int64_t>(n)); };
    dlogits = take(taken_as_they_are(op.dlogits) ? 0 : parts_bytes(tokens, experts, dlogits_parts));
    w = take(op.dx.defined() && w_parts > 1 ? parts_bytes(experts, hidden, w_parts) : 0);
    if (op.dw_router.defined()) {
      token = space.take<std::int32_t>(tokens);
      slices = sm90::token_slices(tokens, hidden, experts, dlogits_parts, op.x.device.index);
      partial = space.take<float>(slices.slices * dlogits_parts * experts * hidden);
    }
    bytes = space.bytes();
  }
};

void run_dx(const RouterLogitsBackward& op, const Pieces& pieces, const TensorView (&dlogits)[kMostParts], void* stream) {
  TensorView w[kMostParts] = {op.w_router};
  if (pieces.w_parts > 1) split_rows(RouterLogitsBackward::kName, op.w_router, pieces.w_parts, pieces.w, w, nullptr, stream);
  TensorView left[kMostParts], right[kMostParts];
  int pairs = 0;
  for (int i = 0; i < pieces.dlogits_parts; ++i)
    for (int j = 0; j < pieces.w_parts; ++j) {
      if (i + j >= kGradientParts) continue;  // below the last bit that is kept
      left[pairs] = dlogits[i];
      right[pairs++] = w[j];
    }
  sm90::run_router_dx(left, right, pairs, op.add_to_dx, op.dx, stream);
}

/// dw_router = the slices' and parts' sums in order.
void run_dw(const RouterLogitsBackward& op, const Pieces& pieces, const TensorView (&dlogits)[kMostParts], void* stream) {
  const TensorView token(pieces.token, DType::int32, {op.x.size(0)}, op.x.device);
  sm90::run_router_dw(dlogits, pieces.dlogits_parts, op.x, token, pieces.slices, pieces.partial, stream);
  const AnyRows absent{TensorView()};
  const Product sums{absent,
                     absent,
                     op.dw_router,
                     absent,
                     op.dw_router.size(0),
                     op.dw_router.size(1),
                     0,
                     0,
                     static_cast<int>(pieces.slices.slices) * pieces.dlogits_parts,
                     pieces.partial};
  launch(RouterLogitsBackward::kName, sum_kernel<float>, blocks(sums.m * sums.n, kSumThreads), kSumThreads, stream_of(stream),
         0, sums);
}

}  // namespace

bool supports(const RouterLogits& op, std::string* why_not) {
  Reason r(op.x, op.w_router.size(0));
  r.need(op.x.dtype == DType::bfloat16 || (op.x.dtype == DType::float16 && op.w_router.dtype == op.x.dtype),
         "they take bfloat16 x, or float16 x and w_router");
  if (op.w_router.dtype != DType::float32) r.rows("w_router", op.w_router);
  r.need(op.logits.step(1) == 1 && on_chunk(op.logits.data), "logits: must be contiguous rows from a multiple of 16 bytes on");
  return r.verdict(why_not);
}

bool supports(const RouterLogitsBackward& op, std::string* why_not) {
  Reason r(op.x, op.w_router.size(0));
  r.need(op.x.dtype == DType::bfloat16, "they take bfloat16 x");
  r.need(op.dx.defined() || op.dw_router.defined(), "neither dx nor dw_router is asked for");
  r.rows("dx", op.dx);
  if (op.dx.defined() && op.w_router.dtype != DType::float32) r.rows("w_router", op.w_router);
  return r.verdict(why_not);
}

std::size_t workspace_bytes(const RouterLogits& op) {
  const int parts = parts_of(op.w_router, kExactParts);
  return parts > 1 ? parts_bytes(op.w_router.size(0), op.w_router.size(1), parts) : 0;
}

std::size_t workspace_bytes(const RouterLogitsBackward& op) { return Pieces(op, nullptr).bytes; }

void run(const RouterLogits& op, const Execution& execution) {
  const int parts = parts_of(op.w_router, kExactParts);
  TensorView w[kMostParts] = {op.w_router};
  if (parts > 1) split_rows(RouterLogits::kName, op.w_router, parts, execution.workspace, w, nullptr, execution.stream);
  sm90::run_router_logits(op.x, w, parts, op.bias, op.logits, execution.stream);
}

void run(const RouterLogitsBackward& op, const Execution& execution) {
  const Pieces pieces(op, execution.workspace);
  TensorView dlogits[kMostParts] = {op.dlogits};
  const int parts = taken_as_they_are(op.dlogits) ? 0 : pieces.dlogits_parts;
  if (parts > 0 || pieces.token)
    split_rows(RouterLogitsBackward::kName, op.dlogits, parts, pieces.dlogits, dlogits, pieces.token, execution.stream);
  if (op.dx.defined()) run_dx(op, pieces, dlogits, execution.stream);
  if (op.dw_router.defined()) run_dw(op, pieces, dlogits, execution.stream);
}

#else

namespace {
bool none(std::string* why_not) {
  if (why_not) *why_not = "this build has none";
  return false;
}
}  // namespace

bool supports(const RouterLogits&, std::string* why_not) { return none(why_not); }
bool supports(const RouterLogitsBackward&, std::string* why_not) { return none(why_not); }
std::size_t workspace_bytes(const RouterLogits&) { return 0; }
std::size_t workspace_bytes(const RouterLogitsBackward&) { return 0; }
void run(const RouterLogits&, const Execution&) {}
void run(const RouterLogitsBackward&, const Execution&) {}

#endif

}  // namespace intarsia::cuda::wgmma
