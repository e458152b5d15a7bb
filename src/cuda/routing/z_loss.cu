// z_loss: mean over the valid tokens of logsumexp(logits)^2.   logits (T, E), loss (1), valid_tokens (1).          (ST-MoE)
// z_loss_backward: dlogits = dloss * 2 logsumexp * softmax / valid tokens; zeros for the other tokens.
// A warp takes a token. Sums over tokens in double, slice by slice in a fixed order: two launches forward, one backward.
// Workspace: two sums for each slice. Verify: intarsia-ops verify z_loss, intarsia-ops verify z_loss_backward
#include "cuda/routing/softmax.cuh"
#include "cuda/routing/sums.cuh"

namespace intarsia::cuda {
namespace {

constexpr int kLossWarps = 8;

struct Sums {
  double squares, valid;
};

// ---- kernels

/// A block adds up a slice.
template <class T>
__global__ void __launch_bounds__(kLossWarps* kWarpSize)
    square_kernel(const __grid_constant__ Rows<const T> logits, int experts, const __grid_constant__ TokenMask mask,
                  TokenSlices slices, Sums* sums) {
  Sums mine{0, 0};
  for (std::int64_t t = slices.first(blockIdx.x) + warp_index(); t < slices.last(blockIdx.x); t += kLossWarps) {
    const auto softmax = warp_softmax(logits, t, experts, mask(t), false);
    if (!softmax.valid()) continue;
    const double lse = softmax.log_sum_exp();
    mine.squares += lse * lse;
    mine.valid += 1;
  }
  const double share = lane_index() == 0 ? 1 : 0;  // all lanes of a warp hold the same sums
  const double squares = block_reduce<kLossWarps>(mine.squares * share, Add{});
  const double valid = block_reduce<kLossWarps>(mine.valid * share, Add{});
  if (threadIdx.x == 0) sums[blockIdx.x] = {squares, valid};
}

template <class S>
__global__ void __launch_bounds__(kLossWarps* kWarpSize) mean_kernel(const Sums* sums, int count, S* loss, S* valid_tokens) {
  Sums mine{0, 0};
  for (int i = threadIdx.x; i < count; i += kLossWarps * kWarpSize) {
    mine.squares += sums[i].squares;
    mine.valid += sums[i].valid;
  }
  const double squares = block_reduce<kLossWarps>(mine.squares, Add{}), valid = block_reduce<kLossWarps>(mine.valid, Add{});
  if (threadIdx.x != 0) return;
  *loss = static_cast<S>(valid > 0 ? squares / valid : 0);
  *valid_tokens = static_cast<S>(valid);
}

template <class T, class D, class S = Wide<T>>
__global__ void __launch_bounds__(kLossWarps* kWarpSize)
    backward_kernel(const __grid_constant__ Rows<const T> logits, std::int64_t tokens, int experts,
                    const __grid_constant__ TokenMask mask, const S* dloss, const S* valid_tokens,
                    const __grid_constant__ Rows<D> dlogits) {
  const std::int64_t t = std::int64_t{blockIdx.x} * kLossWarps + warp_index();
  if (t >= tokens) return;
  const RowSoftmax<S> softmax = warp_softmax(logits, t, experts, mask(t), false);
  const S valid = *valid_tokens;
  const S weight = softmax.valid() && valid > S(0) ? *dloss * S(2) / valid * softmax.log_sum_exp() : S(0);
  for (int e = lane_index(); e < experts; e += kWarpSize)
    *dlogits.at(t, e) = narrow<D>(softmax.valid() ? weight * softmax(static_cast<S>(widen(*logits.at(t, e)))) : S(0));
}

}  // namespace

// ---- launchers

std::size_t workspace_bytes(const ZLoss& op) { return align_up(TokenSlices(op.logits.size(0)).count * sizeof(Sums)); }
std::size_t workspace_bytes(const ZLossBackward&) { return 0; }

std::string explain(const ZLoss& op) {
  return "cuda: a warp for each token, " + std::to_string(TokenSlices(op.logits.size(0)).count) + " slices of tokens";
}
std::string explain(const ZLossBackward&) { return "cuda: a warp for each token"; }

void run(const ZLoss& op, const Execution& execution) {
  const DeviceGuard guard(op.logits.device.index);
  const cudaStream_t stream = stream_of(execution.stream);
  const TokenSlices slices(op.logits.size(0));
  auto* const sums = reinterpret_cast<Sums*>(execution.workspace);
  dispatch_device_float(op.logits.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using S = Wide<T>;
    launch(ZLoss::kName, square_kernel<T>, static_cast<unsigned>(slices.count), kLossWarps * kWarpSize, stream, 0,
           Rows<const T>(op.logits), static_cast<int>(op.logits.size(1)), TokenMask(op.token_mask), slices, sums);
    launch(ZLoss::kName, mean_kernel<S>, 1, kLossWarps * kWarpSize, stream, 0, static_cast<const Sums*>(sums), slices.count,
           op.loss.as<S>(), op.valid_tokens.as<S>());
  });
}

void run(const ZLossBackward& op, const Execution& execution) {
  const DeviceGuard guard(op.logits.device.index);
  dispatch_device_float(op.logits.dtype, [&](auto logits_tag) {
    dispatch_device_float(op.dlogits.dtype, [&](auto tag) {
      using T = typename decltype(logits_tag)::type;
      using D = typename decltype(tag)::type;
      using S = Wide<T>;
      const std::int64_t tokens = op.logits.size(0);
      launch(ZLossBackward::kName, backward_kernel<T, D>, blocks(tokens, kLossWarps), kLossWarps * kWarpSize,
             stream_of(execution.stream), 0, Rows<const T>(op.logits), tokens, static_cast<int>(op.logits.size(1)),
             TokenMask(op.token_mask), op.dloss.as<const S>(), op.valid_tokens.as<const S>(), Rows<D>(op.dlogits));
    });
  });
}

}  // namespace intarsia::cuda
