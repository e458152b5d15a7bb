// load_balance_loss: c * sum_e f_e P_e over the valid tokens, f_e = slots that chose e / valid tokens, P_e = mean probability
// (softmax, or sigmoid over its sum for the sigmoid families); c = E (Hugging Face) or E / K (Megatron). f (E), logits (T, E).
// load_balance_loss_backward: dlogits, with f constant: dP_e = dloss * c * f_e / valid tokens.
// Forward in three launches: each token's softmax in two numbers; sums of probabilities and of slots over slices of tokens, for
// panels of 128 experts; the slices in order, in double. Backward in one: a warp for each token.
// Workspace of the forward: two numbers for each token, two for each slice and expert.
// Verify: intarsia-ops verify load_balance_loss, intarsia-ops verify load_balance_loss_backward
#include "cuda/routing/softmax.cuh"
#include "cuda/routing/sums.cuh"

namespace intarsia::cuda {
namespace {

constexpr int kBalanceWarps = 8;
constexpr int kPanelLanes = 4, kPanelExperts = kPanelLanes * kWarpSize;  // experts a lane and a block keep sums of

double coefficient(BalanceNormalisation normalisation, std::int64_t experts, std::int64_t experts_per_token) {
  const auto e = static_cast<double>(experts), k = static_cast<double>(experts_per_token);
  return normalisation == BalanceNormalisation::huggingface ? e : e / k;
}

template <class S>
struct Partial {
  S* probability;       // (slices, E)
  std::int32_t* slots;  // (slices, E)
  std::int32_t* valid;  // (slices)
};

// ---- kernels

template <class T, class S = Wide<T>>
__global__ void __launch_bounds__(kBalanceWarps* kWarpSize)
    softmax_kernel(const __grid_constant__ Rows<const T> logits, std::int64_t tokens, int experts,
                   const __grid_constant__ TokenMask mask, bool sigmoid_share, RowSoftmax<S>* softmax) {
  const std::int64_t t = std::int64_t{blockIdx.x} * kBalanceWarps + warp_index();
  if (t >= tokens) return;
  const RowSoftmax<S> row = warp_softmax(logits, t, experts, mask(t), sigmoid_share);
  if (lane_index() == 0) softmax[t] = row;
}

/// Grid (slices, panels). Warps take every eighth token; their sums are added in the order of the warps.
template <class T, class S = Wide<T>>
__global__ void __launch_bounds__(kBalanceWarps* kWarpSize)
    slice_kernel(const __grid_constant__ Rows<const T> logits, int experts, const __grid_constant__ Ids ids, int k_count,
                 bool sigmoid_share, const RowSoftmax<S>* softmax, TokenSlices slices, Partial<S> partial) {
  __shared__ S of_warp[kBalanceWarps][kPanelExperts];
  __shared__ int slots[kPanelExperts];
  const int first_expert = static_cast<int>(blockIdx.y) * kPanelExperts, panel = min(kPanelExperts, experts - first_expert);
  const std::int64_t first = slices.first(blockIdx.x), last = slices.last(blockIdx.x);
  for (int i = threadIdx.x; i < panel; i += kBalanceWarps * kWarpSize) slots[i] = 0;

  S sum[kPanelLanes] = {};
  int valid = 0;
  for (std::int64_t t = first + warp_index(); t < last; t += kBalanceWarps) {
    const RowSoftmax<S> row = softmax[t];
    if (!row.valid()) continue;
    ++valid;
#pragma unroll
    for (int i = 0; i < kPanelLanes; ++i)
      if (const int place = i * kWarpSize + lane_index(); place < panel)
        sum[i] += row(softmax_argument(static_cast<S>(widen(*logits.at(t, first_expert + place))), sigmoid_share));
  }
  for (int i = 0; i < kPanelLanes; ++i) of_warp[warp_index()][i * kWarpSize + lane_index()] = sum[i];
  __syncthreads();
  for (std::int64_t slot = first * k_count + threadIdx.x; slot < last * k_count; slot += kBalanceWarps * kWarpSize) {
    const int place = ids.expert(slot, experts) - first_expert;
    if (place >= 0 && place < panel && softmax[slot / k_count].valid()) atomicAdd(&slots[place], 1);
  }
  valid = block_reduce<kBalanceWarps>(lane_index() == 0 ? valid : 0, Add{});  // has the barriers that end the counting
  const std::int64_t row = std::int64_t{blockIdx.x} * experts + first_expert;
  for (int i = threadIdx.x; i < panel; i += kBalanceWarps * kWarpSize) {
    S total = S(0);
    for (int w = 0; w < kBalanceWarps; ++w) total += of_warp[w][i];
    partial.probability[row + i] = total;
    partial.slots[row + i] = slots[i];
  }
  if (blockIdx.y == 0 && threadIdx.x == 0) partial.valid[blockIdx.x] = valid;
}

constexpr int kTotalWarps = 32;

/// One block; a thread takes an expert.
template <class S>
__global__ void __launch_bounds__(kTotalWarps* kWarpSize)
    total_kernel(const __grid_constant__ Partial<S> partial, int slices, int experts, double c, S* loss, S* expert_fraction,
                 S* valid_tokens) {
  int valid = 0;
  for (int i = threadIdx.x; i < slices; i += kTotalWarps * kWarpSize) valid += partial.valid[i];
  valid = block_reduce<kTotalWarps>(valid, Add{});
  const double share = valid > 0 ? 1.0 / valid : 0.0;
  double mine = 0;
  for (int e = threadIdx.x; e < experts; e += kTotalWarps * kWarpSize) {
    double probability = 0;
    long long slots = 0;
#pragma unroll 8
    for (int i = 0; i < slices; ++i) {
      probability += partial.probability[std::int64_t{i} * experts + e];
      slots += partial.slots[std::int64_t{i} * experts + e];
    }
    const double fraction = static_cast<double>(slots) * share;
    expert_fraction[e] = static_cast<S>(fraction);
    mine += fraction * probability * share;
  }
  mine = block_reduce<kTotalWarps>(mine, Add{});
  if (threadIdx.x != 0) return;
  *loss = static_cast<S>(c * mine);
  *valid_tokens = static_cast<S>(valid);
}

template <class T, class D, class S = Wide<T>>
__global__ void __launch_bounds__(kBalanceWarps* kWarpSize)
    backward_kernel(const __grid_constant__ Rows<const T> logits, std::int64_t tokens, int experts,
                    const __grid_constant__ TokenMask mask, bool sigmoid_share, double c, const S* dloss,
                    const S* expert_fraction, const S* valid_tokens, const __grid_constant__ Rows<D> dlogits) {
  const std::int64_t t = std::int64_t{blockIdx.x} * kBalanceWarps + warp_index();
  if (t >= tokens) return;
  const RowSoftmax<S> softmax = warp_softmax(logits, t, experts, mask(t), sigmoid_share);
  const S valid = *valid_tokens;
  if (!softmax.valid() || !(valid > S(0))) {
    for (int e = lane_index(); e < experts; e += kWarpSize) *dlogits.at(t, e) = narrow<D>(S(0));
    return;
  }
  const S factor = static_cast<S>(*dloss * c / valid);
  const auto logit = [&](int e) { return static_cast<S>(widen(*logits.at(t, e))); };
  const auto p = [&](int e) { return softmax(softmax_argument(logit(e), sigmoid_share)); };
  S mean = S(0);
  for (int e = lane_index(); e < experts; e += kWarpSize) mean += factor * expert_fraction[e] * p(e);
  mean = warp_reduce(mean, Add{});
  for (int e = lane_index(); e < experts; e += kWarpSize) {
    S gradient = p(e) * (factor * expert_fraction[e] - mean);
    if (sigmoid_share) gradient *= sigmoid(-logit(e));  // d log sigmoid(l) = 1 - sigmoid(l)
    *dlogits.at(t, e) = narrow<D>(gradient);
  }
}

// ---- launchers

template <class S>
struct Scratch {
  RowSoftmax<S>* softmax;
  Partial<S> partial;
  Scratch(Workspace& workspace, const LoadBalanceLoss& op) : softmax(workspace.take<RowSoftmax<S>>(op.logits.size(0))) {
    const std::int64_t slices = TokenSlices(op.logits.size(0)).count, cells = slices * op.logits.size(1);
    partial.probability = workspace.take<S>(cells);
    partial.slots = workspace.take<std::int32_t>(cells);
    partial.valid = workspace.take<std::int32_t>(slices);
  }
};

}  // namespace

std::size_t workspace_bytes(const LoadBalanceLoss& op) {
  return dispatch_device_float(op.logits.dtype, [&](auto tag) {
    Workspace workspace;
    const Scratch<Wide<typename decltype(tag)::type>> scratch(workspace, op);
    return workspace.bytes();
  });
}
std::size_t workspace_bytes(const LoadBalanceLossBackward&) { return 0; }

std::string explain(const LoadBalanceLoss& op) {
  return "cuda: softmax, sums of " + std::to_string(TokenSlices(op.logits.size(0)).count) + " slices of tokens, total";
}
std::string explain(const LoadBalanceLossBackward&) { return "cuda: a warp for each token"; }

void run(const LoadBalanceLoss& op, const Execution& execution) {
  const DeviceGuard guard(op.logits.device.index);
  const cudaStream_t stream = stream_of(execution.stream);
  const TokenSlices slices(op.logits.size(0));
  const auto experts = static_cast<int>(op.logits.size(1)), k_count = static_cast<int>(op.ids.size(1));
  const bool shares = by_sigmoid(op.scores_kind);
  dispatch_device_float(op.logits.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using S = Wide<T>;
    Workspace workspace(execution.workspace);
    const Scratch<S> scratch(workspace, op);
    const Rows<const T> logits(op.logits);
    launch(LoadBalanceLoss::kName, softmax_kernel<T>, blocks(slices.tokens, kBalanceWarps), kBalanceWarps * kWarpSize, stream,
           0, logits, slices.tokens, experts, TokenMask(op.token_mask), shares, scratch.softmax);
    launch(LoadBalanceLoss::kName, slice_kernel<T>, dim3(static_cast<unsigned>(slices.count), blocks(experts, kPanelExperts)),
           kBalanceWarps * kWarpSize, stream, 0, logits, experts, Ids(op.ids), k_count, shares,
           static_cast<const RowSoftmax<S>*>(scratch.softmax), slices, scratch.partial);
    launch(LoadBalanceLoss::kName, total_kernel<S>, 1, kTotalWarps * kWarpSize, stream, 0, scratch.partial, slices.count,
           experts, coefficient(op.normalisation, experts, k_count), op.loss.as<S>(), op.expert_fraction.as<S>(),
           op.valid_tokens.as<S>());
  });
}

void run(const LoadBalanceLossBackward& op, const Execution& execution) {
  const DeviceGuard guard(op.logits.device.index);
  const std::int64_t tokens = op.logits.size(0), experts = op.logits.size(1);
  dispatch_device_float(op.logits.dtype, [&](auto logits_tag) {
    dispatch_device_float(op.dlogits.dtype, [&](auto tag) {
      using T = typename decltype(logits_tag)::type;
      using D = typename decltype(tag)::type;
      using S = Wide<T>;
      launch(LoadBalanceLossBackward::kName, backward_kernel<T, D>, blocks(tokens, kBalanceWarps), kBalanceWarps * kWarpSize,
             stream_of(execution.stream), 0, Rows<const T>(op.logits), tokens, static_cast<int>(experts),
             TokenMask(op.token_mask), by_sigmoid(op.scores_kind), coefficient(op.normalisation, experts, op.experts_per_token),
             op.dloss.as<const S>(), op.expert_fraction.as<const S>(), op.valid_tokens.as<const S>(), Rows<D>(op.dlogits));
    });
  });
}

}  // namespace intarsia::cuda
