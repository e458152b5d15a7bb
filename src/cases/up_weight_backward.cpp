// up_weight_backward on every problem of problem.h.
#include "cases/problem.h"

namespace intarsia::cases {
namespace {

UpWeightBackward make(Experts& experts, Tensors&, const Problem& p, DType) {
  const Lists& l = experts.lists();
  return {.dz = experts.expert_rows(experts.gates() * p.width),
          .x = experts.token_rows(),
          .expert_offsets = l.expert_offsets,
          .row_token = l.row_token,
          .accumulate = p.accumulate,
          .grad_scale = p.grad_scale,
          .dw_up = experts.dw_up()};
}

}  // namespace

template <>
std::vector<Case<UpWeightBackward>> cases() {
  return expert_cases<UpWeightBackward>(problems(), {.up = 1}, make);
}

template <>
std::vector<Case<UpWeightBackward>> benchmarks() {
  return expert_benchmarks<UpWeightBackward>({.up = 1}, make);
}

}  // namespace intarsia::cases
