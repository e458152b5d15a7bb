// update_expert_bias: bias[e] += rate * sign(mean(counts) - counts[e]), exactly nothing at balance. counts, bias (E).
// counts[e] * E is compared with the total: no division, no rounding below 2^53. One block; any E. No workspace.
// Verify: intarsia-ops verify update_expert_bias                          (DeepSeek-V3, auxiliary-loss-free balancing)
#include "cuda/routing/kernel.cuh"

namespace intarsia::cuda {
namespace {

// ---- kernels

constexpr int kUpdateWarps = 32;

__global__ void __launch_bounds__(kUpdateWarps* kWarpSize)
    update_kernel(const __grid_constant__ AnyRows counts, std::int64_t experts, double rate,
                  const __grid_constant__ AnyRows bias) {
  double total = 0;
  for (std::int64_t e = threadIdx.x; e < experts; e += kUpdateWarps * kWarpSize) total += counts.load<double>(e);
  total = block_reduce<kUpdateWarps>(total, Add{});
  for (std::int64_t e = threadIdx.x; e < experts; e += kUpdateWarps * kWarpSize) {
    const double share = counts.load<double>(e) * static_cast<double>(experts);
    const double sign = share < total ? 1 : share > total ? -1 : 0;
    bias.store(bias.load<double>(e) + rate * sign, e);
  }
}

}  // namespace

// ---- launchers

std::size_t workspace_bytes(const UpdateExpertBias&) { return 0; }

std::string explain(const UpdateExpertBias&) { return "cuda: one block"; }

void run(const UpdateExpertBias& op, const Execution& execution) {
  const DeviceGuard guard(op.bias.device.index);
  launch(UpdateExpertBias::kName, update_kernel, 1, kUpdateWarps * kWarpSize, stream_of(execution.stream), 0,
         AnyRows(op.counts), op.counts.size(0), op.rate, AnyRows(op.bias));
}

}  // namespace intarsia::cuda
