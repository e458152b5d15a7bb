// update_expert_bias: bias[e] += rate * sign(mean(counts) - counts[e]), exactly nothing at balance. counts, bias (E).
// Serial: E additions.
// Verify: intarsia-ops verify update_expert_bias                                       (DeepSeek-V3, auxiliary-loss-free
// balancing)
#include "cpu/cpu.h"
#include "intarsia/error.h"

namespace intarsia::cpu {
namespace {

template <class Count>
void update(const UpdateExpertBias& op) {
  const std::int64_t experts = op.counts.size(0);
  const auto count = [&](std::int64_t e) { return static_cast<double>(op.counts.as<const Count>()[e * op.counts.step(0)]); };
  double total = 0;
  for (std::int64_t e = 0; e < experts; ++e) total += count(e);
  for (std::int64_t e = 0; e < experts; ++e) {
    const double share = count(e) * static_cast<double>(experts);  // compared with the total: no division, no rounding
    const double sign = share < total ? 1 : share > total ? -1 : 0;
    float& bias = op.bias.as<float>()[e * op.bias.step(0)];
    bias = static_cast<float>(bias + op.rate * sign);
  }
}

}  // namespace

std::size_t workspace_bytes(const UpdateExpertBias&, int) { return 0; }

void run(const UpdateExpertBias& op, const Execution&) {
  switch (op.counts.dtype) {
    case DType::int32: return update<std::int32_t>(op);
    case DType::int64: return update<std::int64_t>(op);
    case DType::float32: return update<float>(op);
    default:
      throw Unsupported("update_expert_bias: counts must be int32, int64 or float32, got " +
                        std::string(to_string(op.counts.dtype)));
  }
}

}  // namespace intarsia::cpu
